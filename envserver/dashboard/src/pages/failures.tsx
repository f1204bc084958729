// Failures: the last thousand, whose fault they were, in which words; what was dropped, and why.

import { useEffect, useRef, useState } from "preact/hooks";
import { get, useGet } from "../api";
import { useLive } from "../live";
import { useKeys } from "../parts/keys";
import { Show } from "../parts/loaded";
import { link, setQuery, usePlace } from "../router";
import { clock, named, number, visible } from "../text";
import "./failures.css";

/** A row of GET /v1/failures. */
interface Failure {
  n: number;
  time: number;
  environment: string;
  task_id: string;
  group_id: string;
  rollout: number | null;
  attempt: number | null;
  kind: string;
  fault: string;
  message: string;
  what: "attempt" | "rollout" | "group" | "drop";
  count?: number;
  runner?: string | null;
}

interface Answer {
  failures: Failure[];
  counts: Record<string, number>;
  next: number | null;
}

const FAULTS = ["model", "environment", "engine", "trainer", "infrastructure"];
const WHATS = { attempt: "attempt, tried again", rollout: "rollout lost", group: "group lost", drop: "group dropped" };
const PAGE = 100;
const MANY_MS = 2000;

export function Failures() {
  const { query } = usePlace();
  const filter = { environment: query.get("environment") ?? "", kind: query.get("kind") ?? "", fault: query.get("fault") ?? "" };
  const path = `v1/failures?${new URLSearchParams({ limit: String(PAGE), ...given(filter) })}`;
  const first = useGet<Answer>(path, 60);
  const list = useList(path, first.data, filter);
  useLive("resync", first.again);
  // Many at once are only counted: they are read, once in two seconds.
  const waiting = useRef(0);
  useLive("failures", () => {
    waiting.current ||= window.setTimeout(() => {
      waiting.current = 0;
      first.again();
    }, MANY_MS);
  });
  useKeys("Failures", [{ key: "x", text: "show all failures", run: () => setQuery({ environment: null, kind: null, fault: null }) }]);
  return (
    <>
      <Filters filter={filter} counts={first.data?.counts ?? {}} />
      <section class="panel" aria-labelledby="failures-title">
        <h2 id="failures-title">Failures and drops</h2>
        <Show of={first} what="failures">
          {() => (
            <>
              <Table rows={list.rows} known={list.known} />
              {list.rows.length === 0 && <p class="dim">{isAny(filter) ? "None of the last 1,000 is of this kind." : "Nothing has failed since the server started."}</p>}
              {list.more && (
                <button type="button" onClick={list.more}>
                  Older
                </button>
              )}
            </>
          )}
        </Show>
      </section>
    </>
  );
}

/** The first page as it was read last, what came since, and older pages that were asked for. */
function useList(path: string, first: Answer | null, filter: Record<string, string>): { rows: Failure[]; known: number; more: (() => void) | null } {
  const known = useRef(Infinity); // what is newer came while the page was open
  const [state, set] = useState<{ path: string; rows: Failure[]; next: number | null }>({ path, rows: [], next: null });
  useEffect(() => {
    if (!first) return;
    known.current = Math.min(known.current, first.failures[0]?.n ?? 0);
    set((old) => {
      const oldest = first.failures.at(-1)?.n ?? 0;
      const newest = first.failures[0]?.n ?? 0;
      const last = old.rows[0]?.n ?? 0;
      // Smaller numbers than before: the server has started again. Much larger ones: rows are left out.
      const isOther = old.path !== path || last > newest || last < oldest;
      const older = isOther ? [] : old.rows.filter(({ n }) => n < oldest);
      return { path, rows: [...first.failures, ...older], next: older.length ? old.next : first.next };
    });
  }, [first]);
  useLive("failure", (failure: Failure) => {
    const wanted = Object.entries(given(filter)).every(([name, value]) => failure[name as keyof Failure] === value);
    if (wanted) set((old) => (old.rows.some(({ n }) => n === failure.n) ? old : { ...old, rows: [failure, ...old.rows] }));
  });
  const isShown = state.path === path;
  const more = async () => {
    const page = await get<Answer>(`${path}&before=${state.next}`);
    set((old) => (old.path === path && old.next === state.next ? { path, rows: [...old.rows, ...page.failures], next: page.next } : old));
  };
  return { rows: isShown ? state.rows : [], known: known.current, more: isShown && state.next !== null ? () => void more() : null };
}

