// "#/evaluations": the results of each run by environment, with intervals; two of them can be compared.

import { useGet } from "../api";
import { Interval, intervalText, type Mean } from "../parts/interval";
import { link, setQuery, usePlace } from "../router";
import { clock, number, shortened, visible } from "../text";

interface Estimate {
  value: number;
  low: number | null;
  high: number | null;
  tasks: number;
}

interface Numbers {
  reward_mean: number | null;
  low: number | null;
  high: number | null;
  tasks: number;
  rollouts: number;
  lost: number;
  truncated: number;
  /** By k, as text. */
  pass_at: Record<string, Estimate>;
  pass_hat: Record<string, Estimate>;
  /** By label and value. */
  by: Record<string, Record<string, Estimate>>;
  costs: { completion_tokens: number; turns: number; seconds: number; cost: number | null; currency: string } | null;
  components: Record<string, number>;
}

interface Part extends Numbers {
  environment: string;
  split: string;
  model: string;
  complete: boolean;
  simulated: boolean;
  created_at: number;
  lowest: number;
  highest: number;
  group_size: number;
  notes: string[];
  baselines: (Numbers & { name: string; difference: Estimate | null })[];
}

export interface Evaluation {
  name: string;
  model: string;
  /** Over its environments, each counted alike; null: there is one. */
  average: Estimate | null;
  environments: Part[];
}

export interface Evaluations {
  evaluations: Evaluation[];
  /** Runs that have no results, and why. */
  problems: { name: string; message: string }[];
}

export function EvaluationsPage() {
  const { data, problem } = useGet<Evaluations>("v1/evaluations", 10);
  if (!data) return <p role="status">{problem ? visible(problem.message) : "Counting …"}</p>;
  const names = [...new Set(data.evaluations.flatMap((one) => one.environments.map((part) => part.environment)))];
  return (
    <>
      {data.problems.map(({ name, message }) => (
        <p key={name} class="panel banner warn">
          {visible(name)}: {visible(message)}
        </p>
      ))}
      {data.evaluations.length > 1 && <Choice runs={data.evaluations.map((one) => one.name)} />}
      <Averages runs={data.evaluations} />
      {names.map((name) => (
        <EnvironmentPanel key={name} name={name} runs={data.evaluations} />
      ))}
      {!names.length && !data.problems.length && <p>There is no result yet.</p>}
    </>
  );
}

