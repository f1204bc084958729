import { render, type JSX } from "preact";
import { useEffect } from "preact/hooks";
import { useGet } from "./api";
import { start } from "./live";
import { Compare } from "./pages/compare";
import { ComparisonPage } from "./pages/comparison";
import { Engines } from "./pages/engines";
import { EvaluationsPage } from "./pages/evaluations";
import { Failures } from "./pages/failures";
import { GroupsRoutes } from "./pages/groups_routes";
import { HeldOut } from "./pages/held_out";
import { Login } from "./pages/login";
import { Overview } from "./pages/overview";
import { Runs } from "./pages/runs";
import { TasksRoutes } from "./pages/tasks";
import { Workers } from "./pages/workers";
import { Alarms, useAlarms } from "./parts/alarms";
import { Guard } from "./parts/guard";
import { Gone, Header } from "./parts/header";
import { Reading } from "./parts/reading";
import { link, replace, usePlace } from "./router";
import { SessionContext, useLogin } from "./session";
import { type Source, SourceContext } from "./source";
import { visible } from "./text";
import "./style.css";

/** Pages by the first part of their path, in the order of the menu. "" is the overview. `part`: the
 * page is there where GET /v1/source has it among its parts. `isHidden`: not in the menu. */
const PAGES: Record<string, { part: string; title: string; page: () => JSX.Element; isHidden?: boolean }> = {
  "": { part: "overview", title: "Overview", page: Overview },
  evaluations: { part: "evaluations", title: "Evaluations", page: EvaluationsPage },
  comparison: { part: "comparison", title: "Comparison", page: ComparisonPage },
  held_out: { part: "held_out", title: "Held out", page: HeldOut },
  groups: { part: "groups", title: "Groups", page: GroupsRoutes },
  tasks: { part: "tasks", title: "Tasks", page: TasksRoutes },
  compare: { part: "groups", title: "Compare", page: Compare, isHidden: true },
  runs: { part: "runs", title: "Runs", page: Runs },
  engines: { part: "engines", title: "Engines", page: Engines },
  workers: { part: "workers", title: "Workers", page: Workers },
  failures: { part: "failures", title: "Failures", page: Failures },
};

function Shell() {
  const { path } = usePlace();
  const { data: source, problem } = useGet<Source>("v1/source");
  const alarms = useAlarms(source?.parts.includes("alarms") ?? false);
  const first = path[0] ?? "";
  const shown = PAGES[first];
  const isThere = shown !== undefined && (source?.parts.includes(shown.part) ?? problem !== null);
  const entries = Object.entries(PAGES)
    .filter(([, { part, isHidden }]) => !isHidden && (source?.parts.includes(part) ?? true))
    .map(([name, { title }]) => ({ name, title }));
  useEffect(() => {
    if (source?.live) start();
  }, [source?.live]);
  const home = entries[0]?.name ?? "";
  useEffect(() => {
    // What is on a disk has no overview: its first page is the home page.
    if (source && first === "" && home !== "") replace(link([home]));
  }, [source, first, home]);
  const count = alarms.length ? `(${alarms.length}) ` : "";
  const title = `${count}${shown?.title ?? "envserver"} · ${source?.title ?? "envserver"}`;
  useEffect(() => {
    document.title = title;
  }, [title]);
  return (
    <SourceContext.Provider value={source}>
      <Header entries={entries} first={first} />
      <main>
        <Gone />
        <Alarms alarms={alarms} />
        <Reading />
        {isThere ? (
          <Guard key={path.join("/")}>
            <shown.page />
          </Guard>
        ) : (
          (source || !shown) && <p>There is no such page.</p>
        )}
      </main>
    </SourceContext.Provider>
  );
}

/** The shell, once it is known whether a login is needed. */
function App() {
  const { session, problem } = useLogin();
  if (session?.needs_login) return <Login />;
  if (session) {
    return (
      <SessionContext.Provider value={session}>
        <Shell />
      </SessionContext.Provider>
    );
  }
  return (
    <main>
      <h1 class="unseen">envserver</h1>
      {problem && (
        <p class="panel banner warn" role="status">
          {visible(problem.message)} This page goes on by itself.
        </p>
      )}
    </main>
  );
}

render(<App />, document.getElementById("page")!);
