// Long text stays usable: its beginning is shown, the rest comes on demand, in pieces.

import { useState } from "preact/hooks";
import { amount, visible } from "../text";

const PIECE = 20_000;

interface Props {
  text: string;
  /** Characters that are shown at first. */
  most?: number;
  /** Leading characters that other rollouts have too; they are dimmed, and folded if they are many. */
  common?: number;
}

export function LongText({ text, most = 6000, common = 0 }: Props) {
  const [shown, show] = useState(text.length <= 1.5 * most ? text.length : most);
  const [unfolded, unfold] = useState(false);
  const folded = common > 400 && !unfolded ? lineBefore(text, common - 200) : 0;
  const end = Math.min(text.length, folded + shown);
  const same = Math.max(folded, Math.min(common, end));
  return (
    <div class="long">
      {folded > 0 && (
        <button class="fold" onClick={() => unfold(true)}>
          {amount(folded)} characters in common
        </button>
      )}
      {same > folded && <span class="same">{visible(text.slice(folded, same))}</span>}
      {common > 0 && same < end && <span class="parting" role="img" aria-label="differs from here" title="differs from here" />}
      {pieces(text, same, end).map((piece, n) => (n === 0 ? <span key={n}>{piece}</span> : <div key={n} class="piece">{piece}</div>))}
      {end < text.length && (
        <div class="more">
          <button onClick={() => show(shown + PIECE)}>{amount(Math.min(PIECE, text.length - end))} characters more</button>
          <button onClick={() => show(text.length)}>all {amount(text.length)}</button>
        </div>
      )}
    </div>
  );
}

/** Cuts [from, to) into pieces that a browser lays out one by one, at ends of lines where there are some. */
function pieces(text: string, from: number, to: number): string[] {
  const made: string[] = [];
  while (from < to) {
    let end = Math.min(to, from + PIECE);
    if (end < to) {
      const line = text.lastIndexOf("\n", end);
      if (line > from + PIECE / 2) end = line + 1;
      else if (isHighSurrogate(text, end - 1)) end += 1;
    }
    // The break between two blocks stands for the line's end.
    const isLast = end >= to;
    made.push(visible(text.slice(from, !isLast && text[end - 1] === "\n" ? end - 1 : end)));
    from = end;
  }
  return made;
}

function isHighSurrogate(text: string, at: number): boolean {
  const code = text.charCodeAt(at);
  return code >= 0xd800 && code < 0xdc00;
}

/** The beginning of the line that holds `at`, if it is near. */
function lineBefore(text: string, at: number): number {
  const line = text.lastIndexOf("\n", at);
  return line > at - 200 ? line + 1 : at;
}