/** The mean over all environments of a run. */
function Averages({ runs }: { runs: Evaluation[] }) {
  const means = runs.flatMap(({ name, average }) => (average ? [{ name, average }] : []));
  if (!means.length) return null;
  const parts = runs.flatMap((one) => one.environments);
  const ends: [number, number] = [Math.min(...parts.map((one) => one.lowest)), Math.max(...parts.map((one) => one.highest))];
  return (
    <section class="panel" aria-label="All environments">
      <h2>
        All environments <span class="dim">(each counts alike)</span>
      </h2>
      <table>
        <tbody>
          {means.map(({ name, average }) => (
            <tr key={name}>
              <th scope="row">{visible(name)}</th>
              <td class="n">{intervalText(average)}</td>
              <td>
                <Interval mean={average} ends={ends} />
              </td>
              <td class="n">{number(average.tasks)} tasks</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

/** Which two runs are compared. */
function Choice({ runs }: { runs: string[] }) {
  const { query } = usePlace();
  const a = query.get("a") ?? runs[0]!;
  const b = query.get("b") ?? runs[1]!;
  return (
    <p class="panel row">
      <RunChoice label="Compare" name="a" value={a} runs={runs} />
      <RunChoice label="with" name="b" value={b} runs={runs} />
      <a href={link(["comparison"], { a, b })}>Task by task</a>
    </p>
  );
}

export function RunChoice({ label, name, value, runs }: { label: string; name: string; value: string; runs: string[] }) {
  return (
    <label>
      {label}
      <select value={value} onChange={(event) => setQuery({ [name]: event.currentTarget.value })}>
        {runs.map((run) => (
          <option key={run} value={run}>
            {visible(shortened(run, 60))}
          </option>
        ))}
      </select>
    </label>
  );
}

interface Line {
  key: string;
  name: string;
  numbers: Numbers;
  part: Part;
  isBaseline: boolean;
}

function EnvironmentPanel({ name, runs }: { name: string; runs: Evaluation[] }) {
  const lines: Line[] = runs.flatMap((run) =>
    run.environments
      .filter((part) => part.environment === name)
      .flatMap((part) => [
        { key: run.name, name: run.name, numbers: part, part, isBaseline: false },
        ...part.baselines.map((one) => ({
          key: `${run.name}/${one.name}`,
          name: `baseline ${one.name}`,
          numbers: one,
          part,
          isBaseline: true,
        })),
      ]),
  );
  const parts = lines.filter((one) => !one.isBaseline).map((one) => one.part);
  const values = lines.flatMap(({ numbers }) => [numbers.low, numbers.high, numbers.reward_mean]).filter((one) => one !== null);
  const ends: [number, number] = [
    Math.min(...parts.map((one) => one.lowest), ...values),
    Math.max(...parts.map((one) => one.highest), ...values),
  ];
  const most = Math.max(1, ...lines.map(({ numbers }) => Math.max(1, ...Object.keys(numbers.pass_at).map(Number))));
  const ks = [...new Set([1, most])];
  const isPriced = lines.some(({ numbers }) => (numbers.costs?.cost ?? null) !== null);
  return (
    <section class="panel" aria-label={visible(name)}>
      <h2>
        {visible(name)} <span class="dim">({[...new Set(parts.map((one) => one.split))].join(", ")})</span>
      </h2>
      <div class="scroll" tabIndex={0} role="group" aria-label={`Results of ${visible(name)}`}>
        <table>
          <thead>
            <tr>
              <th scope="col">Run</th>
              <th scope="col">Model</th>
              <th scope="col">Mean reward, 95 %</th>
              <th scope="col">
                <span class="dim">
                  {number(ends[0])} to {number(ends[1])}
                </span>
              </th>
              {ks.map((k) => (
                <th key={k} scope="col" class="n">
                  pass@{k}
                </th>
              ))}
              {most > 1 && <th scope="col" class="n">pass^{most}</th>}
              <th scope="col" class="n">Tasks</th>
              <th scope="col" class="n">Attempts</th>
              <th scope="col" class="n">Lost</th>
              <th scope="col" class="n">Cut off</th>
              <th scope="col" class="n">Tokens each</th>
              {isPriced && <th scope="col" class="n">Cost each</th>}
            </tr>
          </thead>
          <tbody>
            {lines.map(({ key, name: run, numbers, part, isBaseline }) => (
              <tr key={key}>
                <th scope="row" class={isBaseline ? "dim" : undefined}>
                  {visible(run)} {!part.complete && <span class="badge warn">not complete</span>}{" "}
                  {part.simulated && <span class="badge warn">simulated</span>}
                </th>
                <td>{visible(part.model) || "–"}</td>
                <td class="n">{intervalText(meanOf(numbers))}</td>
                <td>
                  <Interval mean={meanOf(numbers)} ends={ends} />
                </td>
                {ks.map((k) => (
                  <td key={k} class="n">{estimateText(numbers.pass_at[k])}</td>
                ))}
                {most > 1 && <td class="n">{estimateText(numbers.pass_hat[most])}</td>}
                <td class="n">{number(numbers.tasks)}</td>
                <td class="n">{number(numbers.rollouts)}</td>
                <td class="n">{number(numbers.lost)}</td>
                <td class="n">{number(numbers.truncated)}</td>
                <td class="n">{number(numbers.costs?.completion_tokens ?? null)}</td>
                {isPriced && (
                  <td class="n">
                    {number(numbers.costs?.cost ?? null)} {numbers.costs?.currency}
                  </td>
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <Kinds lines={lines} ends={ends} />
      <details>
        <summary>How it was counted</summary>
        {parts.map((part, place) => (
          <ul key={place}>
            {part.notes.map((note) => (
              <li key={note}>{visible(note)}</li>
            ))}
            <li>
              Finished {clock(part.created_at)}; {part.group_size} attempts at each task.
            </li>
          </ul>
        ))}
      </details>
      <p class="dim">
        <a href={link(["groups"], { environment: name })}>Its groups</a>
      </p>
    </section>
  );
}

/** Mean rewards by kind of task. */
function Kinds({ lines, ends }: { lines: Line[]; ends: [number, number] }) {
  const labels = [...new Set(lines.flatMap(({ numbers }) => Object.keys(numbers.by)))];
  if (!labels.length) return null;
  return (
    <details>
      <summary>By kind of task</summary>
      <div class="scroll" tabIndex={0} role="group" aria-label="By kind of task">
        <table>
          <tbody>
            {labels.flatMap((label) =>
              lines.flatMap(({ key, name, numbers }) =>
                Object.entries(numbers.by[label] ?? {}).map(([value, mean]) => (
                  <tr key={`${label}/${value}/${key}`}>
                    <th scope="row">
                      {visible(label)} {visible(value)}
                    </th>
                    <td>{visible(name)}</td>
                    <td class="n">{intervalText(mean)}</td>
                    <td>
                      <Interval mean={mean} ends={ends} />
                    </td>
                    <td class="n">{number(mean.tasks)} tasks</td>
                  </tr>
                )),
              ),
            )}
          </tbody>
        </table>
      </div>
    </details>
  );
}

function meanOf(numbers: Numbers): Mean {
  return { value: numbers.reward_mean, low: numbers.low, high: numbers.high };
}

function estimateText(one: Estimate | undefined): string {
  return one === undefined ? "–" : intervalText(one);
}
