// What a rollout waited for: a bar for each engine call, tool, program and scoring.

import { useState } from "preact/hooks";
import type { RolloutAnswer, Timing } from "../records";
import { count, duration, number, visible } from "../text";

const MOST_BARS = 200;
const KINDS = ["engine", "tool", "sandbox", "scoring"] as const;

const NAMES: Record<Timing["kind"], [string, string]> = {
  engine: ["engine call", "engine calls"],
  tool: ["tool call", "tool calls"],
  sandbox: ["program in the sandbox", "programs in the sandbox"],
  scoring: ["scoring", "scorings"],
};

interface Props {
  answer: RolloutAnswer;
  /** Link to a token of a row. */
  tokenLink: (row: number, token: number) => string;
}

export function Timeline({ answer, tokenLink }: Props) {
  const { usage, timings = [] } = answer.rollout;
  const [most, setMost] = useState(MOST_BARS);
  const end = Math.max(usage.seconds, ...timings.map((one) => one.started + one.seconds), 1e-3);
  return (
    <>
      <table class="sums">
        <caption>Seconds of the rollout</caption>
        <tbody>
          <tr>
            <th scope="row">in all</th>
            <td>{duration(usage.seconds)}</td>
          </tr>
          <tr>
            <th scope="row">waiting for the model</th>
            <td>
              {duration(usage.model_seconds)} <span class="dim">{share(usage.model_seconds, usage.seconds)}</span>
            </td>
          </tr>
          {KINDS.map((kind) => (
            <Sum key={kind} kind={kind} timings={timings.filter((one) => one.kind === kind)} all={usage.seconds} />
          ))}
          {!timings.some((one) => one.kind === "scoring") && (
            <tr>
              <th scope="row">scoring</th>
              <td>{duration(usage.scoring_seconds)}</td>
            </tr>
          )}
        </tbody>
      </table>
      {timings.length === 0 ? (
        <p class="dim">The times of single calls and tools were not recorded.</p>
      ) : (
        <>
          <p class="legend dim">
            {KINDS.map((kind) => (
              <span key={kind}>
                <i class={`swatch ${kind}`} /> {kind}
              </span>
            ))}
            <span>a line in an engine's bar: its first token</span>
          </p>
          <ol class="timeline">
            {timings.slice(0, most).map((one, n) => (
              <Bar key={n} one={one} end={end} tokenLink={tokenLink} />
            ))}
          </ol>
          {timings.length > most && <button onClick={() => setMost(most + 1000)}>{count(timings.length - most, "bar")} more</button>}
        </>
      )}
    </>
  );
}

function Sum({ kind, timings, all }: { kind: Timing["kind"]; timings: Timing[]; all: number }) {
  if (timings.length === 0) return null;
  const seconds = timings.reduce((sum, one) => sum + one.seconds, 0);
  return (
    <tr>
      <th scope="row">{kind === "scoring" ? kind : count(timings.length, ...NAMES[kind])}</th>
      <td>
        {duration(seconds)} <span class="dim">{share(seconds, all)}</span>
      </td>
    </tr>
  );
}

function share(part: number, all: number): string {
  return all > 0 ? `${number((100 * part) / all, 2)} %` : "";
}

function Bar({ one, end, tokenLink }: { one: Timing; end: number; tokenLink: Props["tokenLink"] }) {
  const name = visible(one.name || one.kind);
  const first = one.first === null || one.seconds <= 0 ? null : (100 * one.first) / one.seconds;
  const tokens = one.row !== null && one.from !== null && one.to !== null;
  return (
    <li>
      <span class="timeline-name" title={name}>
        {one.agent && <span class="dim">{visible(one.agent)} </span>}
        {tokens ? <a href={tokenLink(one.row!, one.from!)}>{name}</a> : name}
      </span>
      <span class="track">
        <span
          class={`bar ${one.kind}`}
          role="img"
          aria-label={`${one.kind}, starts at ${duration(one.started)}`}
          style={{ left: `${(100 * Math.max(0, one.started)) / end}%`, width: `${Math.max(0.2, (100 * one.seconds) / end)}%` }}
        >
          {first !== null && <i style={{ left: `${Math.min(100, first)}%` }} />}
        </span>
      </span>
      <span class="right timeline-seconds">
        {duration(one.seconds)}
        {one.first !== null && <span class="dim"> first {duration(one.first)}</span>}
        {tokens && <span class="dim"> {count(one.to! - one.from!, "token")}</span>}
      </span>
    </li>
  );
}
