// Tasks that were seen, and all rollouts of one task over time.

import { useEffect, useRef, useState } from "preact/hooks";
import { get, Problem, useGet } from "../api";
import { useLive } from "../live";
import { Field } from "../parts/filters";
import { useKeys } from "../parts/keys";
import { WindowedList } from "../parts/list";
import { ShortName } from "../parts/short_name";
import { VersionsChart } from "../parts/versions_chart";
import type { GroupRow, GroupsPage } from "../records";
import { go, link, setQuery, usePlace } from "../router";
import { ago, clock, count, named, number, visible } from "../text";
import { sparks } from "./groups";
import "../groups.css";

/** A row of GET /v1/tasks/seen. */
interface SeenTask {
  environment: string;
  task_id: string;
  groups: number;
  rollouts: number;
  reward_mean: number | null;
  spread: number | null;
  solved_share: number | null;
  last_time: number;
  last_version: number;
}

const ORDERS = ["newest", "worst", "best", "widest", "most"];
const PAGE = 200;
const MOST_OF_TASK = 1000;

export function TasksRoutes() {
  const [, environment, task] = usePlace().path;
  if (environment === undefined) return <Tasks />;
  if (task === undefined) return <p>There is no such task.</p>;
  return <TaskPage key={`${environment}/${task}`} environment={environment} task={task} />;
}

function Tasks() {
  const { query } = usePlace();
  const order = query.get("order") ?? "newest";
  const asked = new URLSearchParams({ order, limit: String(PAGE) });
  for (const name of ["environment", "text"]) if (query.get(name)) asked.set(name, query.get(name)!);
  const list = usePages(asked.toString());
  // Of all environments, where the list is of one.
  const text = query.get("text") ?? "";
  const others = useGet<{ tasks: SeenTask[] }>(query.get("environment") ? `v1/tasks/seen?${new URLSearchParams({ order: "newest", limit: String(PAGE), text })}` : null);
  const environments = [...new Set((others.data?.tasks ?? list.rows).map((row) => row.environment))].toSorted();
  useLive("resync", () => list.rows.length <= PAGE && list.again()); // further down, nothing moves
  const chosen = query.get("chosen");
  const keyOf = (row: SeenTask) => JSON.stringify([row.environment, row.task_id]);
  const linkOf = (row: SeenTask) => link(["tasks", row.environment, row.task_id]);
  useKeys("Tasks", [
    { key: "/", text: "search", run: () => document.querySelector<HTMLInputElement>("#filter-text")?.focus() },
    { key: "Escape", text: "choose no row", run: () => setQuery({ chosen: null }) },
  ]);
  return (
    <div class="groups-page">
      <form class="filters" role="search" onSubmit={(event) => event.preventDefault()}>
        <Field query={query} name="text" label="Search" type="search" hint="part of a task's id" />
        <Field query={query} name="environment" label="Environment" options={environments} />
        <label>
          Order
          <select value={order} onChange={(event) => setQuery({ order: event.currentTarget.value, chosen: null })}>
            {ORDERS.map((one) => (
              <option key={one} value={one}>
                {one === "most" ? "most rollouts" : one}
              </option>
            ))}
          </select>
        </label>
        <p class="groups-count dim" role="status">
          {count(list.rows.length, "task")}
          {list.isWhole ? "" : " and more"}
        </p>
      </form>
      {list.problem && (
        <p class="bad" role="alert">
          {list.problem.message} {list.problem.hint}
        </p>
      )}
      {list.isWhole && list.rows.length === 0 && !list.problem ? (
        <p class="dim">
          {query.get("text") || query.get("environment") ? (
            <>
              No task matches. <a href={link(["tasks"])}>Show all tasks</a>
            </>
          ) : (
            "No task was seen yet: one is, when the first group of its rollouts is finished."
          )}
        </p>
      ) : (
        <>
          <div class="list-head task-cells" aria-hidden="true">
            <span>task</span>
            <span>environment</span>
            <span class="right">mean</span>
            <span class="right" title="highest − lowest reward">range</span>
            <span class="right">solved</span>
            <span class="right">rollouts</span>
            <span class="right">groups</span>
            <span class="right">version</span>
            <span>last</span>
          </div>
          <div class="group-list-box">
            <WindowedList
              label="Tasks"
              className="task-list group-list"
              rows={list.rows}
              total={list.isWhole ? list.rows.length : null}
              keyOf={keyOf}
              chosen={chosen}
              choose={(key) => setQuery({ chosen: key })}
              open={(row) => go(linkOf(row))}
              linkOf={linkOf}
              line={(row) => <TaskCells row={row} />}
              more={list.more}
            />
          </div>
        </>
      )}
    </div>
  );
}

