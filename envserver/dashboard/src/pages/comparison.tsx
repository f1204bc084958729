// "#/comparison?a=RUN&b=RUN": two runs task by task; each row leads to both groups side by side.

import { useEffect, useRef, useState } from "preact/hooks";
import { get, Problem, useGet } from "../api";
import { Interval, intervalText, type Mean } from "../parts/interval";
import { useKeys } from "../parts/keys";
import { link, setQuery, usePlace } from "../router";
import { named, number, visible } from "../text";
import { type Evaluations, RunChoice } from "./evaluations";

interface Paired {
  tasks: number;
  a: number;
  b: number;
  difference: Mean;
  test: { p_value: number; exact: boolean };
  better: number;
  worse: number;
  equal: number;
}

interface Part {
  name: string;
  reward: Paired | null;
  passed: Paired | null;
  fourfold: { both: number; only_a: number; only_b: number; neither: number } | null;
}

interface Task {
  environment: string;
  task_id: string;
  a_mean: number;
  b_mean: number;
  difference: number;
  a_rewards: number[];
  b_rewards: number[];
  a_group: string | null;
  b_group: string | null;
}

interface Comparison {
  a: string;
  b: string;
  models: [string, string];
  parts: Part[];
  together: Part | null;
  settings: Record<string, [unknown, unknown]>;
  verdicts: string[];
  notes: string[];
  tasks: Task[];
  total: number;
  cursor: string;
}

const ORDERS = { worst: "largest loss first", best: "largest gain first", task: "by task" };
const TASK_PARAMETERS = ["a", "b", "order", "environment", "text"] as const;

export function ComparisonPage() {
  const { query } = usePlace();
  const wanted = new URLSearchParams();
  for (const name of TASK_PARAMETERS) if (query.get(name)) wanted.set(name, query.get(name)!);
  const path = `v1/comparison?${wanted}`;
  const { data, problem } = useGet<Comparison>(path, 30);
  const runs = useGet<Evaluations>("v1/evaluations").data?.evaluations.map((one) => one.name) ?? [];
  // While other tasks are read, what is shown stays: the search keeps the focus.
  const [shown, show] = useState<Comparison | null>(null);
  useEffect(() => {
    if (data) show(data);
  }, [data]);
  return (
    <>
      {runs.length > 1 && (
        <p class="panel row">
          <RunChoice label="First" name="a" value={query.get("a") ?? runs[0]!} runs={runs} />
          <RunChoice label="second" name="b" value={query.get("b") ?? runs[1]!} runs={runs} />
          <a href={link(["comparison"], { a: query.get("b") ?? runs[1]!, b: query.get("a") ?? runs[0]! })}>The other way round</a>
        </p>
      )}
      {problem && <p class="panel banner warn">{visible(problem.message)}</p>}
      {shown ? <Shown found={shown} path={path} /> : !problem && <p role="status">Comparing …</p>}
    </>
  );
}

