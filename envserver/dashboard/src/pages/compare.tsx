// Two groups, or two rollouts, of one task side by side: "#/compare?a=GROUP&b=GROUP", "a=GROUP/N&b=GROUP/N".

import { rolloutPath, useGroup } from "../parts/group_data";
import { useKeys } from "../parts/keys";
import type { RolloutAnswer } from "../records";
import { useGet } from "../api";
import { link, setQuery, usePlace } from "../router";
import { count, named, number, visible } from "../text";
import { type Column, SideBySide } from "./group";

const MOST_OF_EACH = 4;

/** "GROUP/3": the group and the rollout's number. Ids of groups may have slashes. */
function sideOf(text: string): { id: string; number: number | null } {
  const found = /^(.+)\/(\d{1,6})$/.exec(text);
  return found ? { id: found[1]!, number: Number(found[2]) } : { id: text, number: null };
}

export function Compare() {
  const { query } = usePlace();
  const [a, b] = [query.get("a"), query.get("b")];
  if (!a || !b) return <p>This page compares two groups or two rollouts; its address says which: a=GROUP and b=GROUP.</p>;
  return <Sides key={`${a}\n${b}`} a={a} b={b} />;
}

function Sides({ a, b }: { a: string; b: string }) {
  const { query } = usePlace();
  const sides = [useSide("A", a, 0), useSide("B", b, 1)] as const;
  const at = Number(query.get("at") ?? 0);
  const columns = interleaved(sides[0].columns, sides[1].columns).map((one, n) => ({ ...one, number: n }));
  const choose = (n: number) => setQuery({ at: Math.max(0, Math.min(columns.length - 1, n)) });
  useKeys("Compare", [
    { key: "j", text: "next column", run: () => choose(at + 1) },
    { key: "k", text: "previous column", run: () => choose(at - 1) },
    { key: "Enter", text: "open the rollout", run: () => columns[at] && (location.hash = columns[at].link) },
  ]);
  return (
    <article class="group-page">
      <nav class="trail" aria-label="Where this is">
        <b>Compare</b>
      </nav>
      {sides.map((side) => (
        <p key={side.name} class="facts">
          <b>{side.name}</b>
          <a href={side.link} class="mono">
            {visible(side.text)}
          </a>
          {side.mean !== null && <span>mean {number(side.mean)}</span>}
          {side.size !== null && <span>{count(side.size, "rollout")}</span>}
          {side.size !== null && side.size > side.columns.length && <span>{side.columns.length} shown</span>}
          {side.task !== null && <span>task {named(side.task)}</span>}
          {side.model !== null && <span>{visible(side.model)}</span>}
          {side.problem && (
            <span class="bad" role="alert">
              {side.problem}
            </span>
          )}
        </p>
      ))}
      {sides[0].task !== null && sides[1].task !== null && sides[0].task !== sides[1].task && <p class="warn">These are of different tasks.</p>}
      {sides.every((side) => side.columns.length > 0) ? <SideBySide columns={columns} chosen={at} choose={choose} /> : !sides.some((side) => side.problem) && <p class="dim">Reading …</p>}
    </article>
  );
}

interface Side {
  name: string;
  text: string;
  link: string;
  columns: Column[];
  size: number | null;
  mean: number | null;
  task: string | null;
  model: string | null;
  problem: string | null;
}

function useSide(name: string, text: string, place: number): Side {
  const { id, number: n } = sideOf(text);
  const one = useGet<RolloutAnswer>(n === null ? null : rolloutPath(id, n));
  const all = useGroup(n === null ? id : null);
  const head = one.data?.group ?? all.data?.group;
  const rollouts = one.data ? [one.data.rollout] : (all.data?.rollouts ?? []);
  const given = rollouts.map((rollout) => rollout.score.reward).filter((reward) => reward !== null);
  return {
    name,
    text,
    link: n === null ? link(["groups", id]) : link(["groups", id, String(n)]),
    columns: rollouts.slice(0, MOST_OF_EACH).map((rollout, k) => ({
      name: `${name}, rollout ${n ?? k}`,
      number: place,
      rollout,
      range: head?.reward_range,
      weights: head?.component_weights,
      link: link(["groups", id, String(n ?? k)]),
    })),
    size: rollouts.length || null,
    mean: given.length ? given.reduce((sum, reward) => sum + reward, 0) / given.length : null,
    task: head?.task_id ?? null,
    model: head?.model ?? null,
    problem: (one.problem ?? all.problem)?.message ?? null,
  };
}

/** A's first, B's first, A's second ... */
function interleaved<T>(a: T[], b: T[]): T[] {
  return Array.from({ length: Math.max(a.length, b.length) }, (_, n) => [a[n], b[n]]).flat().filter((one) => one !== undefined) as T[];
}
