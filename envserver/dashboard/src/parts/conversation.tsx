// A conversation: messages by role, reasoning folded, tool calls with their results and times.

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { ContentPart, Message, Timing, ToolCall, TurnReward } from "../records";
import { asText, count, duration, number, shortened, visible } from "../text";
import { LongText } from "./long";

const IMAGE = /^data:image\/(png|jpeg|gif|webp|avif);base64,[A-Za-z0-9+/=\s]+$/;
const OF_ROLLOUT = /^v1\/groups\/.*\/images\//;
const MOST_MESSAGES = 100;
const FEWEST_MESSAGES = 20;
const MOST_OF_SYSTEM = 500;
const ROLES = new Set(["system", "developer", "user", "assistant", "tool"]);

/** Parts of a message, apart: reasoning, what is said, tool calls. */
export interface Said {
  role: string;
  reasoning: string;
  parts: (string | { image: string } | { other: string })[];
  calls: { id: string; name: string; text: string }[];
}

/** Takes a message apart. Whatever an agent or a model made of it, something is shown. */
export function saidIn(message: Message): Said {
  const { role, content, refusal, tool_calls: calls } = message;
  const said: Said = {
    role: typeof role === "string" ? role : "unknown",
    reasoning: textOf(message.reasoning_content ?? message.reasoning ?? ""),
    parts: (Array.isArray(content) ? content : content === null || content === undefined ? [] : [content]).map(partOf),
    calls: Array.isArray(calls) ? calls.map(callOf) : calls ? [callOf(calls)] : [],
  };
  if (refusal) said.parts.push(textOf(refusal));
  const [first] = said.parts;
  if (said.role === "assistant" && typeof first === "string" && !said.reasoning) {
    // Engines without a reasoning parser leave the marks in the text.
    const close = first.indexOf("</think>");
    if (close >= 0) {
      said.reasoning = first.slice(0, close).replace(/^\s*<think>/, "");
      said.parts[0] = first.slice(close + "</think>".length).replace(/^\s+/, "");
    }
  }
  return said;
}

function textOf(value: unknown): string {
  return typeof value === "string" ? value : asText(value);
}

function partOf(part: unknown): Said["parts"][number] {
  if (typeof part !== "object" || part === null) return textOf(part);
  const { text, image_url: given } = part as ContentPart;
  if (typeof text === "string") return text;
  const image: unknown = typeof given === "object" && given !== null ? given.url : given;
  return typeof image === "string" ? { image } : { other: asText(part) };
}

function callOf(call: unknown): Said["calls"][number] {
  const { id = "", function: called } = (call ?? {}) as ToolCall;
  const named = typeof called === "object" && called !== null;
  const given: unknown = named ? called.arguments : call;
  let text = textOf(given);
  try {
    if (typeof given === "string") text = asText(JSON.parse(given));
  } catch {
    // The model wrote what is not JSON; it is shown as it is.
  }
  return { id: textOf(id), name: named ? textOf(called.name ?? "") : "", text };
}

/** All that a message says, as one text; messages are the same where this is. */
export function wholeText(message: Message): string {
  const said = saidIn(message);
  // A picture's link names its rollout; pictures in the same place count as the same.
  const parts = said.parts.map((part) => (typeof part === "string" ? part : "image" in part ? part.image.replace(OF_ROLLOUT, "") : part.other));
  const calls = said.calls.map((call) => `${call.name} ${call.text}`);
  return [said.role, said.reasoning, ...parts, ...calls].join("\u0000");
}

interface Props {
  messages: Message[];
  /** The first message that is shown. */
  from?: number;
  /** Rewards of this agent's turns. */
  turns?: TurnReward[];
  timings?: Timing[] | undefined;
  /** Conversations beside this one, and it: each shows the fewer messages at first. */
  lanes?: number;
  /** Text of the same message in the rollouts beside this one, up to where they part. */
  common?: (index: number) => string | null;
  /** Numbers of messages that the rollouts beside this one have, too. */
  beside?: ReadonlySet<number> | undefined;
}