function Shown({ found, path }: { found: Comparison; path: string }) {
  const settings = Object.entries(found.settings);
  return (
    <>
      <section class="panel" aria-label="Result">
        <h2>
          {visible(found.b)} against {visible(found.a)}
        </h2>
        {found.verdicts.map((verdict) => (
          <p key={verdict}>{visible(verdict)}</p>
        ))}
        <Parts found={found} />
        <details>
          <summary>How it was compared</summary>
          <ul>
            {found.notes.map((note) => (
              <li key={note}>{visible(note)}</li>
            ))}
          </ul>
        </details>
        {settings.length > 0 && (
          <details>
            <summary>Settings that differ</summary>
            <table>
              <tbody>
                {settings.map(([name, [one, two]]) => (
                  <tr key={name}>
                    <th scope="row">{visible(name)}</th>
                    <td class="words">{visible(JSON.stringify(one))}</td>
                    <td class="words">{visible(JSON.stringify(two))}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </details>
        )}
      </section>
      <Tasks found={found} path={path} />
    </>
  );
}

function Parts({ found }: { found: Comparison }) {
  const parts = [...found.parts, ...(found.together ? [found.together] : [])];
  const pairs = parts.flatMap((part) =>
    [
      { name: part.name, measure: "mean reward", pair: part.reward, part },
      { name: part.name, measure: "passed", pair: part.passed, part },
    ].flatMap(({ pair, ...rest }) => (pair ? [{ ...rest, pair }] : [])),
  );
  const span = Math.max(
    0.001,
    ...pairs.flatMap(({ pair: { difference } }) => [difference.low, difference.high, difference.value].map((one) => Math.abs(one ?? 0))),
  );
  return (
    <div class="scroll" tabIndex={0} role="group" aria-label="Differences">
      <table>
        <thead>
          <tr>
            <th scope="col">Environment</th>
            <th scope="col">Measure</th>
            <th scope="col" class="n">{visible(found.a)}</th>
            <th scope="col" class="n">{visible(found.b)}</th>
            <th scope="col">Difference, 95 %</th>
            <th scope="col">
              <span class="dim">
                −{number(span)} to {number(span)}
              </span>
            </th>
            <th scope="col" class="n">p</th>
            <th scope="col" class="n">Better</th>
            <th scope="col" class="n">Worse</th>
            <th scope="col" class="n">Equal</th>
          </tr>
        </thead>
        <tbody>
          {pairs.map(({ name, measure, pair }) => (
            <tr key={`${name}/${measure}`}>
              <th scope="row">{visible(name)}</th>
              <td>{measure}</td>
              <td class="n">{number(pair.a)}</td>
              <td class="n">{number(pair.b)}</td>
              <td class="n">{intervalText(pair.difference, true)}</td>
              <td>
                <Interval mean={pair.difference} ends={[-span, span]} zero />
              </td>
              <td class="n">
                {number(pair.test.p_value)}
                {pair.test.exact ? "" : "*"}
              </td>
              <td class="n">{number(pair.better)}</td>
              <td class="n">{number(pair.worse)}</td>
              <td class="n">{number(pair.equal)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {parts.map(
        ({ name, fourfold }) =>
          fourfold && (
            <p key={name}>
              {visible(name)}: {fourfold.both} tasks passed by both, {fourfold.only_a} only by {visible(found.a)}, {fourfold.only_b} only
              by {visible(found.b)}, {fourfold.neither} by neither.
            </p>
          ),
      )}
    </div>
  );
}

function Tasks({ found, path }: { found: Comparison; path: string }) {
  const { query } = usePlace();
  const [read, setMore] = useState<{ path: string; tasks: Task[]; cursor: string } | null>(null);
  const [problem, setProblem] = useState("");
  const more = read?.path === path ? read : null;
  const search = useRef<HTMLInputElement>(null);
  useKeys("Comparison", [
    { key: "j", text: "next task", run: () => focusPair(1) },
    { key: "k", text: "previous task", run: () => focusPair(-1) },
    { key: "/", text: "search a task", run: () => search.current?.focus() },
  ]);
  const cursor = more?.cursor ?? found.cursor;
  const tasks = [...found.tasks, ...(more?.tasks ?? [])];
  const readMore = async () => {
    try {
      const next = await get<Comparison>(`${path}&cursor=${encodeURIComponent(cursor)}`);
      setMore({ path, tasks: [...(more?.tasks ?? []), ...next.tasks], cursor: next.cursor });
    } catch (error) {
      setProblem(error instanceof Problem ? error.message : String(error));
    }
  };
  return (
    <section class="panel" aria-label="Tasks">
      <h2>Tasks</h2>
      <p class="row">
        <label>
          Order
          <select value={query.get("order") ?? "worst"} onChange={(event) => setQuery({ order: event.currentTarget.value })}>
            {Object.entries(ORDERS).map(([name, words]) => (
              <option key={name} value={name}>
                {words}
              </option>
            ))}
          </select>
        </label>
        {found.parts.length > 1 && (
          <label>
            Environment
            <select value={query.get("environment") ?? ""} onChange={(event) => setQuery({ environment: event.currentTarget.value })}>
              <option value="">all</option>
              {found.parts.map(({ name }) => (
                <option key={name} value={name}>
                  {visible(name)}
                </option>
              ))}
            </select>
          </label>
        )}
        <label>
          Search
          <input ref={search} type="search" value={query.get("text") ?? ""} onInput={(event) => setQuery({ text: event.currentTarget.value })} />
        </label>
        <span class="dim" role="status">
          {number(found.total)} tasks
        </span>
      </p>
      <div class="scroll" tabIndex={0} role="group" aria-label="Tasks of both runs">
        <table>
          <thead>
            <tr>
              <th scope="col">Task</th>
              <th scope="col" class="n">{visible(found.a)}</th>
              <th scope="col" class="n">{visible(found.b)}</th>
              <th scope="col" class="n">Difference</th>
              <th scope="col" class="n">Groups</th>
            </tr>
          </thead>
          <tbody>
            {tasks.map((task) => (
              <Row key={`${task.environment}/${task.task_id}`} task={task} found={found} />
            ))}
          </tbody>
        </table>
      </div>
      {problem && <p class="bad">{visible(problem)}</p>}
      {cursor && (
        <button type="button" onClick={readMore}>
          More tasks
        </button>
      )}
    </section>
  );
}

/** Moves the focus by so many links to two groups; Enter then follows the link. */
function focusPair(by: number): void {
  const links = [...document.querySelectorAll<HTMLElement>("a.pair")];
  const at = links.findIndex((one) => one === document.activeElement);
  links[Math.min(links.length - 1, Math.max(0, at + by))]?.focus();
}

function Row({ task, found }: { task: Task; found: Comparison }) {
  const { a_group: a, b_group: b, difference } = task;
  const sign = difference > 1e-9 ? "good" : difference < -1e-9 ? "bad" : "dim";
  const arrow = { good: "▲ +", bad: "▼ ", dim: "" }[sign];
  return (
    <tr>
      <th scope="row" class="words">
        {found.parts.length > 1 && <span class="dim">{visible(task.environment)} </span>}
        {named(task.task_id)}
      </th>
      <td class="n" title={task.a_rewards.map((one) => number(one)).join(", ")}>
        {number(task.a_mean)}
      </td>
      <td class="n" title={task.b_rewards.map((one) => number(one)).join(", ")}>
        {number(task.b_mean)}
      </td>
      <td class={`n ${sign}`}>
        {arrow}
        {number(difference)}
      </td>
      <td class="n">
        {a && b && (
          <a class="pair" href={link(["compare"], { a, b })}>
            side by side
          </a>
        )}{" "}
        {a && <a href={link(["groups", a])}>{visible(found.a)}</a>}{" "}
        {b && <a href={link(["groups", b])}>{visible(found.b)}</a>}
      </td>
    </tr>
  );
}
