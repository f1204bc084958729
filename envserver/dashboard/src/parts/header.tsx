// The head of every page: menu, what is looked at, how the stream stands, theme, help.

import { useConnection } from "../live";
import { link } from "../router";
import { logOut, useSession } from "../session";
import { useSource } from "../source";
import { clock, visible } from "../text";
import { useTheme } from "../theme";
import { Help } from "./help";

const THEMES = { system: "◐ System", light: "☀ Light", dark: "☾ Dark" };

interface Entry {
  name: string;
  title: string;
}

/** @param entries - Of the menu; `name` is the first part of the page's path. */
export function Header({ entries, first }: { entries: Entry[]; first: string }) {
  const source = useSource();
  const { theme, next } = useTheme();
  return (
    <header>
      <h1>
        <a href={link([])}>envserver</a>
      </h1>
      <nav aria-label="Pages">
        {entries.map(({ name, title }) => (
          <a key={name} href={link(name ? [name] : [])} aria-current={name === first ? "page" : undefined}>
            {title}
          </a>
        ))}
      </nav>
      <div class="end">
        {source && (
          <span class="dim" title={`envserver ${source.version}`}>
            {visible(source.title)}
          </span>
        )}
        <Stream />
        <Reader />
        <button type="button" onClick={next} aria-label={`Colours: ${THEMES[theme].slice(2)}. Change.`}>
          {THEMES[theme]}
        </button>
        <Help />
      </div>
    </header>
  );
}

/** Who is logged in, and the way out. */
function Reader() {
  const { role, name } = useSession();
  if (role === null) return null;
  return (
    <span>
      <span class="dim">
        {visible(name ?? "")} ({role}){" "}
      </span>
      <button type="button" onClick={() => void logOut()}>
        Log out
      </button>
    </span>
  );
}

/** How the stream stands, in words. */
function Stream() {
  const { state, since } = useConnection();
  const words = {
    off: null,
    connecting: <span class="badge">… connecting</span>,
    live: <span class="badge good">● live</span>,
    polling: <span class="badge">↻ every 10 s</span>,
    starting: <span class="badge warn">… the server is starting</span>,
    gone: <span class="badge bad">✕ no answer since {clock(since)}</span>,
  };
  return <span role="status">{words[state]}</span>;
}

/** Says, large, that what is shown is old. */
export function Gone() {
  const { state, since } = useConnection();
  if (state !== "gone" && state !== "starting") return null;
  return (
    <p class={`panel banner ${state === "gone" ? "bad" : "warn"}`}>
      {state === "gone"
        ? `The server has not answered since ${clock(since)}. What you see is from before; this page goes on by itself when it is back.`
        : "The server is starting. This page goes on by itself when it is ready."}
    </p>
  );
}
