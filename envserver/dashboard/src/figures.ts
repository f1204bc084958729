// The table of what the overview draws, in its order: from which numbers, in which words.

import { type Line, levels, rates, ratios, shares } from "./measures";
import type { Series } from "./series";
import { duration, number } from "./text";

export interface Figure {
  id: string;
  section: "Learning" | "Speed" | "Lengths and ends" | "Trouble" | "Delivery" | "Machine";
  title: string;
  note?: string;
  lines: (series: Series) => Line[];
  format: (value: number) => string;
  /** Which way is better; null: neither. */
  better: "up" | "down" | null;
  /** Whether `above` of its lines counts things, so that chance is known from the count. */
  isCount: boolean;
  /** Smallest difference that is worth a word. */
  least: number;
  /** In a sentence: "Reward of math rose ..."; {} is the line's label. */
  said: string;
  /** Highest y that is always shown. */
  top?: number;
  /** Whether it may be drawn over policy versions. */
  hasVersions?: boolean;
  /** Whether its changes are no news: they follow from settings, or from others that are. */
  isQuiet?: boolean;
  /** Whether its lines are environments. */
  isByEnvironment?: boolean;
  empty: string;
}

const of = (name: string, where?: Record<string, string>) => ({ name: `envserver_${name}`, ...(where && { where }) });
/** Without digits that nobody reads: the tail of a moving mean is 0. */
const aMinute = (value: number) => number(Math.round(100 * value) / 100, 3);
const percent = (value: number) => `${number(Math.round(10_000 * value) / 100, 2)} %`;
const bytes = (value: number) => (value >= 1e9 ? `${number(value / 1e9, 3)} GB` : `${Math.round(value / 1e6)} MB`);
const byAgent = ({ environment, agent }: Record<string, string>) => (agent ? `${environment} · ${agent}` : (environment ?? ""));

/** Groups that were finished: delivered, or dropped because their rewards are equal. */
const FINISHED = [of("groups_delivered_total"), of("groups_dropped_total", { reason: "zero_variance" })];
const EVERY = { isByEnvironment: true } as const;

