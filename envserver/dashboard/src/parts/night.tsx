// What went wrong: failures of a night by kind, since when, since which version, and the tasks most hit.

import { useLong } from "../history";
import { mean, ratios, total } from "../measures";
import { groupedBy, type Trouble, troubles } from "../night";
import type { Failure } from "../records";
import { link, usePlace } from "../router";
import { clock, count, named, number, visible } from "../text";
import type { Series } from "../series";
import { Charts } from "./figures";

const RANGES = [
  { name: "1h", title: "1 h", seconds: 3600 },
  { name: "12h", title: "12 h", seconds: 43_200 },
  { name: "24h", title: "24 h", seconds: 86_400 },
  { name: "7d", title: "7 d", seconds: 604_800 },
];
const POINTS = 360;
const MOST_TASKS = 3;

/** @param failures - The latest that the server keeps. */
export function Night({ failures }: { failures: Failure[] }) {
  const { query } = usePlace();
  const range = RANGES.find(({ name }) => name === query.get("range")) ?? RANGES[1]!;
  const { series, problem } = useLong(range.seconds, POINTS);
  const start = (series?.times.at(-1) ?? 0) - range.seconds;
  const found = series ? troubles(series, start) : [];
  return (
    <section class="panel night" aria-labelledby="night-title">
      <div class="row">
        <h2 id="night-title">What went wrong</h2>
        <span class="choice" role="group" aria-label="Of the last">
          {RANGES.map(({ name, title }) => (
            <a key={name} href={link(["failures"], { ...Object.fromEntries(query), range: name })} aria-current={name === range.name}>
              {title}
            </a>
          ))}
        </span>
      </div>
      {!series && <p class={problem ? "bad" : "dim"}>{problem?.message ?? "Reading the numbers …"}</p>}
      {series && (
        <>
          <p>{summary(series, start)}</p>
          {found.length > 0 ? <Table found={found} failures={failures} start={start} query={query} /> : <p class="good">✓ Nothing failed in this time.</p>}
          <details>
            <summary>Curves of this time</summary>
            <Charts ids={["reward", "ends", "failures", "drops", "errors", "deaths"]} series={series} seconds={range.seconds} />
          </details>
        </>
      )}
    </section>
  );
}

/** "From 22:00:01: 4,031 rollouts, 1.2 % lost. Policy version 3 → 45. The server started again 2 times." */
function summary(series: Series, start: number): string {
  const from = series.from(start);
  const rollouts = { name: "envserver_rollouts_total" };
  const [lost] = ratios(series, { ...rollouts, where: { end: "lost" } }, rollouts, "");
  const versions = (series.named("envserver_policy_version")[0]?.values ?? []).slice(from).filter((one) => typeof one === "number" && one >= 0);
  const starts = series.restarts().slice(from).filter(Boolean).length;
  const share = lost ? mean(lost, from) : null;
  return [
    `Since ${clock(series.times[from] ?? start)}:`,
    lost ? `${count(total(lost, from).below, "rollout")} ended${share ? `, ${number(100 * share, 2)} % of them lost` : ""}.` : "no rollout ended.",
    versions.length > 0 && `Policy version ${versions[0] === versions.at(-1) ? versions[0] : `${versions[0]} → ${versions.at(-1)}`}.`,
    starts > 0 && `The server started again ${starts === 1 ? "once" : `${starts} times`}.`,
  ]
    .filter(Boolean)
    .join(" ");
}

function Table({ found, failures, start, query }: { found: Trouble[]; failures: Failure[]; start: number; query: URLSearchParams }) {
  const range = query.get("range");
  const oldest = failures.at(-1)?.time;
  return (
    <div class="scroll" tabIndex={0} role="group" aria-label="What went wrong, by kind">
      <table>
        <thead>
          <tr>
            <th scope="col">kind</th>
            <th scope="col" class="n">how many</th>
            <th scope="col">first</th>
            <th scope="col">since version</th>
            <th scope="col">last</th>
            <th scope="col">environments</th>
            <th scope="col">tasks most hit</th>
          </tr>
        </thead>
        <tbody>
          {found.map((trouble) => {
            const { kind, what, first, versions } = trouble;
            const isOf = ({ what }: Failure) => (trouble.what === "groups" ? what === "group" || what === "drop" : what === "attempt" || what === "rollout");
            const rows = what === "engine calls" ? [] : failures.filter((row) => row.kind === kind && row.time >= start && isOf(row));
            const exact = rows.map(({ time }) => time).filter((time) => time > first.from && time <= first.to);
            return (
              <tr key={`${what} ${kind}`}>
                <th scope="row">{rows.length ? <a href={link(["failures"], { kind, range })}>{visible(kind)}</a> : visible(kind)}</th>
                <td class="n">
                  <b>{number(trouble.count)}</b> {what}
                </td>
                <td data-name="first">
                  {clock(exact.length ? Math.min(...exact) : first.to)} {trouble.isOld && <span class="dim">and before</span>}
                </td>
                <td data-name="since version">{between(versions)}</td>
                <td data-name="last">{clock(Math.max(trouble.last, ...rows.map(({ time }) => time)))}</td>
                <td data-name="environments">{visible(trouble.environments.join(", ")) || "–"}</td>
                <td data-name="tasks most hit">
                  <Tasks rows={rows} kind={kind} range={range} />
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
      {oldest !== undefined && <p class="dim">Tasks: of the {count(failures.length, "failure")} since {clock(oldest)} that the server still knows one by one.</p>}
    </div>
  );
}

/** "v3", or "v3 to v5" where it came while versions changed. */
function between([before, after]: [number, number]): string {
  const [from, to] = [before, after].map((version) => (version < 0 ? "none" : `v${version}`));
  return from === to ? to! : `${from} to ${to}`;
}

function Tasks({ rows, kind, range }: { rows: Failure[]; kind: string; range: string | null }) {
  const tasks = [...groupedBy(rows.filter((row) => row.task_id), ({ environment, task_id }) => JSON.stringify([environment, task_id]))]
    .map(([, alike]) => ({ environment: alike[0]!.environment, task: alike[0]!.task_id, times: alike.length }))
    .toSorted((a, b) => b.times - a.times);
  if (tasks.length === 0) return <span class="dim">–</span>;
  return (
    <>
      {tasks.slice(0, MOST_TASKS).map(({ environment, task, times }) => (
        <div key={`${environment} ${task}`}>
          <a href={link(["failures"], { kind, environment, task, range })}>{named(task)}</a> <span class="dim">{times} ×</span>
        </div>
      ))}
      {tasks.length > MOST_TASKS && <div class="dim">and {count(tasks.length - MOST_TASKS, "task")} more</div>}
    </>
  );
}