function Filters({ filter, counts }: { filter: { environment: string; kind: string; fault: string }; counts: Record<string, number> }) {
  return (
    <form class="row" aria-label="Filter" onSubmit={(event) => event.preventDefault()}>
      <label>
        whose fault
        <select value={filter.fault} onChange={(event) => setQuery({ fault: event.currentTarget.value })}>
          <option value="">all</option>
          {FAULTS.map((name) => (
            <option key={name} value={name}>
              {name}
            </option>
          ))}
        </select>
      </label>
      <label>
        environment
        <input type="search" value={filter.environment} size={12} onChange={(event) => setQuery({ environment: event.currentTarget.value })} />
      </label>
      <span class="choice" role="group" aria-label="Kind">
        <a href={link(["failures"], { ...filter, kind: "" })} aria-current={filter.kind === ""}>
          all kinds
        </a>
        {Object.entries(counts).map(([kind, count]) => (
          <a key={kind} href={link(["failures"], { ...filter, kind })} aria-current={filter.kind === kind}>
            {visible(kind)} <b>{number(count)}</b>
          </a>
        ))}
      </span>
    </form>
  );
}

function Table({ rows, known }: { rows: Failure[]; known: number }) {
  return (
    <div class="scroll" tabIndex={0} role="group" aria-label="Failures and drops">
      <table class="failures">
        <thead>
          <tr>
            <th scope="col">when</th>
            <th scope="col">fault</th>
            <th scope="col">kind</th>
            <th scope="col">what</th>
            <th scope="col">in words</th>
            <th scope="col">task</th>
            <th scope="col">rollout</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={row.n} class={row.n > known ? "fresh" : undefined}>
              <td class="dim n">{clock(row.time)}</td>
              <td>
                <span class={`badge ${row.fault === "model" ? "" : row.what === "attempt" ? "warn" : "bad"}`}>{visible(row.fault)}</span>
              </td>
              <td>{visible(row.kind)}</td>
              <td class="dim">
                {WHATS[row.what] ?? row.what}
                {(row.count ?? 1) > 1 && ` × ${row.count}`}
              </td>
              <td class="words">{visible(row.message)}</td>
              <td>
                <Task row={row} />
              </td>
              <td>
                <Rollout row={row} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Task({ row }: { row: Failure }) {
  if (!row.task_id) return <>{visible(row.environment)}</>;
  return (
    <>
      {visible(row.environment)} <a href={link(["tasks", row.environment, row.task_id])}>{named(row.task_id)}</a>
    </>
  );
}

/** A link, where the group may have been delivered all the same. */
function Rollout({ row: { group_id, rollout, attempt, what, runner } }: { row: Failure }) {
  if (runner) return <>runner {visible(runner)}</>;
  if (!group_id || what === "group" || what === "drop") return <span class="dim mono">{visible(group_id)}</span>;
  const path = rollout === null ? ["groups", group_id] : ["groups", group_id, String(rollout)];
  return (
    <>
      <a href={link(path)}>{rollout === null ? "group" : `number ${rollout}`}</a> {attempt !== null && <span class="dim">attempt {attempt}</span>}
    </>
  );
}

function given(filter: Record<string, string>): Record<string, string> {
  return Object.fromEntries(Object.entries(filter).filter(([, value]) => value));
}

function isAny(filter: Record<string, string>): boolean {
  return Object.values(filter).some(Boolean);
}
