// The page's state lies in the address, after "#": a path and parameters. Every view is a link.

import { useEffect, useState } from "preact/hooks";

export interface Place {
  /** Parts of the path, decoded: "#/groups/a%2Fb/3" is ["groups", "a/b", "3"]. */
  path: string[];
  query: URLSearchParams;
}

export function place(): Place {
  const [path = "", query = ""] = location.hash.replace(/^#/, "").split("?", 2);
  return {
    path: path.split("/").filter(Boolean).map(decode),
    query: new URLSearchParams(query),
  };
}

/** The link to a view; parameters that are null, undefined or "" are left out. */
export function link(path: string[], query: Record<string, string | number | null | undefined> = {}): string {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parameters.set(name, String(value));
  }
  const text = parameters.toString();
  return `#/${path.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

export function go(to: string): void {
  location.hash = to;
  // The browser tells of it a moment later; a key that comes before that is for the new view.
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** Changes parameters of this view without a new entry in the browser's history. */
export function setQuery(changes: Record<string, string | number | null>): void {
  const now = place();
  replace(link(now.path, { ...Object.fromEntries(now.query), ...changes }));
}

/** Goes to another view without a new entry in the browser's history. */
export function replace(to: string): void {
  history.replaceState(null, "", to);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function usePlace(): Place {
  const [now, set] = useState(place);
  useEffect(() => {
    const changed = () => set(place());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return now;
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a "%" that somebody typed
  }
}
