// The numbers of now, each beside what it was over the last hour.

import { SPAN } from "../changes";
import { type Line, mean, rates, ratios } from "../measures";
import type { Series } from "../series";
import { number } from "../text";

const of = (name: string, where?: Record<string, string>) => ({ name: `envserver_${name}`, ...(where && { where }) });
const percent = (value: number) => `${number(Math.round(10_000 * value) / 100, 2)} %`;
const short = (value: number) => number(Math.round(1000 * value) / 1000, 3);

export function Tiles({ series }: { series: Series }) {
  const lines: [string, Line | undefined, (value: number) => string][] = [
    ["Reward", ratios(series, of("stored_reward_sum"), of("stored_reward_count"), "")[0], short],
    ["Groups / min", rates(series, of("stored_groups_total"), "")[0], short],
    ["Rollouts / min", rates(series, of("rollouts_total"), "")[0], short],
    ["Completion tokens / s", rates(series, of("tokens_total", { kind: "completion" }), "", 1)[0], short],
    ["Lost rollouts", ratios(series, of("rollouts_total", { end: "lost" }), of("rollouts_total"), "")[0], percent],
    ["Staleness", ratios(series, of("staleness_versions_sum"), of("staleness_versions_count"), "")[0], short],
  ];
  const levels: [string, number | null][] = [
    ["Policy version", level(series, "policy_version")],
    ["Rollouts in workers", level(series, "rollouts_running")],
    ["Groups waiting", level(series, "groups", { state: "queued" })],
    ["Groups leased", level(series, "groups", { state: "leased" })],
  ];
  const recent = series.from((series.times.at(-1) ?? 0) - SPAN);
  return (
    <dl class="tiles">
      {levels.map(([title, value]) => (
        <div key={title} class="panel">
          <dt>{title}</dt>
          <dd>{title === "Policy version" && value !== null && value < 0 ? "none" : number(value)}</dd>
        </div>
      ))}
      {lines.map(([title, line, format]) => {
        const now = line ? mean(line, recent) : null;
        const hour = line ? mean(line, 0) : null;
        return (
          <div key={title} class="panel">
            <dt>{title}</dt>
            <dd>{now === null ? "–" : format(now)}</dd>
            <dd class="hour">{hour === null ? "" : `hour: ${format(hour)}`}</dd>
          </div>
        );
      })}
    </dl>
  );
}

/** The last value, summed over all labels. */
function level(series: Series, name: string, where?: Record<string, string>): number | null {
  const known = series.named(`envserver_${name}`, where).map(({ values }) => values.at(-1)).filter((value) => typeof value === "number");
  return known.length ? known.reduce((all, one) => all + one, 0) : null;
}
