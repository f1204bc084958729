// Runs: what waits for each trainer, what it has leased, how far it is.

import { useGet } from "../api";
import { useRecent } from "../history";
import { useLive } from "../live";
import { Charts } from "../parts/figures";
import { Show } from "../parts/loaded";
import { link, usePlace } from "../router";
import { clock, duration, number, visible } from "../text";

/** A row of GET /v1/runs. */
interface Run {
  name: string;
  created_at: number;
  batch_size: number;
  settings: Record<string, unknown>;
  state: "open" | "closed";
  delivery: string;
  environments: string[];
  warnings: string[];
}

/** Of GET /v1/status, by run. */
interface Backlog {
  queued_groups: number;
  lag_seconds: number | null;
  open_leases: number;
  leased_groups: number;
}

const HOUR = 3600;

export function Runs() {
  const name = usePlace().path[1];
  return name === undefined ? <AllRuns /> : <OneRun key={name} name={name} />;
}

/** Read every five seconds, and when the server tells of a run. */
function useBacklogs(): Record<string, Backlog> {
  const { data, again } = useGet<{ runs: Record<string, Backlog> }>("v1/status", 5);
  useLive("run", again);
  return data?.runs ?? {};
}

function AllRuns() {
  const runs = useGet<{ runs: Run[] }>("v1/runs", 15);
  useLive("run", runs.again);
  const backlogs = useBacklogs();
  const { series } = useRecent();
  return (
    <>
      <section class="panel" aria-labelledby="runs-title">
        <h2 id="runs-title">Runs</h2>
        <Show of={runs} what="runs">
          {({ runs }) => (
            <div class="scroll" tabIndex={0} role="group" aria-label="Runs">
              <table>
                <thead>
                  <tr>
                    <th scope="col">run</th>
                    <th scope="col">state</th>
                    <th scope="col" class="n">waiting</th>
                    <th scope="col" class="n">oldest waits</th>
                    <th scope="col" class="n">leased</th>
                    <th scope="col" class="n">leases</th>
                    <th scope="col">takes</th>
                    <th scope="col">since</th>
                  </tr>
                </thead>
                <tbody>
                  {runs.toReversed().map((run) => (
                    <RunRow key={run.name} run={run} backlog={backlogs[run.name]} />
                  ))}
                </tbody>
              </table>
              {runs.length === 0 && <p class="dim">
                  No trainer has made a run yet. One does by <code>SyncEnvClient(URL, run="NAME", batch_size=16)</code>, or over the wire of Atropos.
                </p>}
            </div>
          )}
        </Show>
      </section>
      {series && <Charts ids={["queue", "leases", "staleness", "drops"]} series={series} seconds={HOUR} />}
    </>
  );
}

function RunRow({ run, backlog }: { run: Run; backlog: Backlog | undefined }) {
  return (
    <tr>
      <th scope="row">
        <a href={link(["runs", run.name])}>{visible(run.name)}</a>
        {run.warnings.map((text) => (
          <div key={text} class="warn">
            ▲ {visible(text)}
          </div>
        ))}
      </th>
      <td>
        <span class={`badge ${run.state === "open" ? "good" : ""}`}>{run.state}</span>
      </td>
      <td class="n">{number(backlog?.queued_groups)}</td>
      <td class="n">{backlog?.queued_groups ? duration(backlog.lag_seconds) : "–"}</td>
      <td class="n">{number(backlog?.leased_groups)}</td>
      <td class="n">{number(backlog?.open_leases)}</td>
      <td>{run.environments.length ? visible(run.environments.join(", ")) : "all"}</td>
      <td class="dim">{clock(run.created_at)}</td>
    </tr>
  );
}

/** A row of GET /v1/runs/RUN/leases. */
interface Lease {
  group_id: string;
  environment: string;
  leased_at: number;
  age_seconds: number;
  expires_in_seconds: number;
}

interface Checkpoint {
  name: string;
  acked_groups: number;
  created_at: number;
}

