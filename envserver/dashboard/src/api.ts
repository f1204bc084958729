// Reads JSON of /v1. Addresses are relative: the page works behind any path prefix.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";

/** A failure that the server told, or that kept us from hearing it. `status` 0: no answer came. */
export class Problem extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly hint = "",
  ) {
    super(message);
  }
}

/** Called when the server asks for a login; the shell shows the login page. */
let onLogin = () => {};
export function whenLoginIsNeeded(call: () => void): void {
  onLogin = call;
}

/** GETs JSON. Throws a Problem. */
export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await answer(path, { signal: signal ?? null })) as T;
}

/** POSTs or DELETEs. Only the session is ever changed by this page. */
export async function send<T>(method: "POST" | "DELETE", path: string, body?: unknown): Promise<T> {
  const init: RequestInit = { method };
  if (body !== undefined) {
    init.body = JSON.stringify(body);
    init.headers = { "Content-Type": "application/json" };
  }
  return (await answer(path, init)) as T;
}

/** After so long without an answer a server counts as away. */
const MOST_MS = 60_000;

async function answer(path: string, init: RequestInit): Promise<unknown> {
  const stop = new AbortController();
  const end = () => stop.abort();
  init.signal?.addEventListener("abort", end);
  const timer = setTimeout(end, MOST_MS);
  let response: Response;
  let text: string;
  try {
    response = await fetch(path, { ...init, signal: stop.signal });
    clearTimeout(timer); // a long answer may take its time
    text = await response.text();
  } catch (error) {
    if (init.signal?.aborted) throw error;
    const since = stop.signal.aborted ? ` for ${MOST_MS / 1000} seconds` : "";
    throw new Problem(0, `The server does not answer${since}.`, "This page tries again by itself.");
  } finally {
    clearTimeout(timer);
    init.signal?.removeEventListener("abort", end);
  }
  if (response.status === 401 && init.method === undefined) onLogin();
  let body: any = null;
  try {
    body = text ? JSON.parse(text) : null;
  } catch {
    throw new Problem(response.status, "The answer is not JSON; is another server at this address?");
  }
  if (!response.ok) {
    throw new Problem(response.status, body?.detail ?? body?.message ?? response.statusText, body?.hint ?? "");
  }
  return body;
}

export interface Loaded<T> {
  data: T | null;
  problem: Problem | null;
  /** Reads again; what is shown stays until the answer is there. It never aborts a request that is under way. */
  again: () => void;
}

/** Reads `path` when it changes, and every `seconds` (0: once) while the tab is seen. null: reads nothing. */
export function useGet<T>(path: string | null, seconds = 0): Loaded<T> {
  const [state, set] = useState<{ path: string | null; data: T | null; problem: Problem | null }>({
    path: null,
    data: null,
    problem: null,
  });
  const begin = useRef(() => {});
  useEffect(() => {
    if (path === null) return;
    const stop = new AbortController();
    let timer = 0;
    let isReading = false;
    let isWanted = false; // once more, as soon as the answer is there
    const read = async () => {
      isWanted = isReading;
      if (isReading) return;
      isReading = true;
      clearTimeout(timer);
      let wait = seconds;
      try {
        const data = await get<T>(path, stop.signal);
        set({ path, data, problem: null });
      } catch (error) {
        if (stop.signal.aborted) return;
        const problem = error instanceof Problem ? error : new Problem(0, String(error));
        set((old) => ({ path, data: old.path === path ? old.data : null, problem }));
        if (problem.status === 0 || problem.status === 503) wait = 2;
      }
      isReading = false;
      if (stop.signal.aborted) return;
      if (isWanted) void read();
      else if (wait > 0) later(wait);
    };
    const later = (wait: number) => {
      timer = setTimeout(() => {
        // Nobody sees a hidden tab: it asks again when it is shown.
        if (document.hidden) addEventListener("visibilitychange", () => void read(), { once: true, signal: stop.signal });
        else void read();
      }, wait * 1000);
    };
    begin.current = () => void read();
    void read();
    return () => {
      begin.current = () => {};
      stop.abort();
      clearTimeout(timer);
    };
  }, [path, seconds]);
  const again = useCallback(() => begin.current(), []);
  const fresh = state.path === path;
  return { data: fresh ? state.data : null, problem: fresh ? state.problem : null, again };
}
