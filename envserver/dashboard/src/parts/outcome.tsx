// How a rollout came out: reward with its parts, end, lengths, flags.

import type { RewardRange, Rollout } from "../records";
import { count, duration, number, visible } from "../text";
import { signed } from "./conversation";

const MARKS = { "not scorable": "?", solved: "✓", "lowest reward": "✗", partly: "" };

export function Reward({ value, range }: { value: number | null; range: RewardRange | undefined }) {
  const solvedAt = range?.solved_at ?? 1;
  const low = range?.low ?? 0;
  const kind = value === null ? "warn" : value >= solvedAt - 1e-9 ? "good" : value <= low ? "bad" : "";
  const word = value === null ? "not scorable" : value >= solvedAt - 1e-9 ? "solved" : value <= low ? "lowest reward" : "partly";
  return (
    <span class={`reward ${kind}`} title={word}>
      {number(value)} <span aria-hidden="true">{MARKS[word]}</span>
      <span class="unseen">{word}</span>
    </span>
  );
}

/** Everything in one place: what lies in the head of a column and of a rollout's page. */
export function Outcome({ rollout, range, weights = {} }: { rollout: Rollout; range: RewardRange | undefined; weights?: Record<string, number> | undefined }) {
  const { score, usage } = rollout;
  const agents = Object.entries(score.rewards);
  return (
    <div class="outcome">
      <p>
        <Reward value={score.reward} range={range} />{" "}
        <span class={usage.ended_by === "agent" ? "dim" : "warn"}>{endOf(rollout)}</span>
      </p>
      {score.error && <p class="bad">{visible(score.error)}</p>}
      <p class="dim">
        {count(rollout.turns, "turn")}, {count(usage.completion_tokens, "completion token")}, {duration(usage.seconds)}
        {rollout.attempt > 1 && <span class="warn">, attempt {rollout.attempt}</span>}
      </p>
      {agents.length > 0 && <Numbers title="by agent" values={score.rewards} />}
      <Numbers title="components" values={score.components} weights={weights} />
      {score.turns.length > 0 && (
        <p>
          <span class="dim">turns </span>
          {score.turns.map((one, n) => (
            <span key={n} class="chip" title={`turn ${one.turn}${one.agent ? ` of ${one.agent}` : ""}`}>
              {one.agent && `${visible(one.agent)} `}
              {one.turn}: {signed(one.value)}
            </span>
          ))}
        </p>
      )}
      {rollout.flags.length > 0 && (
        <p>
          <span class="dim">flags </span>
          {rollout.flags.map((flag) => (
            <span key={flag} class="chip warn">
              {visible(flag)}
            </span>
          ))}
        </p>
      )}
    </div>
  );
}

/** How a rollout ended, in words. */
export function endOf(rollout: Rollout): string {
  const { ended_by } = rollout.usage;
  if (ended_by !== "agent") return `ended by the limit: ${visible(ended_by)}`;
  return rollout.truncated ? "ended by itself, its last answer cut off" : "ended by itself";
}

export function Numbers({ title, values, weights = {} }: { title: string; values: Record<string, number>; weights?: Record<string, number> }) {
  const all = Object.entries(values);
  if (all.length === 0) return null;
  return (
    <p>
      <span class="dim">{title} </span>
      {all.map(([name, value]) => (
        <span key={name} class="chip">
          {visible(name)} <b>{number(value)}</b>
          {weights[name] !== undefined && <span class="dim"> × {number(weights[name])}</span>}
        </span>
      ))}
    </p>
  );
}
