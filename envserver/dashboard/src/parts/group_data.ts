// Reads a group with its rollouts, and says where their conversations part.

import { type Loaded, useGet } from "../api";
import type { GroupHead, GroupRow, Message, Rollout } from "../records";
import { commonLength, wholeText } from "./conversation";

/** GET /v1/groups/ID/rollouts. */
export interface GroupData {
  group: GroupHead & Partial<GroupRow>;
  rollouts: Rollout[];
}

export function groupPath(id: string): string {
  return `v1/groups/${encodeURIComponent(id)}`;
}

export function rolloutPath(id: string, number: number): string {
  return `${groupPath(id)}/rollouts/${number}`;
}

/** Reads a group with its rollouts; of null nothing. */
export function useGroup(id: string | null): Loaded<GroupData> {
  return useGet<GroupData>(id === null ? null : `${groupPath(id)}/rollouts`);
}

/** Where conversations part. */
export interface Parting {
  /** Number of leading messages that all have. */
  message: number;
  /** What all have of the message after those, see `wholeText`; null: it is missing in one. */
  common: string | null;
  /** Whether they are the same to their ends. */
  isSame: boolean;
  /** Later messages that are the same in all, by their numbers. */
  later: Set<number>;
}

export function partingOf(conversations: Message[][]): Parting {
  if (conversations.length < 2) return { message: 0, common: null, isSame: false, later: new Set() };
  const least = Math.min(...conversations.map((one) => one.length));
  for (let at = 0; at < least; at += 1) {
    const texts = conversations.map((one) => wholeText(one[at]!));
    let common = texts[0]!;
    for (const text of texts.slice(1)) common = common.slice(0, commonLength(common, text));
    if (texts.some((text) => text.length !== common.length)) return { message: at, common: wordStart(common), isSame: false, later: laterSame(conversations, at + 1, least) };
  }
  return { message: least, common: null, isSame: conversations.every((one) => one.length === least), later: new Set() };
}

function laterSame(conversations: Message[][], from: number, to: number): Set<number> {
  const same = new Set<number>();
  for (let at = from; at < to; at += 1) {
    const [first, ...others] = conversations.map((one) => wholeText(one[at]!));
    if (others.every((text) => text === first)) same.add(at);
  }
  return same;
}

/** Cuts a common beginning where the word begins that differs. */
function wordStart(text: string): string {
  const cut = text.search(/[^\s\u0000]*$/);
  return text.length - cut > 40 ? text : text.slice(0, cut);
}
