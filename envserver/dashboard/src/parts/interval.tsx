// A mean with its 95 % interval, drawn on a line that has the same ends for all rows, and in words.

import { number } from "../text";
import "./interval.css";

const WIDTH = 112;
const HEIGHT = 14;

export interface Mean {
  value: number | null;
  low: number | null;
  high: number | null;
}

/** "0.44 [0.21, 0.66]"; with `sign`: "+0.04 [−0.01, +0.09]". */
export function intervalText({ value, low, high }: Mean, sign = false): string {
  const text = (one: number | null) => (sign && one !== null && one > 0 ? "+" : "") + number(one);
  return low === null || high === null ? text(value) : `${text(value)} [${text(low)}, ${text(high)}]`;
}

/** @param ends - The values at the left and the right end. `zero`: mark 0. */
export function Interval({ mean, ends, zero = false }: { mean: Mean; ends: [number, number]; zero?: boolean }) {
  if (mean.value === null) return null;
  const span = ends[1] - ends[0] || 1;
  const at = (value: number) => Math.min(1, Math.max(0, (value - ends[0]) / span)) * (WIDTH - 8) + 4;
  const middle = HEIGHT / 2;
  return (
    <svg class="interval" width={WIDTH} height={HEIGHT} aria-hidden="true">
      <line class="axis" x1={4} x2={WIDTH - 4} y1={middle} y2={middle} />
      {zero && <line class="zero" x1={at(0)} x2={at(0)} y1={1} y2={HEIGHT - 1} />}
      {mean.low !== null && mean.high !== null && (
        <line class="range" x1={at(mean.low)} x2={at(mean.high)} y1={middle} y2={middle} />
      )}
      <circle cx={at(mean.value)} cy={middle} r={3.5} />
    </svg>
  );
}
