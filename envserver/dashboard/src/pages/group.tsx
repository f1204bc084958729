// A group: all rollouts of one task side by side, from where their conversations part.

import { useEffect, useMemo, useState } from "preact/hooks";
import { Messages, summaryOf } from "../parts/conversation";
import { groupPath, partingOf, useGroup } from "../parts/group_data";
import { filterOf, groupList } from "../parts/group_list";
import { useKeys } from "../parts/keys";
import { LongText } from "../parts/long";
import { endOf, Outcome, Reward } from "../parts/outcome";
import { FailedAttempts } from "../parts/use";
import { type GroupHead, hasFailure, isFailure, type Message, type RewardRange, type Rollout } from "../records";
import { go, link, setQuery, usePlace } from "../router";
import { asText, clock, count, named, number, visible } from "../text";

const MOST_COLUMNS = 8;

/** Moves to the next or previous group of the filter that the address has. */
export async function goBeside(id: string, by: 1 | -1, query: URLSearchParams, to: (other: string) => string, failures = false): Promise<void> {
  const row = await groupList(query).beside(id, by, failures ? hasFailure : undefined);
  if (row) go(to(row.group_id));
  ended(row ? "" : failures ? "No further failure in this filter." : by > 0 ? "The last of this filter." : "The first of this filter.");
}

let ended = (_: string) => {};

