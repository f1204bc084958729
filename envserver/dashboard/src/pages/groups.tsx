// Groups: searched, filtered, sorted; live and stable however many there are.

import { useEffect, useRef, useState } from "preact/hooks";
import { useGet } from "../api";
import { useLive } from "../live";
import { Filters } from "../parts/filters";
import { filterOf, forgetGroupList, groupList, useGroupList } from "../parts/group_list";
import { Histogram, type Rewards } from "../parts/histogram";
import { useKeys } from "../parts/keys";
import { WindowedList } from "../parts/list";
import { ShortName } from "../parts/short_name";
import { type GroupRow, hasFailure } from "../records";
import { go, link, setQuery, usePlace } from "../router";
import { ago, amount, count, number, visible } from "../text";
import "../groups.css";

const LOOK_SECONDS = 30;
const LOOK_AGAIN_MS = 2000;
const COUNT_SECONDS = 30;

export function Groups() {
  const { query } = usePlace();
  const [turn, again] = useState(0);
  const list = groupList(query);
  useGroupList(list);
  const [isAtTop, setAtTop] = useState(true);
  const [marked, mark] = useState<string | null>(null);
  const isOver = useRef(false);
  const chosen = query.get("chosen");
  const filter = filterOf(query);
  const { min_reward: _, max_reward: __, order: ___, words, ...others } = filter;
  const rewards = useGet<Rewards>(`v1/rewards?${new URLSearchParams(others)}`, COUNT_SECONDS);
  const matching = useGet<Rewards>(
    filter.min_reward || filter.max_reward ? `v1/rewards?${new URLSearchParams({ ...others, ...pick(filter, "min_reward", "max_reward") })}` : null,
    COUNT_SECONDS,
  );
  const total = words ? null : ((filter.min_reward || filter.max_reward ? matching : rewards).data?.groups ?? null);

  useEffect(() => {
    if (list.rows.length === 0) void list.more();
    else void list.look();
    const timer = setInterval(() => look(), LOOK_SECONDS * 1000);
    return () => clearInterval(timer);
  }, [list, turn]);
  // A single group is told with its row. Of many only the number is told: then the list is asked,
  // once in two seconds at most.
  const waiting = useRef(0);
  const look = () => {
    if (document.hidden || waiting.current) return;
    void list.look();
    waiting.current = setTimeout(() => {
      waiting.current = 0;
      if (missed.current) look();
      missed.current = false;
    }, LOOK_AGAIN_MS);
  };
  const missed = useRef(false);
  const arrived = () => {
    if (waiting.current) missed.current = true;
    else look();
  };
  useLive("group", (row: GroupRow) => list.tell(row));
  useLive("groups", arrived);
  const readAgain = () => {
    forgetGroupList();
    again(turn + 1);
  };
  useLive("resync", () => {
    list.isOfAnotherStore().then((isOther) => (isOther ? readAgain() : arrived()), arrived);
  });
  const counting = useRef(0);
  useEffect(() => () => clearTimeout(counting.current), []);
  const take = () => {
    if (!list.take()) readAgain();
    counting.current ||= window.setTimeout(() => {
      counting.current = 0;
      rewards.again();
    }, LOOK_AGAIN_MS);
    document.querySelector(".group-list")?.scrollTo({ top: 0 });
  };
  // Nobody is reading: what arrives slides in.
  const isIdle = list.isBegun && isAtTop && chosen === null && !isOver.current && list.order === "newest";
  useEffect(() => {
    if (isIdle && list.fresh.length > 0) take();
  }, [list.fresh, isIdle]);

  const choose = (id: string | null) => setQuery({ chosen: id });
  const linkOf = (row: GroupRow) => link(["groups", row.group_id], filter);
  const open = (row: GroupRow) => go(linkOf(row));
  const failure = async () => {
    const from = chosen ?? list.rows[0]?.group_id;
    if (from === undefined) return;
    if (chosen === null && list.rows[0] && hasFailure(list.rows[0])) return choose(from);
    const found = await list.beside(from, 1, hasFailure);
    if (found) choose(found.group_id);
  };
  const compare = () => {
    if (chosen === null || chosen === marked) return mark(null);
    if (marked === null) return mark(chosen);
    go(link(["compare"], { a: marked, b: chosen }));
  };
  useKeys("Groups", [
    { key: "c", text: "compare: mark a group, then another", run: compare },
    { key: "f", text: "next group with a failure", run: () => void failure() },
    { key: ".", text: "show what is new", run: take },
    { key: "/", text: "search", run: () => document.querySelector<HTMLInputElement>("#filter-text")?.focus() },
    { key: "Escape", text: "choose no row", run: () => choose(null) },
  ]);
  const low = rewards.data?.low ?? 0;
  const high = rewards.data?.high ?? 1;

  return (
    <div class="groups-page">
      <Filters query={query} rows={list.rows} />
      <div class="groups-head">
        <Histogram rewards={rewards.data} query={query} />
        <p class="groups-count" role="status">
          {total === null ? count(list.rows.length, "group") + (list.isWhole ? "" : " and more") : count(total, "group")}
          {words && <span class="dim"> in {count(list.searched, "group")} searched</span>}{" "}
          {list.isPaused && <button onClick={() => list.searchFurther()}>search further</button>}
          {rewards.data && rewards.data.unscored > 0 && <span class="dim"> ({rewards.data.unscored.toLocaleString("en")} without a reward)</span>}{" "}
          {marked !== null && <span class="dim">comparing {visible(marked)} with … (c) </span>}
          {list.fresh.length > 0 && (
            <button class="new" onClick={take}>
              {list.freshCount} new
            </button>
          )}
        </p>
      </div>
      {list.problem && (
        <p class="bad" role="alert">
          {list.problem.message} {list.problem.hint}
        </p>
      )}
      {list.isWhole && list.rows.length === 0 && !list.problem ? (
        <p class="dim">
          {Object.keys(filter).length > 0 ? (
            <>
              No group matches. <a href={link(["groups"])}>Show all groups</a>
            </>
          ) : (
            "No group has been finished yet. The first appears when all its rollouts are scored and, in training, their rewards differ; Workers shows what is in progress, Failures what went wrong."
          )}
        </p>
      ) : (
        <>
          <div class="list-head group-cells">
            <Sort title="age" order={list.order} by={["newest", "oldest"]} />
            <span>environment</span>
            <span>task</span>
            <Sort title="mean" order={list.order} by={["worst", "best"]} isRight />
            <Sort title="rewards" order={list.order} by={["widest"]} />
            <span class="right">version</span>
            <span class="right" title="of its longest rollout">turns</span>
            <Sort title="tokens" hint="completion tokens of all its rollouts" order={list.order} by={["longest"]} isRight />
            <span>ends, flags</span>
          </div>
          <div class="group-list-box" onMouseEnter={() => (isOver.current = true)} onMouseLeave={() => (isOver.current = false)}>
            <WindowedList
              label="Groups"
              className="group-list"
              rows={list.rows}
              total={total}
              keyOf={(row) => row.group_id}
              chosen={chosen}
              choose={choose}
              open={open}
              linkOf={linkOf}
              line={(row) => <Cells row={row} low={low} high={high} />}
              more={() => void list.more()}
              atTop={setAtTop}
            />
          </div>
        </>
      )}
    </div>
  );
}

