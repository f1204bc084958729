// What the server tells as it happens: one stream for all tabs of this browser.
//
// The tab that holds a lock reads GET /v1/events and tells the others. When it is closed, another
// takes over. Over plain HTTP from another machine browsers have no locks: there each tab reads for
// itself while it is seen, since a browser opens six connections to a server at most. When the stream breaks, the browser resumes it where it was; where that cannot be
// (another tab took over, the server started again), all pages hear "resync" and read anew.

import { useEffect, useRef, useState } from "preact/hooks";
import { get, Problem } from "./api";
import { setServerTime } from "./text";

export interface Connection {
  /** off: nothing is live here; polling: the server has no stream, pages read again by themselves;
   * gone: no answer, tried again all the time. */
  state: "off" | "connecting" | "live" | "polling" | "starting" | "gone";
  /** Since when, in seconds since 1970. */
  since: number;
}

type Handler = (data: any) => void;
type Told =
  | { kind: "event"; event: string; data: unknown }
  | { kind: "connection"; connection: Connection }
  | { kind: "who" };

const EVENTS = ["hello", "group", "groups", "sample", "failure", "failures", "policy", "run", "engine", "alarm", "resync"];
const POLL_SECONDS = 10;
const RETRY_SECONDS = 2;
/** After a login the page begins anew. */
const LOGIN_SECONDS = 60;
/** The server sends a sample every ten seconds: a stream that is silent for so long is dead. */
const SILENT_SECONDS = 45;

const handlers = new Map<string, Set<Handler>>();
const watchers = new Set<() => void>();
const NAME = `envserver ${location.pathname}`;
/** To the other tabs; null: each reads for itself. */
const channel = navigator.locks && "BroadcastChannel" in window ? new BroadcastChannel(NAME) : null;
let connection: Connection = { state: "off", since: now() };
let isStarted = false;
let leads = false;

/** Begins to listen, once. */
export function start(): void {
  if (isStarted) return;
  isStarted = true;
  connected("connecting");
  channel?.addEventListener("message", (message) => heard(message.data as Told));
  channel?.postMessage({ kind: "who" } satisfies Told);
  if (channel) void navigator.locks.request(NAME, () => lead()); // held until this tab is closed
  else void lead();
}

/** Calls `handler` with the data of each event; returns what ends that. */
export function on(event: string, handler: Handler): () => void {
  const known = handlers.get(event) ?? new Set();
  handlers.set(event, known);
  known.add(handler);
  return () => void known.delete(handler);
}

/** Calls `handler` for each event while the component is shown. */
export function useLive(event: string, handler: Handler): void {
  const latest = useRef(handler);
  latest.current = handler;
  useEffect(() => on(event, (data) => latest.current(data)), [event]);
}

/** How the stream stands; the component renders again when that changes. */
export function useConnection(): Connection {
  const [, again] = useState(0);
  useEffect(() => {
    const changed = () => again((n) => n + 1);
    watchers.add(changed);
    return () => void watchers.delete(changed);
  }, []);
  return connection;
}

function heard(told: Told): void {
  if (told.kind === "event") tell(told.event, told.data);
  else if (told.kind === "connection") become(told.connection);
  else if (leads) channel?.postMessage({ kind: "connection", connection } satisfies Told);
}

function tell(event: string, data: any): void {
  if (event === "hello" || event === "sample") setServerTime(data.time);
  for (const handler of handlers.get(event) ?? []) handler(data);
}

/** Tells an event to all tabs. */
function tellAll(event: string, data: unknown): void {
  channel?.postMessage({ kind: "event", event, data } satisfies Told);
  tell(event, data);
}

function connected(state: Connection["state"]): void {
  if (state === connection.state) return;
  become({ state, since: now() });
  if (leads) channel?.postMessage({ kind: "connection", connection } satisfies Told);
}

function become(next: Connection): void {
  connection = next;
  for (const watcher of watchers) watcher();
}

/** Reads the stream for all tabs, for ever. */
async function lead(): Promise<never> {
  leads = true;
  for (let first = true; ; first = false) {
    if (!channel) await shown();
    const opened = await listen(first);
    // The stream ended for good: its server is gone, starts, refuses, or has no stream.
    const there = await ask();
    if (there === 200 && !opened) {
      connected("polling");
      tellAll("resync", { reason: "polling" });
      await wait(POLL_SECONDS);
    } else {
      connected(there === 503 ? "starting" : there === 0 ? "gone" : "connecting");
      await wait(there === 401 ? LOGIN_SECONDS : RETRY_SECONDS);
    }
  }
}

/** Reads one stream until the browser gives it up. Returns whether it was ever open.
 *
 * @param first - Of this page: what it shows was just read.
 */
function listen(first: boolean): Promise<boolean> {
  return new Promise((resolve) => {
    const source = new EventSource("v1/events");
    let opened = false;
    let last = now();
    const hidden = () => {
      if (!channel && document.hidden) end();
    };
    const end = () => {
      removeEventListener("visibilitychange", hidden);
      clearInterval(watch);
      source.close();
      resolve(opened);
    };
    const watch = setInterval(() => {
      if (source.readyState === EventSource.OPEN && now() - last > SILENT_SECONDS) end();
    }, 5000);
    addEventListener("visibilitychange", hidden);
    source.addEventListener("open", () => {
      last = now();
      if (!opened && !first) tellAll("resync", { reason: "stream" });
      opened = true;
      connected("live");
    });
    source.addEventListener("error", () => {
      if (source.readyState === EventSource.CLOSED) end();
      else if (opened || !first) connected("gone");
    });
    for (const event of EVENTS) {
      source.addEventListener(event, (message: MessageEvent<string>) => {
        last = now();
        tellAll(event, JSON.parse(message.data));
      });
    }
  });
}

/** Returns the status that the server answers with; 0: it does not. */
async function ask(): Promise<number> {
  try {
    await get("v1/source");
    return 200;
  } catch (error) {
    return error instanceof Problem ? error.status : 0;
  }
}

/** Waits until this tab is seen. */
function shown(): Promise<void> {
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      removeEventListener("visibilitychange", look);
      resolve();
    };
    addEventListener("visibilitychange", look);
    look();
  });
}

function wait(seconds: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, seconds * 1000));
}

function now(): number {
  return Date.now() / 1000;
}