export function Messages({ messages, from = 0, turns = [], timings = [], lanes = 1, common, beside }: Props) {
  const results = new Map(messages.filter((one) => one.role === "tool" && typeof one.tool_call_id === "string").map((one) => [one.tool_call_id!, one]));
  const shownWithCall = new Set<Message>();
  const [most, setMost] = useState(Math.max(FEWEST_MESSAGES, Math.ceil(MOST_MESSAGES / lanes)));
  const end = Math.min(messages.length, from + most);
  const times = timesByTool(timings);
  let turn = -1;
  return (
    <>
      {messages.slice(0, end).map((message, index) => {
        if (message.role === "assistant") turn += 1;
        if (index < from || shownWithCall.has(message)) return null;
        const said = saidIn(message);
        const rewards = message.role === "assistant" ? turns.filter((one) => one.turn === turn) : [];
        return (
          <section key={index} class={`message ${ROLES.has(said.role) ? said.role : "unknown"} ${beside?.has(index) ? "as-beside" : ""}`} data-message={index} tabIndex={-1}>
            <h3>
              {visible(said.role)}
              {message.name && <span class="dim"> {visible(message.name)}</span>}
              <span class="dim">
                {" "}
                #{index}
                {beside?.has(index) && ", the same in all"}
              </span>
              {rewards.map((one, n) => (
                <span key={n} class={one.value < 0 ? "turn-reward bad" : "turn-reward good"}>
                  turn {one.turn}: {signed(one.value)}
                </span>
              ))}
            </h3>
            <Body said={said} same={common?.(index) ?? null} />
            {said.calls.map((call, n) => {
              const result = results.get(call.id);
              if (result) shownWithCall.add(result);
              return <Call key={n} call={call} result={result} seconds={times.get(call.name)?.shift()} />;
            })}
          </section>
        );
      })}
      {end < messages.length && (
        <p>
          <button onClick={() => setMost(most + MOST_MESSAGES)}>{count(Math.min(MOST_MESSAGES, messages.length - end), "message")} more</button> <span class="dim">of {messages.length.toLocaleString("en")}</span>
        </p>
      )}
    </>
  );
}

function Body({ said, same }: { said: Said; same: string | null }) {
  let before = 0; // characters of `same` that earlier parts took
  const most = said.role === "system" || said.role === "developer" ? MOST_OF_SYSTEM : undefined;
  const common = (text: string) => {
    if (same === null) return 0;
    const length = commonLength(text, same.slice(before));
    before += text.length + 1;
    return length;
  };
  if (same !== null) before = said.role.length + 1;
  const ofReasoning = common(said.reasoning);
  return (
    <>
      {said.reasoning && (
        <details class="reasoning" open={same !== null && ofReasoning < said.reasoning.length}>
          <summary>
            reasoning <span class="dim">{shortened(visible(said.reasoning.trim()), 90)}</span>
          </summary>
          <LongText text={said.reasoning} common={ofReasoning} />
        </details>
      )}
      {said.parts.map((part, n) => {
        if (typeof part === "string") return <LongText key={n} text={part} common={common(part)} {...(most ? { most } : {})} />;
        return "image" in part ? <Picture key={n} url={part.image} /> : <LongText key={n} text={part.other} />;
      })}
    </>
  );
}

function Call({ call, result, seconds }: { call: Said["calls"][number]; result: Message | undefined; seconds: number | undefined }) {
  return (
    <div class="call">
      <h4>
        calls {visible(call.name)}
        {seconds !== undefined && <span class="dim"> {duration(seconds)}</span>}
      </h4>
      <LongText text={call.text} most={1500} />
      {result && (
        <div class="result">
          <h4>result</h4>
          <Body said={saidIn(result)} same={null} />
        </div>
      )}
    </div>
  );
}

/** Only an image that lies in the record itself is shown: nothing is fetched for a model's sake. */
function Picture({ url }: { url: string }): ComponentChildren {
  if (IMAGE.test(url) || /^v1\/groups\/[\w.~%-]+\/rollouts\/\d+\/images\/\d+$/.test(url)) return <img class="picture" src={url} alt="image in the conversation" loading="lazy" />;
  return <p class="dim">image: {visible(shortened(url, 300))}</p>;
}

function timesByTool(timings: Timing[]): Map<string, number[]> {
  const times = new Map<string, number[]>();
  for (const one of timings) {
    if (one.kind !== "tool") continue;
    const list = times.get(one.name) ?? [];
    list.push(one.seconds);
    times.set(one.name, list);
  }
  return times;
}

/** Number of leading characters that both have. */
export function commonLength(a: string, b: string): number {
  const most = Math.min(a.length, b.length);
  let at = 0;
  while (at < most && a.charCodeAt(at) === b.charCodeAt(at)) at += 1;
  return at;
}

export function signed(value: number): string {
  return `${value > 0 ? "+" : ""}${number(value)}`;
}

/** "3 messages, 2 tool calls". */
export function summaryOf(messages: Message[]): string {
  const calls = messages.reduce((sum, one) => sum + saidIn(one).calls.length, 0);
  return count(messages.length, "message") + (calls ? `, ${count(calls, "tool call")}` : "");
}
