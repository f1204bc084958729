// A chart of lines with its numbers as text: a table below says what is drawn, for everybody.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { clock, visible } from "../text";
import { seen, useTheme } from "../theme";
import "./chart.css";

export interface DrawnLine {
  label: string;
  /** One for each x; null: nothing is drawn. */
  values: (number | null)[];
  /** Drawn faintly behind: what `values` smooths. */
  behind?: (number | null)[];
  /** Of the line's colour and dash; the same thing has the same in all charts. */
  style: number;
  /** What a click at the name leads to. */
  link?: string;
}

export interface ChartProps {
  title: string;
  /** A word more on what is shown. */
  note?: string | undefined;
  x: number[];
  /** The x of the left and the right edge; unset: those of the data. */
  from?: number;
  to?: number;
  isTime: boolean;
  lines: DrawnLine[];
  /** Vertical lines at some x: policy versions, restarts. */
  marks?: { x: number; text: string; isStrong?: boolean }[];
  format: (value: number) => string;
  /** Highest y that is always shown: 1 for shares. */
  top?: number | undefined;
  /** Said where there is nothing to draw. */
  empty: string;
  /** Shown beside the title: that it changed. */
  badge?: string | undefined;
}

const MOST_LINES = 8;
const HEIGHT = 150;
const DASHES: number[][] = [[], [6, 3], [2, 3], [9, 3, 2, 3], [12, 4], [4, 2, 1, 2, 1, 2], [1, 2], [7, 2, 7, 6]];
/** Of more points, the dots would hide the line. */
const MOST_POINTS = 30;
/** Between two marks. */
const LEAST_PIXELS = 7;
const AT_ALL = "charts";

export function Chart(props: ChartProps) {
  const { title, note, x, isTime, format, empty, badge } = props;
  useTheme();
  const [cursor, setCursor] = useState<number | null>(null);
  const lines = props.lines.slice(0, MOST_LINES);
  const isEmpty = isNothing(lines);
  const place = cursor !== null && cursor < x.length ? cursor : null;
  return (
    <figure class="panel chart">
      <figcaption>
        <h3>{title}</h3>
        {note && <span class="dim">{note}</span>}
        {badge && <span class="badge warn">{badge}</span>}
      </figcaption>
      {isEmpty ? (
        <p class="dim none">{empty}</p>
      ) : (
        <>
          <Drawing key={`${seen()} ${isTime} ${lines.map((line) => `${line.style} ${line.label}`)}`} {...props} lines={lines} onCursor={setCursor} />
          <table>
            <caption class="unseen">
              {title} in numbers: {x.length} measurements{isTime && x.length > 0 && ` from ${clock(x[0]!)} to ${clock(x.at(-1)!)}`}
            </caption>
            <thead>
              <tr>
                <th scope="col">{place === null ? <span class="unseen">line</span> : isTime ? clock(x[place]!) : `version ${x[place]}`}</th>
                <th scope="col" class="n">
                  {place === null ? "last" : "here"}
                </th>
                <th scope="col" class="n">
                  lowest
                </th>
                <th scope="col" class="n">
                  highest
                </th>
              </tr>
            </thead>
            <tbody>
              {lines.map((line) => (
                <Numbers key={line.label} line={line} place={place} format={format} />
              ))}
            </tbody>
          </table>
          {props.lines.length > MOST_LINES && <p class="dim none">and {props.lines.length - MOST_LINES} more</p>}
        </>
      )}
    </figure>
  );
}

/** Whether there is nothing to draw. */
export function isNothing(lines: DrawnLine[]): boolean {
  return !lines.some((line) => line.values.some((value) => value !== null));
}

function Numbers({ line, place, format }: { line: DrawnLine; place: number | null; format: (value: number) => string }) {
  const known = line.values.filter((value) => value !== null);
  const say = (value: number | null | undefined) => (value === null || value === undefined ? "–" : format(value));
  const name = visible(line.label) || "all";
  return (
    <tr>
      <th scope="row">
        <Swatch style={line.style} /> {line.link ? <a href={line.link}>{name}</a> : name}
      </th>
      <td class="n">
        <b>{say(place === null ? known.at(-1) : line.values[place])}</b>
      </td>
      <td class="n">{known.length ? say(Math.min(...known)) : "–"}</td>
      <td class="n">{known.length ? say(Math.max(...known)) : "–"}</td>
    </tr>
  );
}

/** A piece of the line as it is drawn. */
function Swatch({ style }: { style: number }) {
  return (
    <svg class={`dashes s${style % MOST_LINES}`} width="26" height="8" aria-hidden="true">
      <line x1="0" y1="4" x2="26" y2="4" stroke-width="2" stroke-dasharray={DASHES[style % MOST_LINES]!.join(" ")} />
    </svg>
  );
}

