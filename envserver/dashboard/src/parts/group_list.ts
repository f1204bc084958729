// The groups that a filter finds: read page by page, kept while one looks at a group of them.

import { useEffect, useState } from "preact/hooks";
import { get, Problem } from "../api";
import type { GroupRow, GroupsPage } from "../records";

/** The parameters of GET /v1/groups that a view's address may have. */
export const FILTERS = [
  "text", "words", "environment", "task", "split", "model", "state", "end", "flag", "min_reward", "max_reward", "spread_above",
  "version_from", "version_to", "min_length", "max_length",
] as const;
export const ORDERS = ["newest", "oldest", "best", "worst", "widest", "longest"] as const;

const PAGE = 200;
const MOST_NEW = 200;
const MOST_SEARCHED = 5000;

/** The filter of an address, as parameters of its links and of the API. */
export function filterOf(query: URLSearchParams): Record<string, string> {
  const filter: Record<string, string> = {};
  for (const name of [...FILTERS, "order"]) {
    const value = query.get(name);
    if (value && !(name === "order" && value === "newest")) filter[name] = value;
  }
  return filter;
}

export class GroupList {
  rows: GroupRow[] = [];
  problem: Problem | null = null;
  /** Whether the first page was read; until then it may hold what arrives, too. */
  isBegun = false;
  /** Whether there are no more pages. */
  isWhole = false;
  /** Groups whose texts were read for words, and how many may be without being asked again. */
  searched = 0;
  private mostSearched = MOST_SEARCHED;
  /** Groups that arrived since, the newest first; they wait until they are asked for. */
  fresh: GroupRow[] = [];
  private cursor = "";
  private reading: Promise<void> | null = null;
  private asking = false;
  /** Groups up to this `seq` were asked for. */
  private checked = 0;
  /** Later ones that the server told of by itself. */
  private readonly told = new Set<number>();
  private readonly watchers = new Set<() => void>();

  constructor(
    readonly filter: Record<string, string>,
    readonly order: string,
  ) {}

  watch(call: () => void): () => void {
    this.watchers.add(call);
    return () => this.watchers.delete(call);
  }

  private changed(): void {
    for (const call of this.watchers) call();
  }

  private path(parameters: Record<string, string>): string {
    return `v1/groups?${new URLSearchParams({ ...this.filter, ...parameters })}`;
  }

  /** Whether a search for words waits until it is told to go on. */
  get isPaused(): boolean {
    return !this.isWhole && this.searched >= this.mostSearched;
  }

  /** Lets a search for words go on. */
  searchFurther(): void {
    this.mostSearched = this.searched + MOST_SEARCHED;
    void this.more();
  }

  /** Reads the next page. */
  more(): Promise<void> {
    if (this.isWhole || this.isPaused) return Promise.resolve();
    this.reading ??= this.readPage().finally(() => {
      this.reading = null;
      this.changed();
    });
    return this.reading;
  }

  private async readPage(): Promise<void> {
    try {
      const isListedByTime = this.order === "newest" && this.filter.words === undefined;
      if (this.checked === 0 && !isListedByTime) await this.findNewest();
      // A search for words may need many pages to find the next group: it goes on while one looks.
      const before = this.rows.length;
      do {
        const asked: Record<string, string> = { order: this.order, limit: String(PAGE) };
        if (this.cursor) asked.cursor = this.cursor;
        const page = await get<GroupsPage>(this.path(asked));
        if (isListedByTime && !this.isBegun) {
          this.checked = page.groups[0]?.seq ?? 0;
          this.fresh = this.fresh.filter((row) => row.seq > this.checked);
        }
        this.rows = [...this.rows, ...page.groups];
        this.isBegun = true;
        this.cursor = page.cursor;
        this.isWhole = page.cursor === "";
        this.searched += page.searched ?? 0;
        this.problem = null;
        this.changed();
      } while (this.rows.length === before && !this.isWhole && !this.isPaused && this.watchers.size > 0);
    } catch (error) {
      this.problem = error instanceof Problem ? error : new Problem(0, String(error));
    }
  }

  /** What is later than the newest group now is new, whatever the order. */
  private async findNewest(): Promise<void> {
    const { words: _, ...filter } = this.filter; // of which a page may find none
    const { groups } = await get<GroupsPage>(`v1/groups?${new URLSearchParams({ ...filter, order: "newest", limit: "1" })}`);
    this.checked = groups[0]?.seq ?? 0;
  }

  /** Whether the server has other groups than these: it was started with another store. */
  async isOfAnotherStore(): Promise<boolean> {
    const known = [...this.fresh, ...this.rows].reduce<GroupRow | null>((last, row) => (last && last.seq > row.seq ? last : row), null);
    if (known === null) return true;
    const { groups } = await get<GroupsPage>(`v1/groups?order=oldest&after=${known.seq - 1}&limit=1`);
    // Streams are made alike: another store may have the same group at the same place.
    return groups[0]?.group_id !== known.group_id || groups[0].created_at !== known.created_at;
  }

