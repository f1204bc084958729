// What a rollout used, printed, and which attempts failed before it.

import type { ComponentChildren } from "preact";
import type { Attempt, LogLine, RolloutAnswer, SandboxUsage } from "../records";
import { amount, asText, count, duration, number, visible } from "../text";
import { LongText } from "./long";
import { Numbers } from "./outcome";

export function Use({ answer }: { answer: RolloutAnswer }) {
  const { rollout } = answer;
  const { usage } = rollout;
  return (
    <>
      <Part title="Model">
        <Facts
          facts={[
            ["prompt tokens", amount(usage.prompt_tokens)],
            ["completion tokens", amount(usage.completion_tokens)],
            ["seconds of calls", duration(usage.model_seconds)],
            ["cost", usage.cost?.total == null ? "unknown" : `${number(usage.cost.total)} ${visible(usage.cost.currency)}`],
            ...(usage.judge ? ([["judge", <LongText text={asText(usage.judge)} />]] as Fact[]) : []),
          ]}
        />
      </Part>
      <Part title="Worker">
        <Facts
          facts={[
            ["CPU", usage.worker_cpu_seconds === null ? "not measured: its process was shared" : duration(usage.worker_cpu_seconds)],
            ["peak of memory", usage.worker_peak_memory_mb === null ? "not measured: its process was shared" : `${number(usage.worker_peak_memory_mb)} MB`],
            ["scoring", duration(usage.scoring_seconds)],
          ]}
        />
      </Part>
      <Part title="Sandbox">{usage.sandbox ? <Sandbox use={usage.sandbox} /> : <p class="dim">No program ran in a sandbox.</p>}</Part>
      <Attempts answer={answer} />
      <Logs lines={rollout.logs} />
      <Part title="Numbers">
        <Numbers title="of the agent" values={rollout.metrics} />
        <Numbers title="of the score" values={rollout.score.metrics} />
      </Part>
      <List title="Steps that the agent logged" values={rollout.actions} />
      <List title="Calls of services" values={rollout.service_calls} />
      <List title="What hooks changed or refused" values={rollout.hooks} />
      <List title="Requests to hosts outside" values={rollout.egress} />
    </>
  );
}

type Fact = [string, ComponentChildren];

function Part({ title, children }: { title: string; children: ComponentChildren }) {
  return (
    <section class="use-part">
      <h2>{title}</h2>
      {children}
    </section>
  );
}

function Facts({ facts }: { facts: Fact[] }) {
  return (
    <dl>
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

function Sandbox({ use }: { use: SandboxUsage }) {
  const killed = Object.entries(use.killed).map(([by, times]) => `${times} × ${by}`);
  return (
    <Facts
      facts={[
        ["programs", number(use.executions)],
        ["killed by", killed.length > 0 ? <span class="bad">{visible(killed.join(", "))}</span> : "none was killed"],
        ["CPU", `${duration(use.cpu_seconds)}${use.cpu_exact ? "" : " at least"}`],
        ["time", duration(use.wall_seconds)],
        ["peak of memory", `${number(use.peak_memory_mb)} MB${use.memory_exact ? "" : ", sampled"}`],
        ["disk", `${number(use.disk_mb)} MB`],
        ["read, written", `${amount(use.read_bytes)} and ${amount(use.written_bytes)} bytes`],
        ["output", `${amount(use.output_bytes)} bytes`],
        ["processes at once", number(use.peak_processes)],
      ]}
    />
  );
}

function Attempts({ answer }: { answer: RolloutAnswer }) {
  const { attempt, attempts: failed } = answer.rollout;
  if (attempt <= 1 && !failed?.length) return null;
  return (
    <Part title="Failed attempts before">
      {failed?.length ? (
        <FailedAttempts attempts={failed} />
      ) : (
        <p class="dim">This is attempt {attempt}; why the ones before failed was not recorded.</p>
      )}
    </Part>
  );
}

export function FailedAttempts({ attempts }: { attempts: Attempt[] }) {
  return (
    <ul class="plain">
      {attempts.map((one) => (
        <FailedAttempt key={one.attempt} one={one} />
      ))}
    </ul>
  );
}

function FailedAttempt({ one }: { one: Attempt }) {
  return (
    <li>
      <b>attempt {one.attempt}</b> <span class="warn">{visible(one.kind)}</span> <span class="dim">({visible(one.fault)}, {duration(one.seconds)}{one.turns ? `, ${one.turns} turns, ${amount(one.tokens ?? 0)} tokens` : ""})</span>
      <LongText text={one.message} most={1000} />
    </li>
  );
}

function Logs({ lines }: { lines: LogLine[] | undefined }) {
  return (
    <Part title="What it printed">
      {lines === undefined ? (
        <p class="dim">Not recorded.</p>
      ) : lines.length === 0 ? (
        <p class="dim">Nothing.</p>
      ) : (
        <LongText text={lines.map((one) => `${number(one.time)} s ${one.stream}  ${one.text}`).join("\n")} most={10_000} />
      )}
    </Part>
  );
}

function List({ title, values }: { title: string; values: unknown[] }) {
  if (values.length === 0) return null;
  return (
    <details class="task">
      <summary>
        {title} <span class="dim">({count(values.length, "entry", "entries")})</span>
      </summary>
      <LongText text={asText(values)} />
    </details>
  );
}