function TaskCells({ row }: { row: SeenTask }) {
  return (
    <>
      <ShortName text={row.task_id} />
      <span>{visible(row.environment)}</span>
      <span class="right">{number(row.reward_mean)}</span>
      <span class="right">{number(row.spread)}</span>
      <span class="right">{row.solved_share === null ? "–" : `${number(100 * row.solved_share, 2)} %`}</span>
      <span class="right">{number(row.rollouts)}</span>
      <span class="right">{number(row.groups)}</span>
      <span class="right">{row.last_version < 0 ? "–" : row.last_version}</span>
      <span class="dim">{ago(row.last_time)}</span>
    </>
  );
}

interface Pages {
  rows: SeenTask[];
  isWhole: boolean;
  problem: Problem | null;
  more: () => void;
  /** Reads from the start. */
  again: () => void;
}

/** Reads GET /v1/tasks/seen page by page. */
function usePages(asked: string): Pages {
  const empty = { asked, rows: [] as SeenTask[], cursor: "", isWhole: false, problem: null as Problem | null };
  const [held, hold] = useState(empty);
  const state = held.asked === asked ? held : empty;
  const [wanted, want] = useState(0);
  const [turn, setTurn] = useState(0);
  const read = useRef(0);
  useEffect(() => {
    const base = read.current === turn ? state : empty;
    read.current = turn;
    if (base.isWhole) return;
    const stop = new AbortController();
    const cursor = base.cursor ? `&cursor=${encodeURIComponent(base.cursor)}` : "";
    get<{ tasks: SeenTask[]; cursor: string }>(`v1/tasks/seen?${asked}${cursor}`, stop.signal).then(
      (page) => hold({ asked, rows: [...base.rows, ...page.tasks], cursor: page.cursor, isWhole: page.cursor === "", problem: null }),
      (error) => !stop.signal.aborted && hold({ ...state, problem: error instanceof Problem ? error : new Problem(0, String(error)) }),
    );
    return () => stop.abort();
  }, [asked, wanted, turn]);
  const again = () => setTurn((n) => n + 1);
  return { ...state, more: () => state.rows.length > 0 && !state.isWhole && want(state.rows.length), again };
}

function TaskPage({ environment, task }: { environment: string; task: string }) {
  const { query } = usePlace();
  const asked = new URLSearchParams({ environment, task, order: "newest", limit: String(MOST_OF_TASK) });
  const { data, problem } = useGet<GroupsPage>(`v1/groups?${asked}`, 30);
  const rows = data?.groups ?? [];
  const filter = { environment, task };
  const linkOf = (row: GroupRow) => link(["groups", row.group_id], filter);
  const means = rows.map((row) => row.reward_mean).filter((one): one is number => one !== null);
  const rollouts = rows.reduce((sum, row) => sum + row.size, 0);
  useKeys("Task", [{ key: "Escape", text: "back to the tasks", run: () => go(link(["tasks"])) }]);
  return (
    <article>
      <nav class="trail" aria-label="Where this is">
        <a href={link(["tasks"])}>Tasks</a> / <a href={link(["tasks"], { environment })}>{visible(environment)}</a> / <b class="mono">{named(task)}</b>
        <span class="spacer" />
        <a href={link(["groups"], filter)}>its groups, filtered and sorted</a>
      </nav>
      {problem && (
        <p class="bad" role="alert">
          {problem.message} {problem.hint}
        </p>
      )}
      {!data && !problem && <p class="dim">Reading …</p>}
      {data && rows.length === 0 && (
        <p class="dim">
          No group of this task is kept: each was dropped, removed, or is not finished. <a href={link(["failures"], { environment, task })}>Its failures</a> may say why.
        </p>
      )}
      {rows.length > 0 && (
        <>
          <p class="facts">
            <span>
              {count(rows.length, "group")}
              {data?.cursor ? " (the newest)" : ""}, {count(rollouts, "rollout")}
            </span>
            <span>mean {number(means.length ? means.reduce((sum, one) => sum + one, 0) / means.length : null)}</span>
            <span>
              from {clock(rows.at(-1)!.created_at)} to {clock(rows[0]!.created_at)}
            </span>
          </p>
          <VersionsChart groups={rows} linkOf={linkOf} />
          <div class="group-list-box task-groups">
            <WindowedList
              label="Groups of the task"
              className="group-list of-task"
              rows={rows}
              total={rows.length}
              keyOf={(row) => row.group_id}
              chosen={query.get("chosen")}
              choose={(id) => setQuery({ chosen: id })}
              open={(row) => go(linkOf(row))}
              linkOf={linkOf}
              line={(row) => (
                <>
                  <span class="dim">{clock(row.created_at)}</span>
                  <span>{row.policy_version < 0 ? "–" : `v${row.policy_version}`}</span>
                  <span class="right">{number(row.reward_mean)}</span>
                  <span class="sparks" aria-hidden="true">{sparks(row.rewards ?? [], 0, Math.max(1, row.reward_max ?? 1))}</span>
                  <span class="dim">{visible(row.model ?? "")}</span>
                </>
              )}
              more={() => {}}
            />
          </div>
        </>
      )}
    </article>
  );
}