function Drawing(props: ChartProps & { onCursor: (place: number | null) => void }) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  useLayoutEffect(() => {
    const made = new uPlot(options(latest, box.current!), data(latest.current), box.current!);
    plot.current = made;
    const resized = new ResizeObserver(([entry]) => {
      const width = Math.floor(entry!.contentRect.width);
      if (width > 0 && width !== made.width) made.setSize({ width, height: HEIGHT });
    });
    resized.observe(box.current!);
    return () => {
      resized.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, []);
  useEffect(() => plot.current?.setData(data(props)));
  return <div ref={box} class="drawing" aria-hidden="true" />;
}

function data({ x, lines }: ChartProps): uPlot.AlignedData {
  const behind = lines.flatMap((line) => (line.behind ? [line.behind] : []));
  return [x, ...behind, ...lines.map((line) => line.values)];
}

function options(latest: { current: ChartProps & { onCursor: (place: number | null) => void } }, box: HTMLElement): uPlot.Options {
  const { lines, isTime, format, top } = latest.current;
  const colour = colours(box);
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--dim"), grid, ticks: grid, font: "11px system-ui, sans-serif" };
  const drawn = (line: DrawnLine): uPlot.Series => ({
    stroke: colour(`--c${line.style % MOST_LINES}`),
    dash: DASHES[line.style % MOST_LINES]!,
    width: 1.75,
    points: { show: !isTime && latest.current.x.length <= MOST_POINTS, size: 5 },
  });
  return {
    width: Math.max(100, box.clientWidth),
    height: HEIGHT,
    legend: { show: false },
    padding: [15, 16, 0, 0],
    cursor: { sync: { key: AT_ALL }, drag: { x: false, y: false }, points: { size: 6 } },
    scales: {
      x: { time: isTime, range: (_, low, high) => edges(latest.current, low, high) },
      y: { range: (_, low, high) => heights(low, high, top) },
    },
    axes: [
      { ...axis, size: 26, ...(isTime ? { values: times } : { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000] }) },
      { ...axis, size: (_, values) => 18 + 6.5 * Math.max(0, ...(values ?? []).map((value) => value.length)), values: (_, values) => values.map((value) => format(value)) },
    ],
    series: [
      {},
      ...lines.flatMap((line) => (line.behind ? [{ ...drawn(line), dash: [], width: 1, alpha: 0.28, points: { show: false } }] : [])),
      ...lines.map(drawn),
    ],
    hooks: {
      setCursor: [(plot) => latest.current.onCursor(plot.cursor.idx ?? null)],
      drawAxes: [(plot) => drawMarks(plot, latest.current.marks ?? [], colour)],
    },
  };
}

/** The first and last x that are shown. */
function edges({ from, to }: ChartProps, low: number, high: number): [number, number] {
  const [left, right] = [from ?? low, to ?? high];
  return left < right ? [left, right] : [left - 1, left + 1];
}

/** From 0, or below it, to a little above the highest. */
function heights(low: number | null, high: number | null, top = 0): [number, number] {
  const most = Math.max(high ?? 0, top);
  const least = Math.min(low ?? 0, 0);
  return most === least ? [least, least + 1] : [least * 1.05, top && most <= top ? top : most * 1.08];
}

function drawMarks(plot: uPlot, marks: NonNullable<ChartProps["marks"]>, colour: (name: string) => string): void {
  const { ctx, bbox } = plot;
  ctx.save();
  const taken: [number, number][] = []; // where words stand already
  let last = -Infinity;
  for (const { x, text, isStrong } of marks.toSorted((a, b) => Number(b.isStrong ?? false) - Number(a.isStrong ?? false))) {
    const left = plot.valToPos(x, "x", true);
    if (left < bbox.left || left > bbox.left + bbox.width) continue;
    if (!isStrong && Math.abs(left - last) < LEAST_PIXELS * devicePixelRatio) continue;
    last = left;
    ctx.strokeStyle = colour(isStrong ? "--bad" : "--dim");
    ctx.globalAlpha = isStrong ? 0.9 : 0.35;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
    ctx.globalAlpha = 1;
    ctx.fillStyle = colour(isStrong ? "--bad" : "--dim");
    ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
    const half = ctx.measureText(text).width / 2;
    const middle = Math.min(left, bbox.left + bbox.width - half);
    if (taken.some(([from, to]) => middle + half > from && middle - half < to)) continue;
    taken.push([middle - half - 4, middle + half + 4]);
    ctx.textAlign = "center";
    ctx.fillText(text, middle, bbox.top - 3 * devicePixelRatio);
  }
  ctx.restore();
}

/** Hours and minutes; the day too where it changes. */
function times(_: uPlot, values: number[]): string[] {
  let day = "";
  return values.map((seconds) => {
    const at = new Date(seconds * 1000);
    const text = at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
    const date = at.toLocaleDateString("en-CA").slice(5);
    const isNew = day !== "" && date !== day;
    day = date;
    return isNew || values.at(-1)! - values[0]! > 172_800 ? date : text;
  });
}

/** Returns what resolves a variable of the style sheet to a colour that a canvas understands. */
function colours(box: HTMLElement): (name: string) => string {
  const known = new Map<string, string>();
  return (name) => {
    const found = known.get(name);
    if (found) return found;
    box.style.color = `var(${name})`;
    const value = getComputedStyle(box).color;
    box.style.color = "";
    known.set(name, value);
    return value;
  };
}
