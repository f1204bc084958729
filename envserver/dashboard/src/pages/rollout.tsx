// A rollout: as conversation, as tokens, over time, with what it used, and as JSON.

import { useMemo } from "preact/hooks";
import { get, useGet } from "../api";
import { Messages, summaryOf } from "../parts/conversation";
import { Copy } from "../parts/copy";
import { rolloutPath } from "../parts/group_data";
import { filterOf } from "../parts/group_list";
import { useKeys } from "../parts/keys";
import { LongText } from "../parts/long";
import { Outcome } from "../parts/outcome";
import { Timeline } from "../parts/timeline";
import { Use } from "../parts/use";
import { isFailure, type Rollout, type RolloutAnswer, type Timing, type Tool } from "../records";
import { go, link, place, setQuery, usePlace } from "../router";
import { useSource } from "../source";
import { asText, count, named, quoted, visible } from "../text";
import { Ended, goBeside } from "./group";
import { Tokens } from "./tokens";

const TABS = ["conversation", "tokens", "timing", "use", "raw"] as const;
type Tab = (typeof TABS)[number];

/** Rollouts of the groups that were seen, so that keys act before a page is read. */
const sizes = new Map<string, number>();

export function RolloutPage({ id, number }: { id: string; number: number }) {
  const { query } = usePlace();
  const path = rolloutPath(id, number);
  const { data, problem } = useGet<RolloutAnswer>(path);
  const source = useSource();
  const filter = filterOf(query);
  const asked = query.get("tab") as Tab;
  const tab: Tab = TABS.includes(asked) ? asked : "conversation";
  const kept = { ...filter, tab: tab === "conversation" ? null : tab };
  const show = (next: Tab) => setQuery({ tab: next === "conversation" ? null : next, row: null, token: null });
  const rolloutLink = (group: string, n: number) => link(["groups", group, String(n)], kept);

  if (data) sizes.set(id, data.rollouts);
  const step = (by: 1 | -1) => {
    const [, group = id, at = ""] = place().path; // further than what is shown, if keys come fast
    const next = Number(at) + by;
    const size = sizes.get(group);
    if (size === undefined) return; // not read yet
    if (next >= 0 && next < size) go(rolloutLink(group, next));
    else void goBeside(group, by, query, (other) => rolloutLink(other, 0));
  };
  const failure = async () => {
    if (!data) return; // not read yet
    for (let next = number + 1; next < data.rollouts; next += 1) {
      const one = await get<RolloutAnswer>(rolloutPath(id, next));
      if (isFailure(one.rollout, one.group.reward_range)) return go(rolloutLink(id, next));
    }
    await goBeside(id, 1, query, (other) => rolloutLink(other, 0), true);
  };
  const message = (by: 1 | -1) => moveToMessage(by);
  useKeys("Rollout", [
    ...(tab === "conversation"
      ? [
          { key: "j", text: "next message", run: () => message(1) },
          { key: "k", text: "previous message", run: () => message(-1) },
        ]
      : []),
    { key: "]", text: "next rollout, then the next group of the filter", run: () => step(1) },
    { key: "[", text: "previous rollout, then the previous group", run: () => step(-1) },
    { key: "f", text: "next failure", run: () => void failure() },
    { key: "t", text: "next tab", run: () => show(TABS[(TABS.indexOf(tab) + 1) % TABS.length]!) },
    { key: "c", text: "compare with the others of its group", run: () => go(link(["groups", id], { ...filter, at: number })) },
    { key: "/", text: "search groups", run: () => go(link(["groups"], { ...filter, chosen: id })) },
    { key: "Escape", text: "back to the group", run: () => go(link(["groups", id], { ...filter, at: number })) },
  ]);

  return (
    <article class="rollout-page">
      <nav class="trail" aria-label="Where this is">
        <a href={link(["groups"], { ...filter, chosen: id })}>Groups</a> / <a href={link(["groups", id], { ...filter, at: number })} class="mono">{visible(id)}</a> / <b>rollout {number}</b>
        <span class="spacer" />
        <Ended />
        <button title="[" onClick={() => step(-1)}>
          previous
        </button>
        <button title="]" onClick={() => step(1)}>
          next
        </button>
      </nav>
      {problem && (
        <p class="bad" role="alert">
          {problem.message} {problem.hint}
        </p>
      )}
      {!data && !problem && <p class="dim">Reading …</p>}
      {data && (
        <>
          <p class="facts">
            <span>{visible(data.group.env)}</span>
            <span>
              task <a href={link(["tasks", data.group.env, data.group.task_id])}>{named(data.group.task_id)}</a>
            </span>
            <span>{visible(data.group.model)}</span>
            <span>{data.group.policy_version < 0 ? "no known policy version" : `version ${data.group.policy_version}`}</span>
            <span class="mono">{visible(data.rollout.rollout_id)}</span>
          </p>
          <Outcome rollout={data.rollout} range={data.group.reward_range} weights={data.group.component_weights} />
          <p class="actions">
            <Copy text={location.href}>copy link</Copy>
            <Copy text={curl(path)}>copy as curl</Copy>
            <Copy text={replay(source?.replay_source ?? null, data)}>copy as envserver replay</Copy>
            <a href={path} download={`${data.rollout.rollout_id.replace(/[^\w.-]+/g, "_")}.json`}>
              download JSON
            </a>
          </p>
          <div class="tabs" role="tablist" aria-label="Views of the rollout">
            {TABS.map((one) => (
              <button key={one} id={`tab-${one}`} role="tab" aria-selected={one === tab} aria-controls="tab-panel" tabIndex={one === tab ? 0 : -1} onClick={() => show(one)} onKeyDown={(event) => arrows(event, one, show)}>
                {one}
              </button>
            ))}
          </div>
          <div id="tab-panel" role="tabpanel" aria-labelledby={`tab-${tab}`} class={`tab-panel panel-${tab}`}>
            {tab === "conversation" && <Conversations answer={data} />}
            {tab === "tokens" && <Tokens key={`${id}/${number}`} path={path} answer={data} />}
            {tab === "timing" && <Timeline answer={data} tokenLink={(row, token) => link(["groups", id, String(number)], { ...filter, tab: "tokens", row, token })} />}
            {tab === "use" && <Use answer={data} />}
            {tab === "raw" && <Raw answer={data} />}
          </div>
        </>
      )}
    </article>
  );
}

