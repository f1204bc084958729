import { render } from "preact";
import { useGet } from "./api";
import { link, usePlace } from "./router";
import { Overview } from "./pages/overview";
import "./style.css";

/** What is looked at: a server, or something on a disk. See GET /v1/source. */
interface Source {
  kind: string;
  title: string;
  live: boolean;
  parts: string[];
  version: string;
  replay_source: string | null;
}

/** Pages by the first part of their path, in the order of the menu. "" is the overview. */
const PAGES: Record<string, { part: string; title: string; page: () => preact.JSX.Element }> = {
  "": { part: "overview", title: "Overview", page: Overview },
};

function Shell() {
  const { path } = usePlace();
  const source = useGet<Source>("v1/source");
  const first = path[0] ?? "";
  const Page = PAGES[first]?.page;
  return (
    <>
      <header>
        <h1>envserver</h1>
        <nav aria-label="Pages">
          {Object.entries(PAGES)
            .filter(([, { part }]) => source.data?.parts.includes(part) ?? true)
            .map(([name, { title }]) => (
              <a key={name} href={link(name ? [name] : [])} aria-current={name === first ? "page" : undefined}>
                {title}
              </a>
            ))}
        </nav>
      </header>
      <main>{Page ? <Page /> : <p>There is no such page.</p>}</main>
    </>
  );
}

render(<Shell />, document.getElementById("page")!);