export const FIGURES: Figure[] = [
  { id: "reward", section: "Learning", title: "Reward", note: "mean of delivered groups", better: "up", isCount: true, least: 0.03,
    lines: (s) => withOthers(ratios(s, of("reward_sum"), of("reward_count"), byAgent), ratios(s, of("stored_reward_sum"), of("stored_reward_count"), "environment")), format: number, said: "The reward of {}", hasVersions: true,
    empty: "No group was delivered in this time.", ...EVERY },
  { id: "deviation", section: "Learning", title: "Deviation of rewards", note: "standard deviation within a group", better: null, isCount: false, least: 0.03,
    lines: (s) => ratios(s, of("group_deviation_sum"), of("group_deviation_count"), "environment"), format: number,
    said: "The deviation of rewards within groups of {}", hasVersions: true, empty: "No group was delivered in this time.", ...EVERY },
  { id: "equal", section: "Learning", title: "Groups of equal rewards", note: "share of finished groups: they teach nothing", better: "down", isCount: true, least: 0.05, top: 1,
    lines: (s) => withOthers(ratios(s, of("groups_equal_total"), FINISHED, "environment"), ratios(s, of("stored_equal_groups_total"), of("stored_groups_total"), "environment")), format: percent,
    said: "The share of groups of {} whose rewards are all equal", hasVersions: true, empty: "No group was finished in this time.", ...EVERY },
  { id: "solved", section: "Learning", title: "Solved share", note: "of the last 1,000 scored tasks", better: "up", isCount: false, least: 0.03, top: 1,
    lines: (s) => levels(s, of("tasks_solved_share"), "environment"), format: percent, said: "The share of solved tasks of {}",
    empty: "--curriculum.sampler estimates it.", ...EVERY },

  { id: "completionTokens", section: "Speed", title: "Completion tokens a second", note: "sampled by the engine", better: null, isCount: false, least: 10,
    lines: (s) => rates(s, of("tokens_total", { kind: "completion" }), "environment", 1), format: aMinute, said: "The number of completion tokens of {} a second",
    empty: "No rollout was scored in this time.", ...EVERY },
  { id: "promptTokens", section: "Speed", title: "Prompt tokens a second", note: "of all calls, also those that a cache knows", better: null, isCount: false, least: 50,
    lines: (s) => rates(s, of("tokens_total", { kind: "prompt" }), "environment", 1), format: aMinute, said: "The number of prompt tokens of {} a second",
    empty: "No rollout was scored in this time.", ...EVERY },
  { id: "rollouts", section: "Speed", title: "Rollouts a minute", better: null, isCount: true, least: 2,
    lines: (s) => rates(s, of("rollouts_total"), "environment"), format: aMinute, said: "The number of rollouts of {} a minute",
    empty: "No rollout ended in this time.", ...EVERY },
  { id: "groups", section: "Speed", title: "Groups a minute", note: "delivered", better: null, isCount: true, least: 1,
    lines: (s) => withOthers(rates(s, of("groups_delivered_total"), "environment"), rates(s, of("stored_groups_total"), "environment")), format: aMinute, said: "The number of groups of {} a minute",
    empty: "No group was delivered in this time.", ...EVERY },
  { id: "seconds", section: "Speed", title: "Time of a rollout", note: "from start to result", better: "down", isCount: false, least: 0.5,
    lines: (s) => ratios(s, of("rollout_seconds_sum"), of("rollout_seconds_count"), "environment"), format: duration,
    said: "The time that a rollout of {} takes", empty: "No rollout ended in this time.", ...EVERY },

  { id: "length", section: "Lengths and ends", title: "Length", note: "completion tokens of a rollout", better: null, isCount: false, least: 10,
    lines: (s) => withOthers(
      ratios(s, of("tokens_total", { kind: "completion" }), of("rollout_seconds_count"), "environment"),
      ratios(s, of("stored_tokens_total"), of("stored_reward_count"), "environment").filter(isEver),
    ), format: aMinute,
    said: "The length of rollouts of {} (tokens)", hasVersions: true, empty: "No rollout was scored in this time.", ...EVERY },
  { id: "turns", section: "Lengths and ends", title: "Turns", note: "mean of a rollout", better: null, isCount: false, least: 0.3,
    lines: (s) => ratios(s, of("rollout_turns_sum"), of("rollout_turns_count"), "environment"), format: number,
    said: "The number of turns of rollouts of {}", hasVersions: true, empty: "No rollout was scored in this time.", ...EVERY },
  { id: "ends", section: "Lengths and ends", title: "Ends", note: "share of rollouts that did not end by themselves", better: "down", isCount: true, least: 0.02,
    lines: (s) => shares(s, of("rollouts_total"), "end").filter(({ label }) => label !== "scored"), format: percent,
    said: "The share of rollouts that ended as {}", empty: "All rollouts ended by themselves, or there was none." },
  { id: "flags", section: "Lengths and ends", title: "Flags", note: "rollouts a minute", better: "down", isCount: true, least: 1,
    lines: (s) => rates(s, of("flags_total"), "flag"), format: aMinute, said: "The number of rollouts with the flag {} a minute",
    empty: "No rollout has a flag." },
  { id: "untrained", section: "Lengths and ends", title: "Untrained tokens", note: "share that flags mask or drop", better: "down", isCount: false, least: 0.01,
    lines: (s) => levels(s, of("untrained_share"), "environment"), format: percent, said: "The share of untrained tokens of {}",
    empty: "No tokens were sampled in this time.", ...EVERY },

  { id: "failures", section: "Trouble", title: "Failed attempts", note: "a minute, by kind", better: "down", isCount: true, least: 0.5,
    lines: (s) => rates(s, of("failed_attempts_total"), "kind"), format: aMinute, said: "The number of failures “{}” a minute", empty: "No attempt failed." },
  { id: "drops", section: "Trouble", title: "Dropped groups", note: "a minute, by reason; without those of equal rewards", better: "down", isCount: true, least: 0.5,
    lines: (s) => rates(s, of("groups_dropped_total"), "reason").filter(({ label }) => label !== "zero_variance"), format: aMinute, said: "The number of groups dropped as {} a minute",
    empty: "No group was dropped." },
  { id: "toolErrors", section: "Trouble", title: "Failed tool calls", note: "of a rollout; “Error:” under Words finds them", better: "down", isCount: false, least: 0.1,
    lines: (s) => ratios(s, of("tool_errors_total"), of("reward_count"), "environment"), format: number, said: "The number of failed tool calls of a rollout of {}",
    empty: "No rollout with tools of envserver was delivered in this time.", ...EVERY },
  { id: "errors", section: "Trouble", title: "Errors of the engine", note: "calls a minute", better: "down", isCount: true, least: 0.5,
    lines: (s) => rates(s, of("engine_errors_total"), "kind"), format: aMinute, said: "The number of engine errors “{}” a minute", empty: "No call failed." },
  { id: "deaths", section: "Trouble", title: "Deaths of workers", note: "a minute, by kind", better: "down", isCount: true, least: 0.1,
    lines: (s) => rates(s, of("worker_deaths_total"), "kind"), format: aMinute, said: "The number of workers that died ({}) a minute", empty: "No worker died." },

  { id: "queue", section: "Delivery", title: "Queue", note: "groups waiting or leased, by run", better: null, isCount: false, least: 5,
    lines: (s) => levels(s, of("queue_depth"), "run"), format: aMinute, said: "The queue of {} (groups)", empty: "No run is open: a trainer that connects makes one." },
  { id: "leases", section: "Delivery", title: "Leases a minute", better: null, isCount: true, least: 1,
    lines: (s) => rates(s, of("leases_total"), "end"), format: aMinute, said: "The number of leases {} a minute", empty: "No trainer has leased groups." },
  { id: "staleness", section: "Delivery", title: "Staleness", note: "versions behind, when leased", better: "down", isCount: false, least: 0.5,
    lines: (s) => ratios(s, of("staleness_versions_sum"), of("staleness_versions_count"), ""), format: number,
    said: "The staleness of leased groups (versions)", empty: "No group was leased, or no version was published." },

  { id: "calls", section: "Machine", title: "Calls at the engine", note: "by replica", better: null, isQuiet: true, isCount: false, least: 5,
    lines: (s) => levels(s, of("replica_calls"), "replica"), format: aMinute, said: "The number of calls in flight at {}", empty: "No engine: --openai.base_url names one." },
  { id: "callsWaiting", section: "Machine", title: "Calls that wait", note: "for a replica", better: "down", isCount: false, least: 5,
    lines: (s) => levels(s, of("replica_waiting"), "replica").filter(isEver), format: aMinute, said: "The number of calls that wait for {}", empty: "No call waited." },
  { id: "answer", section: "Machine", title: "Time of a call", note: "until the engine has answered", better: "down", isCount: false, least: 0.2,
    lines: (s) => ratios(s, of("engine_seconds_sum"), of("engine_seconds_count"), "path"), format: duration,
    said: "The engine's time for a call ({})", empty: "The engine was not called." },
  { id: "running", section: "Machine", title: "Rollouts in workers", note: "their agents run now", better: null, isQuiet: true, isCount: false, least: 4,
    lines: (s) => levels(s, of("rollouts_running"), "environment"), format: aMinute, said: "The number of rollouts of {} in workers",
    empty: "This server has no workers: serve or join runs environments.", ...EVERY },
  { id: "sandboxes", section: "Machine", title: "Sandboxes", note: "open", better: null, isQuiet: true, isCount: false, least: 4,
    lines: (s) => levels(s, of("sandboxes"), "environment").filter(isEver), format: aMinute, said: "The number of sandboxes of {}",
    empty: "No sandbox was open.", ...EVERY },
  { id: "lag", section: "Machine", title: "Lag of the server", note: "99th percentile", better: "down", isCount: false, least: 0.05,
    lines: (s) => levels(s, of("loop_lag_p99_seconds"), ""), format: (value) => `${number(1000 * value, 2)} ms`, said: "The lag of the server", empty: "Not known." },
  { id: "memory", section: "Machine", title: "Memory", note: "resident", better: "down", isCount: false, least: 3e8,
    lines: (s) => [
      ...levels(s, { name: "process_resident_memory_bytes" }, () => "server"),
      ...levels(s, of("children_resident_bytes"), () => "its processes"),
    ], format: bytes, said: "The memory of {}", empty: "Not known." },
];

/** Adds the lines of environments that others run: of those, only what was stored is known. */
function withOthers(own: Line[], stored: Line[]): Line[] {
  const known = new Set(own.map(({ label }) => label.split(" · ")[0]));
  return [...own, ...stored.filter(({ label, below }) => !known.has(label) && below.some((value) => value))];
}

function isEver(line: Line): boolean {
  return line.above.some((value) => value);
}
