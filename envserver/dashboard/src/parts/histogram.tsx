// How the groups' mean rewards are spread; a bar shows only its groups.

import { setQuery } from "../router";
import { count, number } from "../text";

/** GET /v1/rewards. */
export interface Rewards {
  groups: number;
  low: number | null;
  high: number | null;
  counts: number[];
  unscored: number;
}

const NARROW = 560;

export function Histogram({ rewards, query }: { rewards: Rewards | null; query: URLSearchParams }) {
  if (!rewards || rewards.low === null || rewards.high === null) return null;
  const { low, high } = rewards;
  const counts = innerWidth < NARROW ? inPairs(rewards.counts) : rewards.counts;
  const width = (high - low) / counts.length;
  const most = Math.max(1, ...counts);
  const [min, max] = [query.get("min_reward"), query.get("max_reward")];
  const bounds = (n: number) => {
    const end = low + (n + 1) * width;
    // A bar has its lower end and not its upper one, but the last has both.
    return { from: tidy(low + n * width), to: n === counts.length - 1 ? tidy(high) : tidy(end - width * 1e-6) };
  };
  const chosen = (n: number) => {
    const middle = low + (n + 0.5) * width;
    return (min !== null || max !== null) && middle >= Number(min ?? low) && middle <= Number(max ?? high);
  };
  const act = (n: number, extends_: boolean) => {
    const { from, to } = bounds(n);
    if (min === String(from) && max === String(to)) return setQuery({ min_reward: null, max_reward: null });
    const isMore = extends_ && min !== null && max !== null;
    setQuery({
      min_reward: isMore ? Math.min(from, Number(min)) : from,
      max_reward: isMore ? Math.max(to, Number(max)) : to,
    });
  };
  return (
    <figure class="histogram">
      <div class="bars" role="group" aria-label="Groups by mean reward; a bar shows only its groups, Shift adds a bar">
        {counts.map((height, n) => {
          const text = `${number(low + n * width)} to ${number(low + (n + 1) * width)}: ${count(height, "group")}`;
          return (
            <button
              key={n}
              aria-label={text}
              title={text}
              aria-pressed={chosen(n)}
              style={{ "--share": `${height === 0 ? 0 : Math.max(4, (100 * height) / most)}%` }}
              onClick={(event) => act(n, event.shiftKey)}
            />
          );
        })}
      </div>
      <figcaption>
        <span>{number(low)}</span>
        <span>mean reward</span>
        <span>{number(high)}</span>
      </figcaption>
    </figure>
  );
}

/** Half as many bars, which fingers can hit on a small screen. */
function inPairs(counts: number[]): number[] {
  return Array.from({ length: counts.length / 2 }, (_, n) => counts[2 * n]! + counts[2 * n + 1]!);
}

/** Without the noise of binary fractions: 0.15, not 0.15000000000000002. */
function tidy(value: number): number {
  return Number(value.toPrecision(9));
}
