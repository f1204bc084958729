// What went wrong, and the last thousand failures: whose fault they were, in which words; what was dropped, and why.

import { useEffect, useRef, useState } from "preact/hooks";
import { type Loaded, useGet } from "../api";
import { useLive } from "../live";
import { groupedBy } from "../night";
import { Choice } from "../parts/filters";
import { useKeys } from "../parts/keys";
import { Show } from "../parts/loaded";
import { Night } from "../parts/night";
import type { Failure } from "../records";
import { link, setQuery, usePlace } from "../router";
import { useSource } from "../source";
import { clock, count, named, number, visible } from "../text";
import "./failures.css";

interface Answer {
  failures: Failure[];
}

const WHATS = { attempt: "attempt, tried again", rollout: "rollout lost", group: "group lost", drop: "group dropped" };
const FIELDS = ["fault", "environment", "task", "kind"] as const;
/** All that the server keeps. */
const MOST = 1000;
const PAGE = 100;
const MANY_MS = 5000;

type Filter = Record<(typeof FIELDS)[number], string>;

export function Failures() {
  const { query } = usePlace();
  const source = useSource();
  const filter = Object.fromEntries(FIELDS.map((name) => [name, query.get(name) ?? ""])) as Filter;
  const { read, all, known } = useFailures();
  const [length, setLength] = useState(PAGE);
  const rows = all.filter((row) => isOf(row, filter));
  useKeys("Failures", [{ key: "x", text: "show all failures", run: () => setQuery(Object.fromEntries(FIELDS.map((name) => [name, null]))) }]);
  return (
    <>
      {source?.parts.includes("overview") && <Night failures={all} />}
      <section class="panel" aria-labelledby="failures-title">
        <h2 id="failures-title">Failures and drops, the newest first</h2>
        <Filters filter={filter} all={all} query={query} />
        <Show of={read} what="failures">
          {() => (
            <>
              {rows.length > 0 && <Table rows={rows.slice(0, length)} known={known} />}
              {rows.length === 0 && (
                <p class="dim">
                  {all.length === 0 ? (
                    "Nothing has failed since the server started."
                  ) : (
                    <>
                      None of the last {count(all.length, "failure")} matches. <a href={link(["failures"])}>Show all failures</a>
                    </>
                  )}
                </p>
              )}
              {rows.length > length && (
                <button type="button" onClick={() => setLength(length + PAGE)}>
                  Older
                </button>
              )}
              {all.length >= MOST && <p class="dim">The server keeps the last {number(MOST)} failures; the log has all.</p>}
            </>
          )}
        </Show>
      </section>
    </>
  );
}

/** The failures that the server keeps, and what came since they were read. */
function useFailures(): { read: Loaded<Answer>; all: Failure[]; known: number } {
  const read = useGet<Answer>(`v1/failures?limit=${MOST}`, 60);
  const [later, add] = useState<Failure[]>([]);
  const known = useRef(Infinity); // what is newer came while the page was open
  const failures = read.data?.failures ?? [];
  const newest = failures[0]?.n ?? 0;
  if (read.data) known.current = Math.min(known.current, newest);
  useLive("resync", () => {
    add([]); // a server that started again counts anew
    read.again();
  });
  // Many at once are only counted: they are read.
  const waiting = useRef(0);
  useEffect(() => () => clearTimeout(waiting.current), []);
  useLive("failures", () => {
    waiting.current ||= window.setTimeout(() => {
      waiting.current = 0;
      read.again();
    }, MANY_MS);
  });
  useLive("failure", (failure: Failure) => add((old) => (old.some(({ n }) => n === failure.n) ? old : [failure, ...old].slice(0, MOST))));
  return { read, all: [...later.filter(({ n }) => n > newest), ...failures], known: known.current };
}

function isOf(row: Failure, { task, ...others }: Filter, but?: string): boolean {
  return Object.entries({ ...others, task_id: task }).every(([name, value]) => !value || name === but || row[name as keyof Failure] === value);
}

function Filters({ filter, all, query }: { filter: Filter; all: Failure[]; query: URLSearchParams }) {
  // Only what gives a list that is not empty.
  const values = (name: "fault" | "environment") =>
    [...new Set(all.filter((row) => isOf(row, filter, name)).map((row) => row[name]))].filter(Boolean).toSorted();
  const kinds = groupedBy(
    all.filter((row) => isOf(row, filter, "kind")),
    ({ kind }) => kind,
  );
  const to = (kind: string) => link(["failures"], { ...Object.fromEntries(query), kind });
  return (
    <form class="row" aria-label="Filter" onSubmit={(event) => event.preventDefault()}>
      <Choice query={query} name="fault" label="Whose fault" options={values("fault")} />
      <Choice query={query} name="environment" label="Environment" options={values("environment")} />
      {filter.task && (
        <button type="button" onClick={() => setQuery({ task: null })}>
          only {named(filter.task)} ✕
        </button>
      )}
      <span class="choice" role="group" aria-label="Kind">
        <a href={to("")} aria-current={filter.kind === ""}>
          all kinds
        </a>
        {[...kinds].toSorted().map(([kind, alike]) => (
          <a key={kind} href={to(kind)} aria-current={filter.kind === kind}>
            {visible(kind)} <b>{number(alike.reduce((sum, row) => sum + (row.count ?? 1), 0))}</b>
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
