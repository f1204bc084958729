// The keys of the views that are shown, in one table: they act here, and the help dialog lists them.

import { useLayoutEffect, useRef } from "preact/hooks";

/** One key. `key` is that of the event ("j", "Enter", "?"); `text` says what it does. */
export interface Key {
  key: string;
  text: string;
  run: () => void;
}

/** The keys of one view or part, under its name. */
export interface KeyLayer {
  title: string;
  keys: Key[];
}

/** The innermost view comes last and is asked first. */
const layers: KeyLayer[] = [];

/** Makes `keys` act while the component is shown. */
export function useKeys(title: string, keys: Key[]): void {
  const layer = useRef<KeyLayer>({ title, keys });
  layer.current.title = title;
  layer.current.keys = keys;
  useLayoutEffect(() => {
    const mine = layer.current;
    layers.push(mine);
    return () => void layers.splice(layers.indexOf(mine), 1);
  }, []);
}

/** What the keys do now, for the help dialog. */
export function shownKeys(): readonly KeyLayer[] {
  return layers;
}

/** Whether keys go to a field or a dialog, and not to the page. */
function isTyping(target: EventTarget | null): boolean {
  if (document.querySelector("dialog[open]")) return true;
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target;
  if (isTyping(target)) {
    // Escape leaves a field, so that the keys act again.
    if (event.key === "Escape" && target instanceof HTMLElement && !document.querySelector("dialog[open]")) target.blur();
    return;
  }
  // Enter and the space bar act on what has the focus.
  if ((event.key === "Enter" || event.key === " ") && target instanceof HTMLElement && target.matches("a, button, summary")) return;
  for (const layer of layers.toReversed()) {
    const found = layer.keys.find((one) => one.key === event.key);
    if (!found) continue;
    event.preventDefault();
    found.run();
    return;
  }
});
