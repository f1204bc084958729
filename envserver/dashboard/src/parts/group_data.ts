// Reads a group with its rollouts, and says where their conversations part.

import { useEffect, useState } from "preact/hooks";
import { get, Problem, useGet } from "../api";
import type { GroupHead, GroupRow, Message, Rollout, RolloutAnswer } from "../records";
import { commonLength, wholeText } from "./conversation";

/** GET /v1/groups/ID/rollouts. */
interface GroupAnswer {
  group: GroupHead & Partial<GroupRow>;
  rollouts: RolloutAnswer[];
}

export interface GroupData {
  group: GroupHead & Partial<GroupRow>;
  rollouts: Rollout[];
}

export function rolloutPath(id: string, number: number): string {
  return `v1/groups/${encodeURIComponent(id)}/rollouts/${number}`;
}

/** Reads a group; null while it is read. */
export function useGroup(id: string | null): { data: GroupData | null; problem: Problem | null } {
  const answer = useGet<GroupAnswer>(id === null ? null : `v1/groups/${encodeURIComponent(id)}/rollouts`);
  const [older, setOlder] = useState<{ id: string; data: GroupData | null; problem: Problem | null } | null>(null);
  const isMissing = answer.problem?.status === 404;
  useEffect(() => {
    if (id === null || !isMissing) return;
    let isOpen = true;
    const done = (data: GroupData | null, problem: Problem | null) => isOpen && setOlder({ id, data, problem });
    oneByOne(id).then(
      (data) => done(data, null),
      (error) => done(null, error instanceof Problem ? error : new Problem(0, String(error))),
    );
    return () => {
      isOpen = false;
    };
  }, [id, isMissing]);
  if (answer.data) return { data: { group: answer.data.group, rollouts: answer.data.rollouts.map((one) => one.rollout) }, problem: null };
  if (isMissing) return older?.id === id ? older : { data: null, problem: null };
  return { data: null, problem: answer.problem };
}

/** Of a server that does not answer for all rollouts at once. */
async function oneByOne(id: string): Promise<GroupData> {
  const first = await get<RolloutAnswer>(rolloutPath(id, 0));
  const rest = Array.from({ length: Math.min(first.rollouts, 64) - 1 }, (_, n) => get<RolloutAnswer>(rolloutPath(id, n + 1)));
  const all = [first, ...(await Promise.all(rest))];
  return { group: first.group, rollouts: all.map((one) => one.rollout) };
}

/** Where conversations part. */
export interface Parting {
  /** Number of leading messages that all have. */
  message: number;
  /** What all have of the message after those, see `wholeText`; null: it is missing in one. */
  common: string | null;
  /** Whether they are the same to their ends. */
  isSame: boolean;
}

export function partingOf(conversations: Message[][]): Parting {
  const least = Math.min(...conversations.map((one) => one.length));
  for (let at = 0; at < least; at += 1) {
    const texts = conversations.map((one) => wholeText(one[at]!));
    let common = texts[0]!;
    for (const text of texts.slice(1)) common = common.slice(0, commonLength(common, text));
    if (texts.some((text) => text.length !== common.length)) return { message: at, common: wordStart(common), isSame: false };
  }
  return { message: least, common: null, isSame: conversations.every((one) => one.length === least) };
}

/** Cuts a common beginning where the word begins that differs. */
function wordStart(text: string): string {
  const cut = text.search(/[^\s\u0000]*$/);
  return text.length - cut > 40 ? text : text.slice(0, cut);
}
