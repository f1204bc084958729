// What a page shows until its data are there, and when they cannot be had.

import type { ComponentChildren } from "preact";
import type { Loaded } from "../api";
import { visible } from "../text";

interface Props<T> {
  of: Loaded<T>;
  /** What is read: "engines". */
  what: string;
  children: (data: T) => ComponentChildren;
}

/** What was read; while it is read again it stays. */
export function Show<T>({ of: { data, problem }, what, children }: Props<T>) {
  if (data) return <>{children(data)}</>;
  if (!problem) return <p class="dim">Reading {what} …</p>;
  return (
    <p class="bad">
      {visible(problem.message)} {visible(problem.hint)}
    </p>
  );
}
