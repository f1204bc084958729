// The charts of the table in figures.ts, over time or over policy versions.

import { FIGURES, type Figure } from "../figures";
import { type Line, overVersions, raw, smoothed } from "../measures";
import { link } from "../router";
import type { Series } from "../series";
import { Chart, type ChartProps, type DrawnLine } from "./chart";

/** Of a server that has just started, less than the whole range is shown; at least this. */
const LEAST_SECONDS = 300;
const MOST_MARKS = 40;
const MOST_NAMED_MARKS = 6;
/** Of more lines, the single measurements would cover the means. */
const MOST_BEHIND = 3;

export interface Shown {
  series: Series;
  /** Of the end of the series. */
  seconds: number;
  isByVersion?: boolean;
  /** Figures that changed: their charts say so. */
  changed?: Set<string>;
  /** Which lines; unset: all. */
  only?: (line: Line) => boolean;
}

/** Some figures, side by side; those without anything are said in a line. */
export function Charts({ ids, ...shown }: Shown & { ids: string[] }) {
  const environments = environmentsOf(shown.series);
  return (
    <div class="grid">
      {ids.map((id) => (
        <Chart key={id} {...chartOf(FIGURES.find((figure) => figure.id === id)!, environments, shown)} />
      ))}
    </div>
  );
}

export function chartOf(figure: Figure, environments: string[], { series, seconds, isByVersion, changed, only }: Shown): ChartProps {
  const end = series.times.at(-1) ?? 0;
  const first = Math.max(0, series.from(end - seconds) - 1);
  const lines = figure.lines(series).filter(only ?? (() => true));
  const { title, note, format, top, empty } = figure;
  const styled = (label: string, place: number, values: (number | null)[], behind?: (number | null)[]): DrawnLine => {
    const known = figure.isByEnvironment ? environments.indexOf(label) : -1;
    return {
      label,
      values,
      style: known >= 0 ? known : place,
      ...(behind && { behind }),
      ...(known >= 0 && figure.id === "reward" && { link: link(["groups"], { environment: label }) }),
    };
  };
  if (isByVersion) {
    const { versions, values } = overVersions(series, lines, first);
    const drawn = lines.map(({ label }, place) => styled(label, place, values[place]!));
    return { title, note, format, top, isTime: false, x: versions, lines: drawn, empty: "No policy version was published in this time." };
  }
  const gaps = series.gaps();
  const drawn = lines.map((line, place) => {
    const values = raw(line).map((value, row) => (gaps[row] ? null : value));
    if (line.isLevel) return styled(line.label, place, values.slice(first));
    const smooth = smoothed(line, series.times, gaps, seconds / 30).slice(first);
    return styled(line.label, place, smooth, lines.length <= MOST_BEHIND ? values.slice(first) : undefined);
  });
  return {
    ...{ title, note, format, top, empty },
    isTime: true,
    x: series.times.slice(first),
    from: Math.max(end - seconds, Math.min(series.times[0] ?? end, end - LEAST_SECONDS)),
    to: end,
    lines: drawn,
    marks: marksOf(series, end - seconds),
    badge: changed?.has(figure.id) ? "changed" : undefined,
  };
}

/** Where the policy version changed, and where the server started. Of many versions every n-th. */
function marksOf(series: Series, start: number): { x: number; text: string; isStrong?: boolean }[] {
  const versions = series.named("envserver_policy_version")[0]?.values ?? [];
  const { times } = series;
  const again = series.restarts();
  const isShown = (row: number) => row > 0 && times[row]! >= start;
  const changed = times.flatMap((x, row) => {
    const [before, now] = [versions[row - 1], versions[row]];
    return isShown(row) && now !== before && typeof now === "number" && typeof before === "number" && now >= 0 ? [{ x, text: `v${now}` }] : [];
  });
  const step = Math.ceil(changed.length / MOST_MARKS);
  const every = Math.ceil(changed.length / MOST_NAMED_MARKS);
  return [
    ...changed.filter((_, place) => place % step === 0).map((mark, place) => (place % Math.max(1, Math.round(every / step)) ? { ...mark, text: "" } : mark)),
    ...times.flatMap((x, row) => (isShown(row) && again[row] ? [{ x, text: "start", isStrong: true }] : [])),
  ];
}

/** The names of the environments, in the order of their colours. */
export function environmentsOf(series: Series): string[] {
  const curves = ["envserver_workers", "envserver_groups_delivered_total", "envserver_stored_groups_total"].flatMap((name) => series.named(name));
  return [...new Set(curves.map(({ labels }) => labels.environment ?? ""))].toSorted();
}