function Raw({ answer }: { answer: RolloutAnswer }) {
  const text = useMemo(() => asText(answer), [answer]);
  return <LongText text={text} most={30_000} />;
}

function arrows(event: KeyboardEvent, tab: Tab, show: (tab: Tab) => void): void {
  const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
  if (by === 0) return;
  event.preventDefault();
  event.stopPropagation();
  const next = TABS[(TABS.indexOf(tab) + by + TABS.length) % TABS.length]!;
  show(next);
  document.getElementById(`tab-${next}`)?.focus();
}

/** Each agent has a lane. */
function Conversations({ answer }: { answer: RolloutAnswer }) {
  const { rollout, group } = answer;
  const main = mainAgent(answer);
  const lanes = [
    { agent: main, trained: main === null ? true : (group.rendering?.agents?.[main]?.trained ?? true), model: group.model, messages: rollout.messages, tools: rollout.tools, turns: rollout.turns },
    ...rollout.others,
  ];
  return (
    <>
      <div class="lanes" tabIndex={0} role="region" aria-label="Conversations">
        {lanes.map((one, n) => (
          <section key={n} class="lane" aria-label={one.agent ?? "Conversation"}>
            {(lanes.length > 1 || one.agent) && (
              <h2>
                {visible(one.agent ?? "agent")}{" "}
                <span class="dim">
                  {visible(one.model)}
                  {one.trained ? "" : ", not trained"}, {summaryOf(one.messages)}
                </span>
              </h2>
            )}
            <Tools tools={one.tools} />
            <Messages messages={one.messages} lanes={lanes.length} turns={rollout.score.turns.filter((reward) => (reward.agent ?? main) === one.agent)} timings={timingsOf(rollout.timings, one.agent, lanes.length)} />
            {one.messages.length === 0 && <p class="dim">No messages were recorded.</p>}
          </section>
        ))}
      </div>
      <Output rollout={rollout} />
    </>
  );
}

function mainAgent({ rollout }: RolloutAnswer): string | null {
  const others = new Set(rollout.others.map((one) => one.agent));
  return Object.keys(rollout.agent_calls).find((name) => name !== "" && !others.has(name)) ?? null;
}

function timingsOf(timings: Timing[] | undefined, agent: string | null, lanes: number): Timing[] {
  return (timings ?? []).filter((one) => lanes === 1 || one.agent === agent);
}

function Tools({ tools }: { tools: Tool[] }) {
  if (tools.length === 0) return null;
  return (
    <details class="tools">
      <summary>
        {count(tools.length, "tool")} <span class="dim">{visible(tools.map((one) => one.function?.name ?? "").join(", "))}</span>
      </summary>
      <LongText text={asText(tools)} most={3000} />
    </details>
  );
}

function Output({ rollout }: { rollout: Rollout }) {
  if (rollout.output === null || rollout.output === undefined) return null;
  return (
    <details class="task">
      <summary>What the agent returned</summary>
      <LongText text={asText(rollout.output)} />
    </details>
  );
}

function moveToMessage(by: 1 | -1): void {
  const all = [...document.querySelectorAll<HTMLElement>(".lane:first-child .message")];
  const now = all.findIndex((one) => one === document.activeElement);
  const next = all[now < 0 ? (by > 0 ? 0 : all.length - 1) : Math.max(0, Math.min(all.length - 1, now + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

/** Address of the server, as a shell has it. */
function base(): string {
  return new URL(".", location.href).href.replace(/\/$/, "");
}

function curl(path: string): string {
  return `curl -H "Authorization: Bearer $ENVSERVER_TOKEN" ${quoted(`${base()}/${path}`)}`;
}

/** The command that runs the rollout again from its record. */
function replay(source: string | null, { rollout }: RolloutAnswer): string {
  return `envserver replay ${quoted(source ?? base())} --rollout ${quoted(rollout.rollout_id)}`;
}
