// Tokens as text: one text node a page, shaded by highlights, so that 30,000 tokens cost 20 nodes.

import type { TokenColumns } from "../records";
import { visible } from "../text";

export const PAGE = 8192;

/** Below this probability a token is unlikely. */
export const UNLIKELY = 0.1;

/** Browsers before 2024 or so show tokens without shades. */
export const HAS_HIGHLIGHTS = "highlights" in CSS;

/** What the shades say. */
export const SHADINGS = ["probability", "version", "call"] as const;
export type Shading = (typeof SHADINGS)[number];

/** Lower ends of the shades of probability; what is likelier has none. */
export const SHADES = [0.5, 0.2, 0.05, 0] as const;
const LIKELY = 0.9;

/** A page of a row: its columns, its text, and where in it each token begins. */
export interface TokenPage {
  columns: TokenColumns;
  text: string;
  /** One more than tokens: the last is the text's length. */
  starts: Uint32Array;
}

export function pageOf(columns: TokenColumns): TokenPage {
  const starts = new Uint32Array(columns.ids.length + 1);
  const parts: string[] = [];
  let at = 0;
  columns.ids.forEach((id, n) => {
    starts[n] = at;
    const part = shownText(columns.texts[n] ?? null, id);
    parts.push(part);
    at += part.length;
  });
  starts[columns.ids.length] = at;
  return { columns, text: parts.join(""), starts };
}

/** The text of a token; of one that is no text by itself, its id. */
export function shownText(text: string | null, id: number): string {
  return text === null || text === "" ? `⟨${id}⟩` : visible(text);
}

/** The token whose text holds `offset`. */
export function tokenAt({ starts }: TokenPage, offset: number): number {
  let low = 0;
  let high = starts.length - 2;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle]! <= offset) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Whether the policy sampled the token. */
export function isSampled(columns: TokenColumns, n: number): boolean {
  return columns.calls[n]! >= 0 || columns.mask[n] === 1;
}

export function probability(columns: TokenColumns, n: number): number {
  return Math.exp(columns.logprobs[n]!);
}

/** Name of the highlight of a token, "" for none. */
function shadeOf(columns: TokenColumns, n: number, shading: Shading): string {
  if (!isSampled(columns, n)) return "context";
  if (columns.mask[n] !== 1) return "untrained";
  if (shading === "version") return `kind-${(columns.versions[n]! + 4) % 4}`;
  if (shading === "call") return `kind-${columns.calls[n]! % 4}`;
  const value = probability(columns, n);
  return value >= LIKELY ? "sure" : `shade-${SHADES.findIndex((low) => value >= low)}`;
}

/** Puts the shades of a page on its text node; returns what takes them off. */
export function shade(node: Text, { columns, starts }: TokenPage, shading: Shading): () => void {
  if (!HAS_HIGHLIGHTS) return () => {};
  const made: [Highlight, StaticRange][] = [];
  let from = 0;
  for (let n = 1; n <= columns.ids.length; n += 1) {
    const name = shadeOf(columns, from, shading);
    if (n < columns.ids.length && shadeOf(columns, n, shading) === name) continue;
    const range = rangeOf(node, starts[from]!, starts[n]!);
    const highlight = highlightOf(`token-${name}`);
    highlight.add(range);
    made.push([highlight, range]);
    from = n;
  }
  return () => made.forEach(([highlight, range]) => highlight.delete(range));
}

/** Marks one token as the chosen one; returns what takes the mark off. */
export function markChosen(node: Text, { starts }: TokenPage, n: number): () => void {
  if (!HAS_HIGHLIGHTS) return () => {};
  const highlight = highlightOf("token-chosen");
  highlight.priority = 1;
  const range = rangeOf(node, starts[n]!, starts[n + 1]!);
  highlight.add(range);
  return () => void highlight.delete(range);
}

/** The place in the text under a point of the window; null: none. */
export function offsetAt(node: Text, x: number, y: number): number | null {
  if (document.caretPositionFromPoint) {
    const at = document.caretPositionFromPoint(x, y);
    return at?.offsetNode === node ? at.offset : null;
  }
  const range = document.caretRangeFromPoint(x, y);
  return range?.startContainer === node ? range.startOffset : null;
}

function rangeOf(node: Text, start: number, end: number): StaticRange {
  return new StaticRange({ startContainer: node, startOffset: start, endContainer: node, endOffset: end });
}

function highlightOf(name: string): Highlight {
  let found = CSS.highlights.get(name);
  if (!found) {
    found = new Highlight();
    CSS.highlights.set(name, found);
  }
  return found;
}

/** A stretch of a page that one call sampled, or that is context (`call` -1). */
export interface Stretch {
  call: number;
  from: number;
  to: number;
}

export function stretchesOf(pages: TokenPage[]): Stretch[] {
  const found: Stretch[] = [];
  for (const { columns } of pages) {
    columns.calls.forEach((call, n) => {
      const at = columns.start + n;
      const last = found.at(-1);
      if (last && last.call === call && last.to === at) last.to = at + 1;
      else found.push({ call, from: at, to: at + 1 });
    });
  }
  return found;
}
