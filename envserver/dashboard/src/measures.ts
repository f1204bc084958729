// From counters to what people read: rates, means and shares over time, smoothed; over versions.

import type { Curve, Series } from "./series";

/** What is measured, by row: `above` / `below`. A rate has seconds below, a mean has a count. */
export interface Line {
  label: string;
  above: (number | null)[];
  below: (number | null)[];
  /** A level that is read, not counted: its value is `above`. */
  isLevel: boolean;
}

/** Which curves: by name, and of these labels. */
export interface Pick {
  name: string;
  where?: Record<string, string>;
}

/** By a label; "": all together; or by what is made of the labels. */
export type By = string | ((labels: Record<string, string>) => string);

/** How often something happens, `per` so many seconds. */
export function rates(series: Series, pick: Pick, by: By, per = 60): Line[] {
  const seconds = series.times.map((time, row) => (row ? (time - series.times[row - 1]!) / per : null));
  return [...grouped(series, pick, by)].map(([label, curves]) => {
    const above = sums(curves.map((curve) => series.growth(curve)));
    return { label, above, below: seconds.map((span, row) => (above[row] === null ? null : span)), isLevel: false };
  });
}

/** The growth of one counter by that of another, or of several: means, shares. */
export function ratios(series: Series, above: Pick, below: Pick | Pick[], by: By): Line[] {
  const tops = grouped(series, above, by);
  return [...grouped(series, below, by)].map(([label, curves]) => {
    const bottom = sums(curves.map((curve) => series.growth(curve)));
    const top = sums((tops.get(label) ?? []).map((curve) => series.growth(curve)));
    return {
      label,
      above: bottom.map((count, row) => (count === null ? null : (top[row] ?? 0))),
      below: bottom,
      isLevel: false,
    };
  });
}

/** Each line's share of them all. */
export function shares(series: Series, pick: Pick, by: By): Line[] {
  const parts = rates(series, pick, by);
  const all = sums(parts.map((one) => one.above));
  return parts.map((one) => ({
    ...one,
    above: all.map((sum, row) => (sum === null ? null : (one.above[row] ?? 0))),
    below: all,
  }));
}

/** Levels, summed by a label. */
export function levels(series: Series, pick: Pick, by: By): Line[] {
  return [...grouped(series, pick, by)].map(([label, curves]) => {
    const above = sums(curves.map((curve) => curve.values));
    return { label, above, below: above.map((value) => (value === null ? null : 1)), isLevel: true };
  });
}

/** The value of each row; null where nothing happened. */
export function raw(line: Line): (number | null)[] {
  return line.above.map((above, row) => quotient(above, line.below[row]));
}

/** Moving mean with exponential weights: what happened `seconds` ago counts for 1/e. */
export function smoothed(line: Line, times: number[], gaps: boolean[], seconds: number): (number | null)[] {
  let above = 0;
  let below = 0;
  let heard = -Infinity;
  return times.map((time, row) => {
    const weight = row ? Math.exp(-(time - times[row - 1]!) / seconds) : 0;
    const known = gaps[row] ? 0 : weight; // after a gap all begins anew
    above = above * known + (line.above[row] ?? 0);
    below = below * known + (line.below[row] ?? 0);
    if (line.below[row]) heard = time;
    return time - heard > 5 * seconds ? null : quotient(above, below);
  });
}

/** Sums from row `from` up to, without, `to`. */
export function total(line: Line, from: number, to = line.above.length): { above: number; below: number } {
  const sum = (values: (number | null)[]) => values.slice(from, to).reduce<number>((all, one) => all + (one ?? 0), 0);
  return { above: sum(line.above), below: sum(line.below) };
}

/** The mean from row `from` up to `to`; null where nothing happened. */
export function mean(line: Line, from: number, to?: number): number | null {
  const { above, below } = total(line, from, to);
  return quotient(above, below);
}

/** A line over policy versions: its mean while each version was the published one. */
export function overVersions(series: Series, lines: Line[], from: number): { versions: number[]; values: (number | null)[][] } {
  const at = series.named("envserver_policy_version")[0]?.values ?? [];
  const versions = [...new Set(at.slice(from).filter((one) => one !== null && one >= 0))].toSorted((a, b) => a! - b!) as number[];
  const values = lines.map((line) =>
    versions.map((version) => {
      let above = 0;
      let below = 0;
      for (let row = from; row < at.length; row++) {
        if (at[row] !== version) continue;
        above += line.above[row] ?? 0;
        below += line.below[row] ?? 0;
      }
      return quotient(above, below);
    }),
  );
  return { versions, values };
}

function grouped(series: Series, picks: Pick | Pick[], by: By): Map<string, Curve[]> {
  const groups = new Map<string, Curve[]>();
  for (const curve of [picks].flat().flatMap(({ name, where }) => series.named(name, where))) {
    const label = typeof by === "function" ? by(curve.labels) : (curve.labels[by] ?? "");
    groups.set(label, [...(groups.get(label) ?? []), curve]);
  }
  return new Map([...groups].toSorted(([a], [b]) => a.localeCompare(b)));
}

/** Adds columns row by row; null where all are null. */
function sums(columns: (number | null)[][]): (number | null)[] {
  const first = columns[0] ?? [];
  return first.map((_, row) => {
    const known = columns.map((column) => column[row]).filter((value) => value !== null && value !== undefined);
    return known.length ? known.reduce((all, one) => all + one, 0) : null;
  });
}

function quotient(above: number | null | undefined, below: number | null | undefined): number | null {
  return above === null || above === undefined || !below ? null : above / below;
}
