// The numbers of the last hour, read once and kept up by the stream while the page is open.

import { useEffect, useMemo, useState } from "preact/hooks";
import { get, Problem, useGet } from "./api";
import { on, useLive } from "./live";
import { type Sample, Series, type SeriesAnswer } from "./series";

/** Seconds that are kept: an hour, and what it is compared with. */
const KEPT = 4200;
const RETRY_SECONDS = 3;

/** The numbers that pages show; see docs/observing.md. */
const NAMES = [
  ...["rollouts_total", "failed_attempts_total", "reward_sum", "reward_count", "group_deviation_sum", "group_deviation_count"],
  ...["groups_equal_total", "groups_delivered_total", "groups_dropped_total", "rollout_turns_sum", "rollout_turns_count", "tool_errors_total"],
  ...["rollout_seconds_sum", "rollout_seconds_count", "tokens_total", "flags_total", "untrained_share", "tasks_solved_share"],
  ...["policy_version", "engine_seconds_sum", "engine_seconds_count", "engine_errors_total", "engine_calls", "calls_waiting"],
  ...["paused", "replica_calls", "replica_limit", "replica_waiting", "replica_breaker", "workers", "rollouts_running"],
  ...["worker_deaths_total", "sandboxes", "groups", "queue_depth", "leases_total", "nacks_total", "staleness_versions_sum"],
  ...["staleness_versions_count", "joined_environments", "joined_open_groups", "loop_lag_p99_seconds", "part_ready"],
  ...["stored_groups_total", "stored_equal_groups_total", "stored_tokens_total", "stored_reward_sum", "stored_reward_count"],
  "children_resident_bytes",
]
  .map((name) => `envserver_${name}`)
  .concat("process_resident_memory_bytes", "process_cpu_seconds_total");

interface Recent {
  series: Series | null;
  problem: Problem | null;
}

let recent: Recent = { series: null, problem: null };
let reading = false;
const watchers = new Set<() => void>();

/** The last hour; the component renders again when a row comes. */
export function useRecent(): Recent {
  const [, again] = useState(0);
  useEffect(() => {
    const changed = () => again((n) => n + 1);
    watchers.add(changed);
    if (!recent.series) void read();
    return () => void watchers.delete(changed);
  }, []);
  return recent;
}

/** A longer time, read again every minute; null: nothing is read. */
export function useLong(seconds: number | null, points: number): Recent {
  const { data, problem, again } = useGet<SeriesAnswer>(seconds === null ? null : pathOf(seconds, points), 60);
  useLive("resync", again);
  const series = useMemo(() => (data ? new Series(data) : null), [data]);
  return { series, problem };
}

on("sample", ({ time, series }: { time: number; series: Sample[] }) => {
  if (!recent.series) return;
  recent.series.append(time, series, KEPT);
  tell();
});
on("resync", () => {
  if (watchers.size) void read();
  else recent = { series: null, problem: null }; // read when it is shown again
});

async function read(): Promise<void> {
  if (reading) return;
  reading = true;
  try {
    recent = { series: new Series(await get<SeriesAnswer>(pathOf(KEPT, KEPT / 10))), problem: null };
  } catch (error) {
    const problem = error instanceof Problem ? error : new Problem(0, String(error));
    recent = { series: recent.series, problem };
    // A server that is gone or starts comes back; another refusal stays.
    if (problem.status === 0 || problem.status === 503) setTimeout(() => void read(), RETRY_SECONDS * 1000);
  } finally {
    reading = false;
  }
  tell();
}

function pathOf(seconds: number, points: number): string {
  return `v1/series?start=-${seconds}&points=${points}&names=${NAMES.join()}`;
}

function tell(): void {
  for (const watcher of watchers) watcher();
}