/** Says that there is no next one. */
export function Ended() {
  const [text, say] = useState("");
  ended = say;
  useEffect(() => {
    if (!text) return;
    const timer = setTimeout(() => say(""), 3000);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <span class="dim" role="status">
      {text}
    </span>
  );
}

export function GroupPage({ id }: { id: string }) {
  const { query } = usePlace();
  const { data, problem } = useGroup(id);
  const filter = filterOf(query);
  const [marked, mark] = useState<number | null>(null);
  const at = Number(query.get("at") ?? 0);
  const size = data?.rollouts.length ?? 0;
  const pair = shownOf(query.get("show"), size);
  // Of many, those around the chosen one.
  const first = Math.floor(at / MOST_COLUMNS) * MOST_COLUMNS;
  const shown = pair ?? Array.from({ length: Math.max(0, Math.min(size - first, MOST_COLUMNS)) }, (_, n) => first + n);

  useEffect(() => showColumn(at), [size]); // of a link
  const choose = (next: number) => {
    if (size === 0) return;
    const place = Math.max(0, Math.min(size - 1, next));
    setQuery({ at: place, ...(pair && !pair.includes(place) ? { show: null } : {}) });
    requestAnimationFrame(() => showColumn(place)); // it may be drawn only now
  };
  const compare = () => {
    if (pair) return setQuery({ show: null });
    if (marked === null) return mark(at);
    if (marked !== at) setQuery({ show: [marked, at].sort((a, b) => a - b).join(",") });
    mark(null);
  };
  const failure = () => {
    const range = data?.group.reward_range;
    const next = data?.rollouts.findIndex((one, n) => n > at && isFailure(one, range)) ?? -1;
    if (next >= 0) choose(next);
    else void goBeside(id, 1, query, (other) => link(["groups", other], filter), true);
  };
  const rolloutLink = (n: number) => link(["groups", id, String(n)], filter);
  const toGroup = (by: 1 | -1) => void goBeside(id, by, query, (other) => link(["groups", other], filter));
  useKeys("Group", [
    { key: "j", text: "next rollout", run: () => choose(at + 1) },
    { key: "k", text: "previous rollout", run: () => choose(at - 1) },
    { key: "Enter", text: "open the rollout", run: () => go(rolloutLink(at)) },
    { key: "c", text: "compare: mark a rollout, then another; again: show all", run: compare },
    { key: "]", text: "next group of the filter", run: () => toGroup(1) },
    { key: "[", text: "previous group of the filter", run: () => toGroup(-1) },
    { key: "f", text: "next failure", run: failure },
    { key: "/", text: "search groups", run: () => go(link(["groups"], { ...filter, chosen: id })) },
    { key: "Escape", text: "back to the list", run: () => (marked !== null ? mark(null) : pair ? setQuery({ show: null }) : go(link(["groups"], { ...filter, chosen: id }))) },
  ]);

  const head = data?.group;
  return (
    <article class="group-page">
      <nav class="trail" aria-label="Where this is">
        <a href={link(["groups"], { ...filter, chosen: id })}>Groups</a> / <b class="mono">{visible(id)}</b>
        <span class="spacer" />
        <Ended />
        <button title="[" onClick={() => toGroup(-1)}>
          previous
        </button>
        <button title="]" onClick={() => toGroup(1)}>
          next
        </button>
      </nav>
      {problem && (
        <p class="bad" role="alert">
          {problem.message} {problem.status === 409 && <a href={groupPath(id)}>its JSON</a>}
        </p>
      )}
      {!data && !problem && <p class="dim">Reading …</p>}
      {data && head && (
        <>
          <GroupFacts head={head} />
          <div class="strip" role="group" aria-label="Rollouts">
            {data.rollouts.map((one, n) => (
              <button key={n} aria-pressed={n === at} class={n === marked ? "marked" : ""} title={endOf(one)} onClick={() => choose(n)}>
                {n}: <Reward value={one.score.reward} range={head.reward_range} />
                {(one.usage.ended_by !== "agent" || one.flags.length > 0) && <span class="warn"> ⚑</span>}
              </button>
            ))}
            <button title="c" onClick={compare}>
              {pair ? "show all" : marked === null ? "compare" : `compare ${marked} with ${at === marked ? "…" : at}`}
            </button>
            {!pair && size > MOST_COLUMNS && <span class="dim">rollouts {first} to {first + shown.length - 1} are shown; compare shows any two</span>}
          </div>
          <SideBySide
            columns={shown.flatMap((n) => {
              const rollout = data.rollouts[n];
              return rollout ? [{ name: `Rollout ${n}`, number: n, rollout, range: head.reward_range, weights: head.component_weights, link: rolloutLink(n) }] : [];
            })}
            chosen={at}
            choose={choose}
          />
        </>
      )}
    </article>
  );
}

/** Scrolls sideways only: what is read of a long column stays. */
function showColumn(n: number): void {
  const column = document.getElementById(`column-${n}`);
  const lanes = column?.parentElement;
  if (!column || !lanes) return;
  const [from, to] = [column.offsetLeft - lanes.offsetLeft, column.offsetLeft - lanes.offsetLeft + column.offsetWidth];
  if (from < lanes.scrollLeft) lanes.scrollLeft = from;
  else if (to > lanes.scrollLeft + lanes.clientWidth) lanes.scrollLeft = to - lanes.clientWidth;
}

/** "1,3": the rollouts that are shown alone; null: all. */
function shownOf(text: string | null, size: number): number[] | null {
  const numbers = (text ?? "").split(",").filter(Boolean).map(Number).filter((n) => Number.isInteger(n) && n >= 0 && n < size);
  return numbers.length > 0 ? numbers : null;
}

function GroupFacts({ head }: { head: GroupHead }) {
  const missing = Object.entries(head.missing ?? {});
  const lost = Object.entries(head.lost ?? {}).map(([kind, times]) => `${times} × ${kind}`);
  return (
    <>
      <p class="facts">
        <span>{visible(head.env)}</span>
        <span>
          task <a href={link(["tasks", head.env, head.task_id])}>{named(head.task_id)}</a>
        </span>
        <span>{visible(head.split)}</span>
        <span>{visible(head.model)}</span>
        <span>{head.policy_version < 0 ? "no known policy version" : `version ${head.policy_version}`}</span>
        <span>{clock(head.created_at)}</span>
        {lost.length > 0 && <span class="warn">lost: {visible(lost.join(", "))}</span>}
      </p>
      {missing.length > 0 && (
        <details class="task">
          <summary>
            {count(missing.length, "rollout is missing", "rollouts are missing")} <span class="dim">and why</span>
          </summary>
          {missing.map(([number, attempts]) => (
            <div key={number}>
              <h3>Rollout r{visible(number)}</h3>
              <FailedAttempts attempts={attempts} />
            </div>
          ))}
        </details>
      )}
      {Object.keys(head.public ?? {}).length > 0 && (
        <details class="task">
          <summary>Task (its public part)</summary>
          <LongText text={asText(head.public)} />
        </details>
      )}
    </>
  );
}

export interface Column {
  name: string;
  number: number;
  rollout: Rollout;
  range: RewardRange | undefined;
  weights: Record<string, number> | undefined;
  link: string;
}

export function SideBySide({ columns, chosen, choose }: { columns: Column[]; chosen: number; choose: (n: number) => void }) {
  const parting = useMemo(() => partingOf(columns.filter((one) => !one.rollout.cut).map((one) => one.rollout.messages)), [columns.map((one) => one.rollout.rollout_id).join("\n")]);
  const [isUnfolded, unfold] = useState(false);
  if (columns.length === 0) return null;
  const from = isUnfolded || columns.length === 1 ? 0 : parting.message;
  return (
    <>
      {columns.length > 1 && (
        <div class="common" role="note">
          {parting.isSame
            ? "All say the same, to the end."
            : parting.message === 0
              ? "They part at the first message."
              : `${count(parting.message, "message")} in common; they part at message #${parting.message}.`}{" "}
          {parting.message > 0 && (
            <button aria-expanded={isUnfolded} onClick={() => unfold(!isUnfolded)}>
              {isUnfolded ? "fold the common beginning" : "show the common beginning"}
            </button>
          )}
        </div>
      )}
      <div class="lanes" tabIndex={0} role="region" aria-label="Rollouts side by side">
        {columns.map((one) => (
          <Lane key={one.name} column={one} from={from} isChosen={one.number === chosen} choose={() => choose(one.number)} common={columns.length > 1 ? sameText(parting.message, parting.common) : undefined} beside={parting.later} lanes={columns.length} />
        ))}
      </div>
    </>
  );
}

function sameText(message: number, common: string | null): (index: number) => string | null {
  return (index) => (index === message ? common : null);
}

interface LaneProps {
  column: Column;
  from: number;
  isChosen: boolean;
  choose: () => void;
  common: ((index: number) => string | null) | undefined;
  beside: ReadonlySet<number>;
  lanes: number;
}

function Lane({ column, from, isChosen, choose, common, beside, lanes }: LaneProps) {
  const { rollout } = column;
  const messages: Message[] = rollout.messages;
  return (
    <section id={`column-${column.number}`} class={`lane ${isChosen ? "chosen" : ""}`} aria-label={column.name} onClick={choose}>
      <header class="lane-head">
        <h2>
          <a href={column.link}>{column.name}</a>
        </h2>
        <Outcome rollout={rollout} range={column.range} weights={column.weights} />
        <p class="dim">
          {summaryOf(messages)}
          {rollout.others.length > 0 && `; ${count(rollout.others.length, "other agent")}`}
          {Object.keys(rollout.metrics).length > 0 && `; ${Object.entries(rollout.metrics).slice(0, 4).map(([name, value]) => `${visible(name)} ${number(value)}`).join(", ")}`}
        </p>
      </header>
      <Messages messages={messages} from={Math.min(from, messages.length)} turns={rollout.score.turns.filter((one) => isMain(one.agent, rollout))} timings={rollout.timings?.filter((one) => isMain(one.agent, rollout))} beside={beside} lanes={lanes} {...(common ? { common } : {})} />
      {rollout.cut ? (
        <p>
          This group is too long to be shown whole. <a href={column.link}>Its own page has the conversation.</a>
        </p>
      ) : (
        from >= messages.length && <p class="dim">Nothing after the common beginning.</p>
      )}
    </section>
  );
}

/** Whether a reward is of the agent whose conversation is the rollout's own. */
export function isMain(agent: string | null, rollout: Rollout): boolean {
  return !rollout.others.some((one) => one.agent === agent);
}
