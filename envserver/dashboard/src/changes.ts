// What changed in the last minutes, beyond noise: the last five minutes against the hour before.

import { FIGURES, type Figure } from "./figures";
import { type Line, mean, total } from "./measures";
import type { Series } from "./series";

/** Seconds of "now", and of each span of the past that it is compared with. */
export const SPAN = 300;
const PAST = 3600;
const FEWEST_SPANS = 3;
/** Standard errors beyond which a difference is no chance: of 60 lines and 288 spans a day, one is
 * beyond four by chance; twenty are beyond three. */
const ERRORS = 4;
/** Differences smaller than this share of what was are not worth a word. */
const LEAST_SHARE = 0.15;
/** For a version, a start: seconds for which they are news. */
const NEWS = 900;

export interface Change {
  figure: Figure;
  label: string;
  before: number;
  now: number;
  /** How far beyond noise: 1 is just beyond. */
  weight: number;
  tone: "good" | "bad" | "neutral";
}

/** The changes: what is worse first, of those the largest. */
export function changes(series: Series): Change[] {
  const found = FIGURES.filter(({ isQuiet }) => !isQuiet).flatMap((figure) =>
    figure.lines(series).flatMap((line) => {
      const change = compared(series, figure, line);
      return change ? [change] : [];
    }),
  );
  return found.toSorted((a, b) => Number(b.tone === "bad") - Number(a.tone === "bad") || b.weight - a.weight);
}

/** Seconds of the past that there are to compare with; less than three spans are too few. */
export function isEarly(series: Series): boolean {
  const { times } = series;
  return times.length === 0 || times.at(-1)! - times[0]! < SPAN * (FEWEST_SPANS + 1);
}

function compared(series: Series, figure: Figure, line: Line): Change | null {
  const { times } = series;
  const end = times.at(-1) ?? 0;
  const recent = series.from(end - SPAN);
  const now = mean(line, recent);
  const spans = spansOf(series, line, end);
  const known = spans.filter((value) => value !== null);
  if (now === null || known.length < FEWEST_SPANS) return null;
  const past = total(line, series.from(end - SPAN - PAST), recent);
  const before = past.below ? past.above / past.below : 0;
  const noise = Math.max(deviation(known), figure.isCount ? chance(line, before, recent) : 0);
  // The deviation of a few values is itself uncertain.
  const bound = Math.max(noise * (ERRORS + 6 / known.length), LEAST_SHARE * Math.abs(before), figure.least);
  const difference = now - before;
  if (Math.abs(difference) <= bound) return null;
  const isUp = difference > 0;
  const tone = figure.better === null ? "neutral" : isUp === (figure.better === "up") ? "good" : "bad";
  return { figure, label: line.label, before, now, weight: Math.abs(difference) / bound, tone };
}

/** The mean of each span of the past; null where nothing happened. */
function spansOf(series: Series, line: Line, end: number): (number | null)[] {
  const spans: (number | null)[] = [];
  for (let right = end - SPAN; right - SPAN >= Math.max(end - SPAN - PAST, series.times[0]! - 30); right -= SPAN) {
    spans.push(mean(line, series.from(right - SPAN), series.from(right)));
  }
  return spans;
}

/** The standard error of `expected` by the number of things counted, after Poisson. */
function chance(line: Line, expected: number, from: number): number {
  const { below } = total(line, from);
  return below ? Math.sqrt(Math.max(Math.abs(expected) * below, 1)) / below : 0;
}

/** The deviation of values around their trend: from the differences of neighbours (von Neumann). */
function deviation(values: number[]): number {
  const squares = values.slice(1).map((value, place) => (value - values[place]!) ** 2);
  return Math.sqrt(squares.reduce((all, one) => all + one, 0) / (2 * Math.max(1, squares.length)));
}

export interface News {
  text: string;
  time: number;
  tone: "neutral" | "bad";
}

/** What happened at once: versions, starts, parts that do not work. Newest first. */
export function news(series: Series): News[] {
  const { times } = series;
  const end = times.at(-1) ?? 0;
  const first = series.from(end - NEWS);
  const found: News[] = [];
  series.restarts().forEach((isAgain, row) => {
    if (isAgain && row >= first) found.push({ text: "The server started again.", time: times[row]!, tone: "bad" });
  });
  const versions = series.named("envserver_policy_version")[0]?.values ?? [];
  const was = versions[first];
  const is = versions.at(-1);
  if (was !== null && was !== undefined && is !== null && is !== undefined && is !== was && is >= 0) {
    const row = versions.findLastIndex((version, row) => row > 0 && version === is && versions[row - 1] !== is);
    found.push({ text: `Policy version ${Math.max(was, 0)} → ${is}.`, time: times[Math.max(row, 0)]!, tone: "neutral" });
  }
  for (const { labels, values } of series.named("envserver_part_ready")) {
    if (values.at(-1) === 0) found.push({ text: `${labels.part} does not work.`, time: end, tone: "bad" });
  }
  if (series.named("envserver_paused")[0]?.values.at(-1)) {
    found.push({ text: "Model calls are paused.", time: end, tone: "neutral" });
  }
  return found.toSorted((a, b) => b.time - a.time);
}
