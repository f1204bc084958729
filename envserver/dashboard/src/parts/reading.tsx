// How far the index of what is on a disk is, and what in it is not a group.

import { useEffect, useState } from "preact/hooks";
import { useGet } from "../api";
import { type Source, useSource } from "../source";
import { number, visible } from "../text";

export function Reading() {
  const source = useSource();
  return source?.reading ? <Progress before={source} /> : null;
}

function Progress({ before }: { before: Source }) {
  const [isDone, setDone] = useState(before.reading?.done ?? false);
  const now = useGet<Source>("v1/source", isDone ? 10 : 1).data ?? before;
  const { reading, problems } = now;
  const done = reading?.done ?? true;
  useEffect(() => setDone(done), [done]);
  return (
    <>
      {reading?.error && <p class="panel banner bad">The index cannot go on: {visible(reading.error)}</p>}
      {reading && !reading.done && !reading.error && (
        <p class="panel banner" role="status">
          Reading: {Math.floor((100 * reading.bytes) / Math.max(1, reading.total_bytes))} % · {number(reading.groups)} groups so far
        </p>
      )}
      {problems && problems.count > 0 && (
        <details class="panel banner warn">
          <summary>
            {number(problems.count)} {problems.count === 1 ? "place was" : "places were"} skipped
          </summary>
          <ul>
            {problems.first.map((one) => (
              <li key={one}>{visible(one)}</li>
            ))}
          </ul>
        </details>
      )}
    </>
  );
}
