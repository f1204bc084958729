// Workers: processes, what they play now, sandboxes, servers, environments that joined from elsewhere.

import { useGet } from "../api";
import { useRecent } from "../history";
import { Charts } from "../parts/figures";
import { Show } from "../parts/loaded";
import { ShortName } from "../parts/short_name";
import { link, setQuery, usePlace } from "../router";
import { clock, duration, number, visible } from "../text";

/** Of GET /v1/status, by environment. */
interface Pool {
  processes: number;
  running: number;
  dedicated: number;
  restarts: number;
  deaths: Record<string, number>;
  pids: number[];
}

/** A row of GET /v1/rollouts/running. */
interface Running {
  environment: string;
  group_id: string;
  task_id: string;
  rollout: number;
  attempt: number;
  seconds: number;
  turns: number;
  tokens: number;
  worker: number | null;
  state: "waiting" | "playing" | "scoring";
}

/** A row of GET /v1/environments. */
interface Joined {
  id: string;
  name: string;
  env: string;
  host: string;
  version: string;
  weight: number;
  registered_at: number;
  gone: boolean;
  silent: boolean;
  silent_seconds: number;
  stored: number;
  open: number;
}

/** Of GET /v1/status, where several servers share a store. */
interface Leader {
  url: string;
  since: number;
  followers: string[];
}

const HOUR = 3600;
const STATES = { waiting: "waiting", playing: "in a worker", scoring: "being scored" };
const MOST = 200;

export function Workers() {
  const { series } = useRecent();
  return (
    <>
      <Pools />
      <RunningNow />
      <Servers />
      <JoinedEnvironments />
      {series && <Charts ids={["running", "sandboxes", "deaths", "seconds", "lag", "memory"]} series={series} seconds={HOUR} />}
    </>
  );
}

function Pools() {
  const status = useGet<{ server: { workers?: Record<string, Pool> } }>("v1/status", 5);
  const { series } = useRecent();
  const sandboxes = (environment: string) => series?.named("envserver_sandboxes", { environment })[0]?.values.at(-1);
  return (
    <section class="panel" aria-labelledby="pools-title">
      <h2 id="pools-title">Workers</h2>
      <Show of={status} what="workers">
        {({ server: { workers = {} } }) => (
          <div class="scroll" tabIndex={0} role="group" aria-label="Workers">
            <table>
              <thead>
                <tr>
                  <th scope="col">environment</th>
                  <th scope="col" class="n">processes</th>
                  <th scope="col" class="n">rollouts in workers</th>
                  <th scope="col" class="n">dedicated</th>
                  <th scope="col" class="n">sandboxes</th>
                  <th scope="col" class="n">replaced</th>
                  <th scope="col">deaths</th>
                  <th scope="col">process ids</th>
                </tr>
              </thead>
              <tbody>
                {Object.entries(workers).map(([name, pool]) => (
                  <tr key={name}>
                    <th scope="row">
                      <a href={link(["groups"], { environment: name })}>{visible(name)}</a>
                    </th>
                    <td class="n">{pool.processes || <span class="bad">✕ none</span>}</td>
                    <td class="n">{number(pool.running)}</td>
                    <td class="n">{number(pool.dedicated)}</td>
                    <td class="n">{number(sandboxes(name))}</td>
                    <td class="n">{number(pool.restarts)}</td>
                    <td>
                      {Object.entries(pool.deaths).map(([kind, count]) => (
                        <span key={kind} class="bad">
                          {visible(kind)} {number(count)}{" "}
                        </span>
                      ))}
                      {!Object.keys(pool.deaths).length && <span class="dim">none</span>}
                    </td>
                    <td class="mono dim">{pool.pids.slice(0, 12).join(" ")}</td>
                  </tr>
                ))}
              </tbody>
            </table>
            {!Object.keys(workers).length && <p class="dim">
                This server runs no environment. <code>envserver serve --env NAME</code> does, or <code>envserver join</code> from another machine.
              </p>}
          </div>
        )}
      </Show>
    </section>
  );
}