/** A column's head that sorts, one way and the other. */
function Sort({ title, hint, order, by, isRight = false }: { title: string; hint?: string; order: string; by: string[]; isRight?: boolean }) {
  const at = by.indexOf(order);
  const next = by[(at + 1) % by.length]!;
  const mark = at < 0 ? "" : order === "worst" || order === "oldest" ? " ↑" : " ↓";
  return (
    <button class={isRight ? "sort right" : "sort"} aria-pressed={at >= 0} title={`${hint ? `${hint}; ` : ""}order: ${next}`} onClick={() => setQuery({ order: next === "newest" ? null : next, chosen: null })}>
      {title}
      {mark}
    </button>
  );
}

function Cells({ row, low, high }: { row: GroupRow; low: number; high: number }) {
  return (
    <>
      <span class="dim" title={new Date(row.created_at * 1000).toISOString()}>
        {ago(row.created_at)}
      </span>
      <span>{visible(row.env)}</span>
      <ShortName text={row.task_id || row.group_id} />
      <span class="right">{number(row.reward_mean)}</span>
      <span class="sparks" aria-hidden="true">{sparks(row.rewards ?? [], low, high)}</span>
      <span class="right">{row.policy_version < 0 ? "–" : row.policy_version}</span>
      <span class="right">{number(row.turns)}</span>
      <span class="right">{amount(row.completion_tokens ?? row.tokens)}</span>
      <span class="warn">{visible(notes(row))}</span>
    </>
  );
}

const BLOCKS = "▁▂▃▄▅▆▇█";

/** One block a rollout, as high as its reward; "·" where there is none. */
export function sparks(rewards: (number | null)[], low: number, high: number): string {
  return rewards
    .map((one) => {
      if (one === null) return "·";
      const share = high > low ? (one - low) / (high - low) : 1;
      return BLOCKS[Math.max(0, Math.min(7, Math.round(share * 7)))];
    })
    .join("");
}

/** What is unusual about a group: limits, missing rewards, flags, the state if it is not queued. */
function notes(row: GroupRow): string {
  const parts = Object.entries(row.ends ?? {})
    .filter(([end]) => end !== "agent")
    .map(([end, times]) => `${times} × ${end}`);
  const unscored = row.rewards?.filter((one) => one === null).length ?? 0;
  if (unscored > 0) parts.push(`${unscored} unscored`);
  parts.push(...(row.flags ?? []));
  if (row.state === "dropped") parts.push("dropped");
  return parts.join(", ");
}

function pick(from: Record<string, string>, ...names: string[]): Record<string, string> {
  return Object.fromEntries(names.flatMap((name) => (from[name] === undefined ? [] : [[name, from[name]]])));
}
