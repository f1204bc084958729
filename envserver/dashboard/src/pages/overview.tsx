// The overview: what changed, the numbers of now, and curves of all that is measured.

import { changes, isEarly, news } from "../changes";
import { FIGURES } from "../figures";
import { useLong, useRecent } from "../history";
import { Changes } from "../parts/changes";
import { Chart, isNothing } from "../parts/chart";
import { Estimates } from "../parts/estimates";
import { chartOf, environmentsOf, type Shown } from "../parts/figures";
import { useKeys } from "../parts/keys";
import { Tiles } from "../parts/tiles";
import { link, setQuery, usePlace } from "../router";
import "./overview.css";

const RANGES = [
  { name: "15m", title: "15 min", seconds: 900, points: 0 },
  { name: "1h", title: "1 h", seconds: 3600, points: 0 },
  { name: "2h", title: "2 h", seconds: 7200, points: 360 },
  { name: "24h", title: "24 h", seconds: 86_400, points: 288 },
  { name: "30d", title: "30 d", seconds: 2_592_000, points: 360 },
];
const USUAL = RANGES[1]!;
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
      <span class="dim legend">
        {isByVersion ? "Each point: the mean of what ended while that version was the published one." : <Legend />}
      </span>
    </nav>
  );
}

function Legend() {
  const sample = (line: string) => (
    <svg class={`sample ${line}`} width="24" height="12" aria-hidden="true">
      {line === "mean" || line === "each" ? <path d="M0 9 L8 5 L16 7 L24 2" /> : <path d="M12 0 V12" />}
    </svg>
  );
  return (
    <>
      <span>{sample("mean")} moving mean</span> <span>{sample("each")} each measurement</span> <span>{sample("version")} a new policy version</span>{" "}
      <span>{sample("start")} a start of the server</span>
    </>
  );
}

function Sections(shown: Shown) {
  const environments = environmentsOf(shown.series);
  const sections = shown.isByVersion ? ["Learning", "Lengths and ends"] : SECTIONS;
  return (
    <>
      {environments.length === 0 && (
        <p class="panel">
          No environment has made groups yet. <code>envserver serve --env math --model sim</code> shows what these pages look like; <code>envserver join</code> adds an
          environment to this server.
        </p>
      )}
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
