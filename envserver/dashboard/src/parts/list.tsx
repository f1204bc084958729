// A list of any length: only the rows in view are in the document.

import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { useKeys } from "./keys";
import "./list.css";

export const ROW_HEIGHT = 28;
const BEYOND = 4; // rows above and below those in view
const NEAR_THE_END = 60; // rows before the end at which more is asked for

interface Props<T> {
  label: string;
  rows: readonly T[];
  /** Rows that there are in all; null: unknown. */
  total: number | null;
  keyOf: (row: T) => string;
  /** Key of the chosen row. */
  chosen: string | null;
  choose: (key: string | null) => void;
  open: (row: T) => void;
  /** Link to a row, for a new tab. */
  linkOf: (row: T) => string;
  /** The cells of a row. */
  line: (row: T) => ComponentChildren;
  /** Called when the end comes near. */
  more: () => void;
  /** Called with whether the first row is in view. */
  atTop?: (isAtTop: boolean) => void;
  className?: string;
}

/** Names the element of a row. */
function idOf(label: string, index: number): string {
  return `${label.replace(/\W/g, "-")}-${index}`;
}

export function WindowedList<T>(props: Props<T>) {
  const { label, rows, keyOf, chosen, choose, open } = props;
  const box = useRef<HTMLDivElement>(null);
  const [first, setFirst] = useState(0);
  const [height, setHeight] = useState(600);
  const chosenAt = chosen === null ? -1 : indexOf(rows, keyOf, chosen);

  useLayoutEffect(() => {
    const watch = new ResizeObserver(() => setHeight(box.current?.clientHeight ?? 600));
    watch.observe(box.current!);
    return () => watch.disconnect();
  }, []);

  // Rows that come in above what is read do not move it.
  const firstKey = useRef<string | null>(null);
  useLayoutEffect(() => {
    const list = box.current!;
    const before = firstKey.current;
    firstKey.current = rows[0] === undefined ? null : keyOf(rows[0]);
    if (before === null || before === firstKey.current || list.scrollTop < 1) return;
    const moved = rows.findIndex((row) => keyOf(row) === before);
    if (moved > 0) list.scrollTop += moved * ROW_HEIGHT;
  }, [rows]);

  const inView = Math.ceil(height / ROW_HEIGHT);
  const from = Math.max(0, Math.min(first, rows.length - inView) - BEYOND);
  const to = Math.min(rows.length, first + inView + BEYOND);
  useEffect(() => {
    if (to + NEAR_THE_END >= rows.length) props.more();
  }, [to, rows.length]);

  const scrolled = () => {
    const top = box.current!.scrollTop;
    setFirst(Math.floor(top / ROW_HEIGHT));
    props.atTop?.(top < ROW_HEIGHT);
  };
  const show = (index: number) => {
    const list = box.current!;
    const top = index * ROW_HEIGHT;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
    setFirst(Math.floor(list.scrollTop / ROW_HEIGHT));
  };
  const move = (to: number) => {
    const index = Math.max(0, Math.min(rows.length - 1, to));
    if (rows[index] === undefined) return;
    choose(keyOf(rows[index]));
    show(index);
  };
  const start = chosenAt < 0 ? first - 1 : chosenAt;
  // A list that is opened again shows the row that was chosen.
  useLayoutEffect(() => {
    if (chosenAt >= 0) show(chosenAt);
  }, [chosen, chosenAt >= 0]);

  const moves: Record<string, () => void> = {
    ArrowDown: () => move(start + 1),
    ArrowUp: () => move(chosenAt < 0 ? first : chosenAt - 1),
    PageDown: () => move(start + inView),
    PageUp: () => move(start - inView),
    Home: () => move(0),
    End: () => move(rows.length - 1),
    Enter: () => rows[chosenAt] !== undefined && open(rows[chosenAt]),
  };
  useKeys(label, [
    { key: "j", text: "next row", run: moves.ArrowDown! },
    { key: "k", text: "previous row", run: moves.ArrowUp! },
    { key: "Enter", text: "open the row", run: moves.Enter! },
  ]);
  const pressed = (event: KeyboardEvent) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : moves[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };
  const clicked = (event: MouseEvent, row: T) => {
    if (event.button > 1) return;
    choose(keyOf(row));
    if (event.button === 1 || event.ctrlKey || event.metaKey) window.open(props.linkOf(row), "_blank", "noopener");
    else open(row);
  };

  return (
    <div
      ref={box}
      class={`list ${props.className ?? ""}`}
      role="listbox"
      aria-label={label}
      aria-activedescendant={chosenAt >= from && chosenAt < to ? idOf(label, chosenAt) : undefined}
      tabIndex={0}
      onScroll={scrolled}
      onKeyDown={pressed}
    >
      <div role="presentation" class="list-space" style={{ height: `${rows.length * ROW_HEIGHT}px` }}>
        {rows.slice(from, to).map((row, place) => {
          const index = from + place;
          return (
            <div
              key={keyOf(row)}
              id={idOf(label, index)}
              class="list-row"
              role="option"
              aria-selected={index === chosenAt}
              aria-setsize={props.total ?? -1}
              aria-posinset={index + 1}
              style={{ top: `${index * ROW_HEIGHT}px` }}
              onClick={(event) => clicked(event, row)}
              onAuxClick={(event) => clicked(event, row)}
            >
              {props.line(row)}
            </div>
          );
        })}
      </div>
    </div>
  );
}

let lastFound = { rows: [] as readonly unknown[], key: "", at: -1 };

/** The place of a row; a list of 100,000 is searched once, not at every scroll. */
function indexOf<T>(rows: readonly T[], keyOf: (row: T) => string, key: string): number {
  if (lastFound.rows !== rows || lastFound.key !== key) {
    lastFound = { rows, key, at: rows.findIndex((row) => keyOf(row) === key) };
  }
  return lastFound.at;
}