function OneRun({ name }: { name: string }) {
  const path = `v1/runs/${encodeURIComponent(name)}`;
  const run = useGet<Run>(path, 15);
  const backlog = useBacklogs()[name];
  const { series } = useRecent();
  return (
    <>
      <section class="panel" aria-labelledby="run-title">
        <p class="dim">
          <a href={link(["runs"])}>Runs</a> /
        </p>
        <h2 id="run-title">{visible(name)}</h2>
        <Show of={run} what="the run">
          {(run) => (
            <p class="row">
              <span class={`badge ${run.state === "open" ? "good" : ""}`}>{run.state}</span>
              <span>delivery: {visible(run.delivery)}</span>
              <span>batches of {run.batch_size || "any size"}</span>
              <span>takes {run.environments.length ? visible(run.environments.join(", ")) : "all environments"}</span>
              <span>
                {number(backlog?.queued_groups)} waiting, {number(backlog?.leased_groups)} leased
              </span>
              {run.warnings.map((text) => (
                <span key={text} class="warn">
                  ▲ {visible(text)}
                </span>
              ))}
            </p>
          )}
        </Show>
      </section>
      {series && <Charts ids={["queue"]} series={series} seconds={HOUR} only={({ label }) => label === name} />}
      <Leases path={`${path}/leases`} />
      <Checkpoints path={`${path}/checkpoints`} />
    </>
  );
}

function Leases({ path }: { path: string }) {
  const leases = useGet<{ leases: Lease[]; total: number }>(path, 5);
  return (
    <section class="panel" aria-labelledby="leases-title">
      <h2 id="leases-title">Open leases</h2>
      <Show of={leases} what="leases">
        {({ leases, total }) =>
          leases.length ? (
            <div class="scroll" tabIndex={0} role="group" aria-label="Open leases">
              <table>
                <thead>
                  <tr>
                    <th scope="col">group</th>
                    <th scope="col">environment</th>
                    <th scope="col" class="n">age</th>
                    <th scope="col" class="n">expires in</th>
                    <th scope="col">leased</th>
                  </tr>
                </thead>
                <tbody>
                  {leases.map((one) => (
                    <tr key={one.group_id}>
                      <th scope="row" class="mono">
                        <a href={link(["groups", one.group_id])}>{visible(one.group_id)}</a>
                      </th>
                      <td>{visible(one.environment)}</td>
                      <td class="n">{duration(one.age_seconds)}</td>
                      <td class="n">
                        {one.expires_in_seconds < 30 ? <span class="warn">▲ {duration(Math.max(0, one.expires_in_seconds))}</span> : duration(one.expires_in_seconds)}
                      </td>
                      <td class="dim">{clock(one.leased_at)}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
              {total > leases.length && <p class="dim">and {number(total - leases.length)} more</p>}
            </div>
          ) : (
            <p class="dim">Nothing is leased now: the trainer has acknowledged all it took, or waits for whole batches.</p>
          )
        }
      </Show>
    </section>
  );
}

function Checkpoints({ path }: { path: string }) {
  const checkpoints = useGet<{ checkpoints: Checkpoint[] }>(path, 15);
  return (
    <section class="panel" aria-labelledby="checkpoints-title">
      <h2 id="checkpoints-title">Checkpoints</h2>
      <Show of={checkpoints} what="checkpoints">
        {({ checkpoints }) =>
          checkpoints.length ? (
            <table>
              <thead>
                <tr>
                  <th scope="col">checkpoint</th>
                  <th scope="col" class="n">groups acknowledged</th>
                  <th scope="col">when</th>
                </tr>
              </thead>
              <tbody>
                {checkpoints.toReversed().map((one) => (
                  <tr key={one.name}>
                    <th scope="row">{visible(one.name)}</th>
                    <td class="n">{number(one.acked_groups)}</td>
                    <td class="dim">{clock(one.created_at)}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          ) : (
            <p class="dim">None is named: <code>client.ack(batch, checkpoint="step-1")</code> does. Until then a group counts as delivered when it is acknowledged.</p>
          )
        }
      </Show>
    </section>
  );
}
