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
}

export const SourceContext = createContext<Source | null>(null);

/** null until it is known. */
export function useSource(): Source | null {
  return useContext(SourceContext);
}
