// The overview: what changed, the numbers of now, and curves of all that is measured.

import { changes, isEarly, news } from "../changes";
import { FIGURES, type Figure } from "../figures";
import { useLong, useRecent } from "../history";
import { overVersions, raw, smoothed } from "../measures";
import { Changes } from "../parts/changes";
import { Chart, type ChartProps, type DrawnLine, isNothing } from "../parts/chart";
import { Estimates } from "../parts/estimates";
import { useKeys } from "../parts/keys";
import { Tiles } from "../parts/tiles";
import { link, setQuery, usePlace } from "../router";
import type { Series } from "../series";
import "./overview.css";

const RANGES = [
  { name: "15m", title: "15 min", seconds: 900, points: 0 },
  { name: "1h", title: "1 h", seconds: 3600, points: 0 },
  { name: "2h", title: "2 h", seconds: 7200, points: 360 },
  { name: "24h", title: "24 h", seconds: 86_400, points: 288 },
  { name: "30d", title: "30 d", seconds: 2_592_000, points: 360 },
];
const USUAL = RANGES[1]!;
const MOST_MARKS = 40;
const MOST_BEHIND = 3;
const SECTIONS = [...new Set(FIGURES.map(({ section }) => section))];

export function Overview() {
  const { query } = usePlace();
  const range = RANGES.find(({ name }) => name === query.get("range")) ?? USUAL;
  const isByVersion = query.get("x") === "version";
  const recent = useRecent();
  const long = useLong(range.points ? range.seconds : null, range.points);
  useKeys("Overview", [
    ...RANGES.map(({ name, title }, place) => ({ key: String(place + 1), text: title, run: () => setQuery({ range: name }) })),
    { key: "v", text: "over time or over policy versions", run: () => setQuery({ x: isByVersion ? null : "version" }) },
  ]);
  const shown = range.points ? long : recent;
  if (!recent.series) {
    return <p class={recent.problem ? "bad" : "dim"}>{recent.problem?.message ?? "Reading the numbers of the last hour …"}</p>;
  }
  const found = changes(recent.series);
  return (
    <>
      <Tiles series={recent.series} />
      <Changes found={found} news={news(recent.series)} isEarly={isEarly(recent.series)} />
      <Choices range={range.name} isByVersion={isByVersion} />
      {shown.series ? (
        <Sections series={shown.series} seconds={range.seconds} isByVersion={isByVersion} changed={new Set(found.map(({ figure }) => figure.id))} />
      ) : (
        <p class="dim">{shown.problem?.message ?? "Reading …"}</p>
      )}
    </>
  );
}

function Choices({ range, isByVersion }: { range: string; isByVersion: boolean }) {
  const { query } = usePlace();
  const to = (changes: Record<string, string | null>) => link([], { ...Object.fromEntries(query), ...changes });
  return (
    <nav class="row" aria-label="What the charts show">
      <span class="choice">
        {RANGES.map(({ name, title }) => (
          <a key={name} href={to({ range: name })} aria-current={name === range}>
            {title}
          </a>
        ))}
      </span>
      <span class="choice">
        <a href={to({ x: null })} aria-current={!isByVersion}>
          over time
        </a>
        <a href={to({ x: "version" })} aria-current={isByVersion}>
          over policy versions
        </a>
      </span>
      <span class="dim legend">Thick: moving mean. Faint: each measurement. Dashed upright: a policy version; red: a start of the server.</span>
    </nav>
  );
}

interface Shown {
  series: Series;
  seconds: number;
  isByVersion: boolean;
  changed: Set<string>;
}

function Sections(shown: Shown) {
  const environments = environmentsOf(shown.series);
  const sections = shown.isByVersion ? ["Learning", "Lengths and ends"] : SECTIONS;
  return (
    <>
      {sections.map((section) => {
        const charts = FIGURES.filter((figure) => figure.section === section && (!shown.isByVersion || figure.hasVersions)).map((figure) =>
          chartOf(figure, environments, shown),
        );
        const empty = charts.filter(({ lines }) => isNothing(lines));
        return (
          <section key={section} aria-labelledby={`section-${section}`} class="figures">
            <h2 id={`section-${section}`}>{section}</h2>
            <div class="grid">
              {charts
                .filter((chart) => !empty.includes(chart))
                .map((chart) => (
                  <Chart key={chart.title} {...chart} />
                ))}
              {section === "Learning" && !shown.isByVersion && <Estimates environments={environments} />}
            </div>
            {empty.length > 0 && <p class="dim">{empty.map(({ title, empty }) => `${title}: ${empty}`).join(" ")}</p>}
          </section>
        );
      })}
    </>
  );
}

function chartOf(figure: Figure, environments: string[], { series, seconds, isByVersion, changed }: Shown): ChartProps {
  const end = series.times.at(-1) ?? 0;
  const first = Math.max(0, series.from(end - seconds) - 1);
  const lines = figure.lines(series);
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
    from: end - seconds,
    to: end,
    lines: drawn,
    marks: marksOf(series, end - seconds),
    badge: changed.has(figure.id) ? "changed" : undefined,
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
  const every = Math.ceil(changed.length / 6);
  return [
    ...changed.filter((_, place) => place % step === 0).map((mark, place) => (place % Math.max(1, Math.round(every / step)) ? { ...mark, text: "" } : mark)),
    ...times.flatMap((x, row) => (isShown(row) && again[row] ? [{ x, text: "start", isStrong: true }] : [])),
  ];
}

function environmentsOf(series: Series): string[] {
  const curves = ["envserver_workers", "envserver_groups_delivered_total"].flatMap((name) => series.named(name));
  return [...new Set(curves.map(({ labels }) => labels.environment ?? ""))].toSorted();
}