  /** Asks what arrived since. */
  async look(): Promise<void> {
    if (this.asking || this.reading || this.fresh.length >= MOST_NEW) return;
    if (this.problem) return this.more();
    this.asking = true;
    try {
      const asked = { order: "oldest", after: String(this.checked), limit: String(MOST_NEW) };
      const { groups } = await get<GroupsPage>(this.path(asked));
      const added = groups.filter((row) => row.seq > this.checked && !this.told.has(row.seq));
      for (const row of groups) this.checked = Math.max(this.checked, row.seq);
      for (const seq of this.told) if (seq <= this.checked) this.told.delete(seq);
      if (added.length === 0) return;
      this.fresh = [...added, ...this.fresh].sort((a, b) => b.seq - a.seq);
      this.changed();
    } catch {
      // The next look tells; what is shown stays.
    } finally {
      this.asking = false;
    }
  }

  /** Takes in a group that the server told of, without asking; a later look finds what was missed. */
  tell(row: GroupRow): void {
    if (this.filter.words !== undefined || row.seq <= this.checked || this.told.has(row.seq) || !matches(row, this.filter)) return;
    this.told.add(row.seq);
    if (this.fresh.length >= MOST_NEW) return;
    this.fresh = [row, ...this.fresh];
    this.changed();
  }

  /** What is said of `fresh`: "37", "200+". */
  get freshCount(): string {
    return this.fresh.length >= MOST_NEW ? `${MOST_NEW}+` : String(this.fresh.length);
  }

  /** Puts what arrived into the list; false: the list has to be read again. */
  take(): boolean {
    if (!this.isBegun || this.order !== "newest" || this.fresh.length >= MOST_NEW) return false;
    this.rows = [...this.fresh, ...this.rows];
    this.fresh = [];
    this.changed();
    return true;
  }

  /** The group `by` rows after the one with this id; null: there is none, or it is too far down. */
  async beside(id: string, by: 1 | -1, wanted: (row: GroupRow) => boolean = () => true): Promise<GroupRow | null> {
    for (;;) {
      const at = this.rows.findIndex((row) => row.group_id === id);
      for (let next = at + by; at >= 0 && next >= 0 && next < this.rows.length; next += by) {
        if (wanted(this.rows[next]!)) return this.rows[next]!;
      }
      const isSearched = at >= 0 && by < 0;
      if (isSearched || this.isWhole || this.isPaused || this.problem || this.rows.length >= MOST_SEARCHED) return null;
      await this.more();
    }
  }
}

/** What the server's filters do, for a group that arrives. */
function matches(row: GroupRow, filter: Record<string, string>): boolean {
  const spread = row.reward_max === null || row.reward_min === null ? null : row.reward_max - row.reward_min;
  const { text = "" } = filter;
  const equal: [string, unknown][] = [["environment", row.env], ["task", row.task_id], ["split", row.split], ["model", row.model], ["state", row.state]];
  const atLeast: [string, number | null][] = [["min_reward", row.reward_mean], ["version_from", row.policy_version], ["min_length", row.max_length]];
  const atMost: [string, number | null][] = [["max_reward", row.reward_mean], ["version_to", row.policy_version], ["max_length", row.max_length]];
  return (
    equal.every(([name, value]) => filter[name] === undefined || filter[name] === value) &&
    atLeast.every(([name, value]) => filter[name] === undefined || (value !== null && value >= Number(filter[name]))) &&
    atMost.every(([name, value]) => filter[name] === undefined || (value !== null && value <= Number(filter[name]))) &&
    (filter.spread_above === undefined || (spread !== null && spread > Number(filter.spread_above))) &&
    (filter.flag === undefined || (row.flags ?? []).includes(filter.flag)) &&
    (filter.end === undefined || filter.end in (row.ends ?? {})) &&
    [row.group_id, row.task_id ?? ""].some((one) => one.toLowerCase().includes(text.toLowerCase()))
  );
}

let kept: GroupList | null = null;

/** The list of a filter: the one that was shown last, if it is the same. */
export function groupList(query: URLSearchParams): GroupList {
  const { order = "newest", ...filter } = filterOf(query);
  if (kept && kept.order === order && JSON.stringify(kept.filter) === JSON.stringify(filter)) return kept;
  kept = new GroupList(filter, order);
  return kept;
}

/** Forgets the list that was shown last, so that it is read anew. */
export function forgetGroupList(): void {
  kept = null;
}

/** Draws again when the list changes. */
export function useGroupList(list: GroupList): void {
  const [, draw] = useState(0);
  useEffect(() => list.watch(() => draw((n) => n + 1)), [list]);
}
