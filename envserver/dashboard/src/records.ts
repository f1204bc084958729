// What /v1 answers about groups and rollouts. Fields that older groups lack are null or absent.

/** A row of GET /v1/groups. */
export interface GroupRow {
  seq: number;
  group_id: string;
  env: string;
  format: string;
  size: number;
  tokens: number;
  max_length: number;
  policy_version: number;
  state: string;
  created_at: number;
  task_id: string | null;
  split: string | null;
  model: string | null;
  rewards: (number | null)[] | null;
  reward_mean: number | null;
  reward_min: number | null;
  reward_max: number | null;
  turns: number | null;
  completion_tokens: number | null;
  truncated: number | null;
  seconds: number | null;
  flags: string[] | null;
  ends: Record<string, number> | null;
}

export interface GroupsPage {
  groups: GroupRow[];
  cursor: string;
  searched?: number | null;
}

export interface ToolCall {
  id?: string;
  function?: { name?: string; arguments?: unknown };
}

/** A part of a message's content; images have `image_url`. */
export interface ContentPart {
  type?: string;
  text?: string;
  image_url?: { url?: string } | string;
}

export interface Message {
  role?: string;
  name?: string;
  content?: string | ContentPart[] | null;
  reasoning_content?: string | null;
  reasoning?: string | null;
  refusal?: string | null;
  tool_calls?: ToolCall[] | null;
  tool_call_id?: string;
}

export interface Tool {
  function?: { name?: string; description?: string; parameters?: unknown };
}

/** The last conversation of another agent of the rollout. */
export interface Conversation {
  agent: string | null;
  trained: boolean;
  model: string;
  messages: Message[];
  tools: Tool[];
  turns: number;
  completion_tokens: number;
}

export interface TurnReward {
  turn: number;
  value: number;
  agent: string | null;
  call: number;
}

export interface Score {
  reward: number | null;
  components: Record<string, number>;
  metrics: Record<string, number>;
  error: string | null;
  rewards: Record<string, number>;
  turns: TurnReward[];
}

export interface SandboxUsage {
  wall_seconds: number;
  cpu_seconds: number;
  cpu_exact: boolean;
  peak_memory_mb: number;
  memory_exact: boolean;
  read_bytes: number;
  written_bytes: number;
  output_bytes: number;
  disk_mb: number;
  peak_processes: number;
  executions: number;
  killed: Record<string, number>;
}

export interface Usage {
  seconds: number;
  model_seconds: number;
  prompt_tokens: number;
  completion_tokens: number;
  sandbox: SandboxUsage | null;
  ended_by: string;
  worker_cpu_seconds: number | null;
  worker_peak_memory_mb: number | null;
  scoring_seconds: number;
  judge: Record<string, unknown> | null;
  cost: { total: number | null; currency: string } | null;
}

/** What is known of a training row but its tokens. */
export interface RowFacts {
  length: number;
  trained: number;
  agent: string | null;
  flags: string[];
  path: number[];
  /** The row that it follows by compaction, and its share of the reward. */
  follows?: number | null;
  share?: number;
}

export interface Action {
  step?: number;
  tool?: string;
  input?: unknown;
  output?: unknown;
  ts?: number;
}

/** A bar of the timeline. Seconds are since the start of the attempt. */
export interface Timing {
  agent: string | null;
  started: number;
  seconds: number;
  first: number | null;
  row: number | null;
  from: number | null;
  to: number | null;
  kind: "engine" | "tool" | "sandbox" | "scoring";
  name: string;
  /** Number of the model call. */
  call: number | null;
}

/** A failed earlier attempt. */
export interface Attempt {
  attempt: number;
  kind: string;
  fault: string;
  message: string;
  seconds: number | null;
  turns?: number;
  tokens?: number;
}

export interface LogLine {
  time: number;
  stream: string;
  text: string;
}

export interface Rollout {
  rollout_id: string;
  attempt: number;
  task_id: string;
  env: string;
  sequences: RowFacts[];
  messages: Message[];
  tools: Tool[];
  output: unknown;
  score: Score;
  finish_reason: string | null;
  truncated: boolean;
  limit: string | null;
  turns: number;
  usage: Usage;
  flags: string[];
  metrics: Record<string, number>;
  actions: Action[];
  others: Conversation[];
  service_calls: unknown[];
  agent_calls: Record<string, number[]>;
  hooks: unknown[];
  egress: unknown[];
  /** Of older servers and groups, these are missing or empty. */
  started_at?: number;
  timings?: Timing[];
  attempts?: Attempt[];
  logs?: LogLine[];
  /** Texts are left out of a large group; the rollout's own page has them. */
  cut?: boolean;
}

export interface RewardRange {
  low: number | null;
  high: number | null;
  solved_at: number;
}

/** A group without rollouts, as GET /v1/groups/ID/rollouts/N has it. */
export interface GroupHead {
  group_id: string;
  env: string;
  task_id: string;
  split: string;
  model: string;
  policy_version: number;
  created_at: number;
  reward_range?: RewardRange;
  component_weights?: Record<string, number>;
  rendering?: { agents?: Record<string, { model: string; trained: boolean }> } & Record<string, unknown>;
  failures?: unknown[];
  asked?: number;
  lost?: Record<string, number>;
  /** Failed attempts of each missing rollout, by the number in its id. */
  missing?: Record<string, Attempt[]>;
  provenance?: unknown;
  /** Public part of the task; {} if it is unknown. */
  public?: Record<string, unknown>;
}

export interface RolloutAnswer {
  group: GroupHead;
  rollouts: number;
  number: number;
  rollout: Rollout;
}

/** Columns of equal length: tokens of a row from `start`. */
export interface TokenColumns {
  start: number;
  length: number;
  ids: number[];
  texts: (string | null)[];
  mask: number[];
  logprobs: number[];
  versions: number[];
  calls: number[];
}

/** Whether somebody looking for failures wants to stop at this group. */
export function hasFailure(row: GroupRow): boolean {
  const limits = Object.keys(row.ends ?? {}).some((end) => end !== "agent");
  const unscored = row.rewards?.some((one) => one === null) ?? false;
  return limits || unscored || (row.truncated ?? 0) > 0 || (row.reward_mean !== null && row.reward_mean <= 0);
}

/** Whether somebody looking for failures wants to stop at this rollout. */
export function isFailure(rollout: Rollout, range: RewardRange | undefined): boolean {
  const { reward } = rollout.score;
  if (rollout.usage.ended_by !== "agent" || rollout.truncated || reward === null) return true;
  return reward <= (range?.low ?? 0);
}

/** A row of GET /v1/failures. */
export interface Failure {
  n: number;
  time: number;
  environment: string;
  task_id: string;
  group_id: string;
  rollout: number | null;
  attempt: number | null;
  kind: string;
  fault: string;
  message: string;
  what: "attempt" | "rollout" | "group" | "drop";
  count?: number;
  runner?: string | null;
}
