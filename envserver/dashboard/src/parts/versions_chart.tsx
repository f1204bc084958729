// Rewards of groups or evaluations over policy versions (or over time): a dot a rollout, a line through the means.

import type { GroupRow } from "../records";
import { clock, number } from "../text";

const WIDE = 720;
const NARROW = 360; // of a small screen, so that its text can be read
const HEIGHT = 200;
const LEFT = 44;
const BOTTOM = 22;

/** What is drawn of a group, or of an evaluation. */
type Drawn = Pick<GroupRow, "group_id" | "policy_version" | "created_at" | "size" | "rewards" | "reward_mean" | "reward_min" | "reward_max">;

export function VersionsChart<Row extends Drawn>({ groups, linkOf, of = "groups" }: { groups: Row[]; linkOf: (row: Row) => string; of?: string }) {
  const scored = groups.filter((row) => row.reward_mean !== null).toSorted((a, b) => a.created_at - b.created_at);
  if (scored.length === 0) return null;
  const width = innerWidth < 560 ? NARROW : WIDE;
  const byVersion = new Set(scored.map((row) => row.policy_version)).size > 1;
  const xOf = (row: Drawn) => (byVersion ? row.policy_version : row.created_at);
  const xs = scored.map(xOf);
  const ys = scored.flatMap((row) => [row.reward_min ?? 0, row.reward_max ?? 0]);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const [y0, y1] = [Math.min(0, ...ys), Math.max(1, ...ys)];
  const left = (x: number) => LEFT + 8 + ((x - x0) / (x1 - x0 || 1)) * (width - LEFT - 16);
  const top = (y: number) => 8 + (1 - (y - y0) / (y1 - y0)) * (HEIGHT - BOTTOM - 16);
  const line = meansOf(scored, xOf).map(([x, y]) => `${left(x).toFixed(1)},${top(y).toFixed(1)}`);
  const say = (x: number) => (byVersion ? (x < 0 ? "no version" : `version ${x}`) : clock(x));
  return (
    <figure class="versions">
      <svg viewBox={`0 0 ${width} ${HEIGHT}`} role="group" aria-label={`Rewards of ${scored.length} ${of} over ${byVersion ? "policy versions" : "time"}`}>
        {[y0, (y0 + y1) / 2, y1].map((y) => (
          <g key={y}>
            <line class="rule" x1={LEFT} x2={width} y1={top(y)} y2={top(y)} />
            <text x={LEFT - 6} y={top(y) + 4} text-anchor="end">
              {number(y)}
            </text>
          </g>
        ))}
        <polyline class="means" points={line.join(" ")} />
        {scored.map((row) => (
          <a key={row.group_id} href={linkOf(row)} aria-label={`${say(xOf(row))}: mean ${number(row.reward_mean)}`}>
            <title>{`${say(xOf(row))}: mean ${number(row.reward_mean)} of ${row.size}`}</title>
            {dotsOf(row).map((y) => (
              <circle key={y} class="dot" cx={left(xOf(row))} cy={top(y)} r={2.5} />
            ))}
            <circle class="mean" cx={left(xOf(row))} cy={top(row.reward_mean!)} r={4} />
          </a>
        ))}
        <text x={LEFT} y={HEIGHT - 4}>
          {say(x0)}
        </text>
        <text x={width} y={HEIGHT - 4} text-anchor="end">
          {say(x1)}
        </text>
      </svg>
    </figure>
  );
}

/** Different rewards of a group. */
function dotsOf(row: Drawn): number[] {
  return [...new Set((row.rewards ?? []).filter((one): one is number => one !== null))];
}

/** The mean at each x, in order. */
function meansOf<Row extends Drawn>(groups: Row[], xOf: (row: Row) => number): [number, number][] {
  const at = new Map<number, number[]>();
  for (const row of groups) at.set(xOf(row), [...(at.get(xOf(row)) ?? []), row.reward_mean!]);
  return [...at.entries()].sort(([a], [b]) => a - b).map(([x, means]) => [x, means.reduce((sum, one) => sum + one, 0) / means.length]);
}
