// "#/held_out": evaluations of held-out tasks while a trainer learns, over policy versions.

import { useGet } from "../api";
import { VersionsChart } from "../parts/versions_chart";
import { link } from "../router";
import { clock, number, visible } from "../text";

interface HeldOutEvaluation {
  version: number;
  state: string;
  /** Numbers by name, such as evaluate/math/mean_reward. */
  results: Record<string, number> | null;
  rollouts: number | null;
  other_versions: number | null;
  began_at: number;
  ended_at: number | null;
  error: string | null;
}

const MEAN = /^evaluate\/(.*)\/mean_reward$/;

export function HeldOut() {
  const { data, problem } = useGet<{ running: boolean; evaluations: HeldOutEvaluation[] }>("v1/evaluations", 5);
  if (!data) return <p role="status">{problem ? visible(problem.message) : "Loading …"}</p>;
  const means = data.evaluations.flatMap((one) =>
    Object.entries(one.results ?? {}).flatMap(([name, mean]) => {
      const environment = MEAN.exec(name)?.[1];
      return environment === undefined ? [] : [{ environment, mean, one }];
    }),
  );
  const environments = [...new Set(means.map(({ environment }) => environment))];
  const last = data.evaluations.at(-1);
  return (
    <>
      {data.running && <p role="status">An evaluation runs.</p>}
      {last?.error && <p class="panel banner warn">The last one failed: {visible(last.error)}</p>}
      {!environments.length && <p>There is no result yet.</p>}
      {environments.map((environment) => {
        const rows = means
          .filter((found) => found.environment === environment)
          .map(({ mean, one }) => ({
            group_id: `${one.version}/${one.began_at}`,
            policy_version: one.version,
            created_at: one.began_at,
            size: one.rollouts ?? 0,
            rewards: [],
            reward_mean: mean,
            reward_min: mean,
            reward_max: mean,
            one,
          }));
        return (
          <section key={environment} class="panel" aria-label={visible(environment)}>
            <h2>{visible(environment)}</h2>
            <VersionsChart groups={rows} of="evaluations" linkOf={() => link(["held_out"])} />
            <div class="scroll" tabIndex={0} role="group" aria-label={`Evaluations of ${visible(environment)}`}>
              <table>
                <thead>
                  <tr>
                    <th scope="col" class="n">Version</th>
                    <th scope="col" class="n">Mean reward</th>
                    <th scope="col" class="n">Rollouts</th>
                    <th scope="col" class="n">Of other versions</th>
                    <th scope="col">Finished</th>
                  </tr>
                </thead>
                <tbody>
                  {rows.toReversed().map(({ group_id, reward_mean, one }) => (
                    <tr key={group_id}>
                      <th scope="row" class="n">{one.version}</th>
                      <td class="n">{number(reward_mean)}</td>
                      <td class="n">{number(one.rollouts)}</td>
                      <td class="n">{number(one.other_versions)}</td>
                      <td>{one.ended_at ? clock(one.ended_at) : "–"}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          </section>
        );
      })}
    </>
  );
}
