// What went wrong in a time: failures by kind, since when and since which policy version.

import type { Curve, Series } from "./series";

export interface Trouble {
  kind: string;
  what: "attempts" | "groups" | "engine calls";
  count: number;
  environments: string[];
  /** The span in which it came first. */
  first: { from: number; to: number };
  last: number;
  /** Policy versions of the first span; -1: none was published. */
  versions: [number, number];
  /** Whether it had happened before, too. */
  isOld: boolean;
}

/** Equal rewards are a statistic, not a failure. */
const STATISTIC = "zero_variance";
const COUNTERS: [string, string, Trouble["what"]][] = [
  ["envserver_failed_attempts_total", "kind", "attempts"],
  ["envserver_groups_dropped_total", "reason", "groups"],
  ["envserver_engine_errors_total", "kind", "engine calls"],
];

/** What failed since `start`, the most frequent first. */
export function troubles(series: Series, start: number): Trouble[] {
  const from = Math.max(1, series.from(start));
  const versions = series.named("envserver_policy_version")[0]?.values ?? [];
  const found = COUNTERS.flatMap(([name, label, what]) => {
    const curves = groupedBy(series.named(name), (curve) => curve.labels[label] ?? "");
    curves.delete(STATISTIC);
    return [...curves].flatMap(([kind, alike]) => {
      const grown = rowsOf(series, alike, from);
      const rows = grown.flatMap((count, row) => (count ? [row] : []));
      if (rows.length === 0) return [];
      const [row, last] = [from + rows[0]!, from + rows.at(-1)!];
      return {
        kind,
        what,
        count: grown.reduce((all, count) => all + count, 0),
        environments: [...new Set(alike.filter((curve) => rowsOf(series, [curve], from).some(Boolean)).map(({ labels }) => labels.environment ?? ""))].filter(Boolean),
        first: { from: series.times[row - 1]!, to: series.times[row]! },
        last: series.times[last]!,
        versions: [versions[row - 1] ?? -1, versions[row] ?? -1] as [number, number],
        isOld: alike.some(({ values }) => values.slice(0, from).some(Boolean)),
      };
    });
  });
  return found.toSorted((a, b) => b.count - a.count);
}

/** By their keys, in the order in which the keys appear. */
export function groupedBy<T>(all: readonly T[], keyOf: (one: T) => string): Map<string, T[]> {
  const found = new Map<string, T[]>();
  for (const one of all) found.set(keyOf(one), [...(found.get(keyOf(one)) ?? []), one]);
  return found;
}

/** By row from `from` on, what counters grew by. */
function rowsOf(series: Series, curves: Curve[], from: number): number[] {
  const grown = curves.map((curve) => series.growth(curve));
  return series.times.slice(from).map((_, row) => grown.reduce((all, values) => all + (values[from + row] ?? 0), 0));
}
