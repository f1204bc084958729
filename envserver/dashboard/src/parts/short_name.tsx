// A task's id in a list: where it does not fit, its middle is left out; its title has all of it.

import { named } from "../text";

const END = 8;
const SHORT = 12;

export function ShortName({ text }: { text: string }) {
  const shown = named(text);
  const at = shown.length > SHORT ? shown.length - END : 0;
  return (
    <span class="short-name" title={shown} dir="auto">
      {at > 0 && <span>{shown.slice(0, at)}</span>}
      <span>{shown.slice(at)}</span>
    </span>
  );
}
