// How hard the tasks are: the curriculum's estimates of how often each is solved.

import { useGet } from "../api";
import { link } from "../router";
import { number, visible } from "../text";

/** A row of GET /v1/tasks/estimates. */
interface Estimate {
  task_id: string;
  attempts: number;
  success: number;
}

const MOST = 1000;
const BARS = 10;

export function Estimates({ environments }: { environments: string[] }) {
  if (!environments.length) return null;
  return (
    <figure class="panel chart estimates">
      <figcaption>
        <h3>Tasks by success</h3>
        <span class="dim">the curriculum's estimates, from never to always solved</span>
      </figcaption>
      <table>
        <caption class="unseen">Tasks by how often they are solved</caption>
        <thead>
          <tr>
            <th scope="col" class="unseen">environment</th>
            <th scope="col">never … always</th>
            <th scope="col" class="n">tasks</th>
            <th scope="col" class="n">between</th>
          </tr>
        </thead>
        <tbody>
          {environments.map((name) => (
            <Row key={name} environment={name} />
          ))}
        </tbody>
      </table>
    </figure>
  );
}

function Row({ environment }: { environment: string }) {
  const path = `v1/tasks/estimates?limit=${MOST}&environment=${encodeURIComponent(environment)}`;
  const { data } = useGet<{ estimates: Estimate[]; next: number | null }>(path, 60);
  const counts = Array.from({ length: BARS }, () => 0);
  for (const { success } of data?.estimates ?? []) counts[Math.min(BARS - 1, Math.floor(success * BARS))]!++;
  const total = data?.estimates.length ?? 0;
  const between = total - counts[0]! - counts[BARS - 1]!;
  return (
    <tr>
      <th scope="row">
        <a href={link(["tasks"], { environment })}>{visible(environment)}</a>
      </th>
      <td>
        <Bars counts={counts} />
      </td>
      <td class="n">
        {number(total)}
        {data?.next ? "+" : ""}
      </td>
      <td class="n">{total ? `${number((100 * between) / total, 2)} %` : "–"}</td>
    </tr>
  );
}

function Bars({ counts }: { counts: number[] }) {
  const most = Math.max(1, ...counts);
  const said = counts.map((count, place) => (count ? `${count} at ${place * BARS} to ${(place + 1) * BARS} %` : "")).filter(Boolean);
  return (
    <svg class="bars" width="110" height="24" role="img" aria-label={said.join(", ") || "no task"}>
      {counts.map((count, place) => {
        const height = count ? Math.max(2, (22 * count) / most) : 0;
        return <rect key={place} x={place * 11} y={23 - height} width="9" height={height} />;
      })}
      <line x1="0" x2="109" y1="23.5" y2="23.5" />
    </svg>
  );
}
