// What the page looks at: a server, or something on a disk.

import { createContext } from "preact";
import { useContext } from "preact/hooks";

/** GET /v1/source. */
export interface Source {
  kind: "server" | "file" | "folder" | "store" | "evaluation" | "comparison";
  title: string;
  /** Whether there is more to come. */
  live: boolean;
  /** Pages that have something to show. */
  parts: string[];
  version: string;
  /** What `envserver replay` reads; null: the server's own address. */
  replay_source: string | null;
  /** How far the index of what is on a disk is. */
  reading?: { groups: number; bytes: number; total_bytes: number; done: boolean; error: string } | null;
  /** What is not a group, with its place. */
  problems?: { count: number; first: string[] } | null;
}

export const SourceContext = createContext<Source | null>(null);

/** null until it is known. */
export function useSource(): Source | null {
  return useContext(SourceContext);
}