function RunningNow() {
  const environment = usePlace().query.get("environment");
  const filter = environment ? `&environment=${encodeURIComponent(environment)}` : "";
  const running = useGet<{ rollouts: Running[]; total: number }>(`v1/rollouts/running?limit=${MOST}${filter}`, 3);
  return (
    <section class="panel" aria-labelledby="running-title">
      <div class="row">
        <h2 id="running-title">Rollouts in progress</h2>
        {running.data && <span class="dim">{states(running.data)}, the oldest first</span>}
        {environment && (
          <button type="button" onClick={() => setQuery({ environment: null })}>
            only {visible(environment)} ✕
          </button>
        )}
      </div>
      <Show of={running} what="rollouts">
        {({ rollouts }) =>
          rollouts.length ? (
            <div class="scroll tall" tabIndex={0} role="group" aria-label="Rollouts in progress">
              <table>
                <thead>
                  <tr>
                    <th scope="col">task</th>
                    <th scope="col">environment</th>
                    <th scope="col" class="n">rollout</th>
                    <th scope="col">state</th>
                    <th scope="col" class="n">for</th>
                    <th scope="col" class="n">turns</th>
                    <th scope="col" class="n">completion tokens</th>
                    <th scope="col" class="n">attempt</th>
                    <th scope="col" class="n">process</th>
                  </tr>
                </thead>
                <tbody>
                  {rollouts.map((one) => (
                    <tr key={`${one.group_id} ${one.rollout} ${one.attempt}`}>
                      <th scope="row">
                        <a href={link(["tasks", one.environment, one.task_id])}>
                          <ShortName text={one.task_id} />
                        </a>
                      </th>
                      <td>{visible(one.environment)}</td>
                      <td class="n">{one.rollout}</td>
                      <td>{STATES[one.state]}</td>
                      <td class="n">{duration(one.seconds)}</td>
                      <td class="n">{number(one.turns)}</td>
                      <td class="n">{number(one.tokens)}</td>
                      <td class="n">{one.attempt > 1 ? <span class="warn">{one.attempt}</span> : one.attempt}</td>
                      <td class="n dim">{one.worker ?? "–"}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          ) : (
            <p class="dim">No rollout is in progress. If the queue is full, they start again when a trainer has taken groups from it.</p>
          )
        }
      </Show>
    </section>
  );
}

/** "22: 8 waiting, 13 in a worker, 1 being scored"; of more than are listed only the number. */
function states({ rollouts, total }: { rollouts: Running[]; total: number }): string {
  const parts = Object.entries(STATES).map(([state, words]) => [rollouts.filter((one) => one.state === state).length, words] as const);
  const said = parts.filter(([count]) => count > 0).map(([count, words]) => `${count} ${words}`);
  return `${number(total)}${said.length && rollouts.length === total ? `: ${said.join(", ")}` : ""}`;
}

function Servers() {
  const status = useGet<{ server: { leader?: Leader } }>("v1/status", 5);
  const leader = status.data?.server.leader;
  if (!leader) return null;
  return (
    <section class="panel" aria-labelledby="servers-title">
      <h2 id="servers-title">Servers that share the store</h2>
      <ul>
        <li>
          <span class="mono">{visible(leader.url)}</span> <span class="badge good">● leads</span>{" "}
          <span class="dim">since {clock(leader.since)}</span>
        </li>
        {leader.followers.map((url) => (
          <li key={url}>
            <span class="mono">{visible(url)}</span> <span class="badge">follows</span>
          </li>
        ))}
        {!leader.followers.length && <li class="bad">✕ no other server would take over</li>}
      </ul>
    </section>
  );
}

function JoinedEnvironments() {
  const joined = useGet<{ environments: Joined[] }>("v1/environments", 5);
  if (!joined.data?.environments.length) return null;
  return (
    <section class="panel" aria-labelledby="joined-title">
      <h2 id="joined-title">Environments on other machines</h2>
      <div class="scroll" tabIndex={0} role="group" aria-label="Environments on other machines">
        <table>
          <thead>
            <tr>
              <th scope="col">name</th>
              <th scope="col">environment</th>
              <th scope="col">state</th>
              <th scope="col">machine</th>
              <th scope="col" class="n">open groups</th>
              <th scope="col" class="n">stored</th>
              <th scope="col" class="n">weight</th>
              <th scope="col">since</th>
            </tr>
          </thead>
          <tbody>
            {joined.data.environments.map((one) => (
              <tr key={one.id}>
                <th scope="row">{visible(one.name)}</th>
                <td>{visible(one.env)}</td>
                <td>
                  {one.gone ? (
                    <span class="badge">gone</span>
                  ) : one.silent ? (
                    <span class="badge bad">✕ silent for {duration(one.silent_seconds)}</span>
                  ) : (
                    <span class="badge good">● present</span>
                  )}
                </td>
                <td>{visible(one.host ?? "")}</td>
                <td class="n">{number(one.open)}</td>
                <td class="n">{number(one.stored)}</td>
                <td class="n">{number(one.weight)}</td>
                <td class="dim">{clock(one.registered_at)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
