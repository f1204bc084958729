// Engines: load, answer times, errors and weights of every replica.

import { useGet } from "../api";
import { useRecent } from "../history";
import { useLive } from "../live";
import { Charts } from "../parts/figures";
import { Show } from "../parts/loaded";
import { duration, number, visible } from "../text";

/** A row of GET /v1/engines: a replica. */
interface Engine {
  name: string;
  url: string;
  model: string;
  calls: number;
  waiting: number;
  limit: number;
  breaker: "closed" | "open" | "half-open";
  errors: number;
  calls_total: number;
  seconds_p50: number | null;
  seconds_p95: number | null;
  weights_version: number | null;
  ready: boolean;
  reason?: string;
  /** How it is used; servers of older versions do not say. */
  standing?: "used" | "checking" | "unreachable" | "refused" | "old" | "paused" | "draining" | "drained";
  origin?: "setting" | "registered" | "file" | "dns" | "server";
  rollouts?: number;
  expires_in_seconds?: number | null;
}

const HOUR = 3600;

export function Engines() {
  const engines = useGet<{ engines: Engine[] }>("v1/engines", 5);
  useLive("engine", engines.again);
  const { series } = useRecent();
  const version = series?.named("envserver_policy_version")[0]?.values.at(-1) ?? -1;
  return (
    <>
      <section class="panel" aria-labelledby="engines-title">
        <h2 id="engines-title">Engines</h2>
        <Show of={engines} what="engines">
          {({ engines }) => (
            <div class="scroll" tabIndex={0} role="group" aria-label="Engines">
              <table>
                <thead>
                  <tr>
                    <th scope="col">replica</th>
                    <th scope="col">state</th>
                    <th scope="col">calls now</th>
                    <th scope="col" class="n">waiting</th>
                    <th scope="col" class="n">half within</th>
                    <th scope="col" class="n">95 % within</th>
                    <th scope="col" class="n">errors</th>
                    <th scope="col" class="n">calls</th>
                    <th scope="col" class="n">weights</th>
                  </tr>
                </thead>
                <tbody>
                  {engines.map((one) => (
                    <Row key={`${one.name} ${one.url}`} engine={one} version={version} />
                  ))}
                </tbody>
              </table>
              {engines.length === 0 && <p class="dim">
                  This server calls no engine. <code>--openai.base_url URL</code> names one.
                </p>}
            </div>
          )}
        </Show>
      </section>
      {series && <Charts ids={["calls", "callsWaiting", "answer", "errors", "completionTokens", "promptTokens"]} series={series} seconds={HOUR} />}
    </>
  );
}

function Row({ engine, version }: { engine: Engine; version: number }) {
  const isOld = engine.weights_version !== null && version >= 0 && engine.weights_version < version;
  return (
    <tr>
      <th scope="row">
        <span class="mono">{visible(engine.url)}</span>
        <div class="dim">
          {visible(engine.model)}
          {engine.name && `, for ${visible(engine.name)}`}
          {engine.origin && engine.origin !== "setting" && `, ${ORIGINS[engine.origin]}`}
          {typeof engine.expires_in_seconds === "number" && `, for ${duration(Math.max(0, engine.expires_in_seconds))} more`}
        </div>
      </th>
      <td>
        <State engine={engine} />
      </td>
      <td>
        {engine.limit > 0 && <meter min={0} max={engine.limit} value={engine.calls} aria-label="calls of the limit" />} {engine.calls}{" "}
        {engine.limit > 0 ? `of ${number(engine.limit)}` : <span class="dim">no limit</span>}
      </td>
      <td class="n">{engine.waiting ? <span class="warn">{number(engine.waiting)}</span> : 0}</td>
      <td class="n">{duration(engine.seconds_p50)}</td>
      <td class="n">{duration(engine.seconds_p95)}</td>
      <td class="n">{engine.errors ? <span class="bad">{number(engine.errors)}</span> : 0}</td>
      <td class="n">{number(engine.calls_total)}</td>
      <td class="n">
        {engine.weights_version === null ? "–" : `v${engine.weights_version}`} {isOld && <span class="badge warn">▲ old, now v{version}</span>}
      </td>
    </tr>
  );
}

const ORIGINS = { registered: "registered", file: "from the file", dns: "from DNS", server: "from the server" };

/** Why a replica is not used as others are, whatever its breaker says. */
const STANDINGS = {
  checking: <span class="badge warn">… being checked</span>,
  unreachable: <span class="badge bad">✕ unreachable</span>,
  refused: <span class="badge bad">✕ refused</span>,
  old: <span class="badge warn">▲ old weights</span>,
  paused: <span class="badge warn">‖ paused</span>,
  draining: <span class="badge warn">◔ draining</span>,
  drained: <span class="badge">○ drained</span>,
};

function State({ engine: { breaker, ready, reason, standing = "used", rollouts } }: { engine: Engine }) {
  const words = {
    closed: ready ? <span class="badge good">● used</span> : <span class="badge warn">… not ready</span>,
    "half-open": <span class="badge warn">◐ on trial</span>,
    open: <span class="badge bad">✕ set aside</span>,
  };
  return (
    <>
      {standing === "used" ? words[breaker] : STANDINGS[standing]}
      {standing === "draining" && <div class="dim">{number(rollouts ?? 0)} rollouts left</div>}
      {reason && <div class="dim words">{visible(reason)}</div>}
    </>
  );
}
