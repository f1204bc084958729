"""`make learn-proof`: does what is learned generalise? Five seeds, two tasks, control, baselines.

    python -m envserver_clients.proof --output out/proof [--seeds 5] [--steps 40] [--jobs 1]
    python -m envserver_clients.proof --output out/proof-half --start half   # hours, not minutes

Runs `envserver_clients.learn` for each task and seed, and once with rewards shuffled within each
group. All runs of a task start from one tiny model, which knows the task and was spoiled
(`spoiled`), or was taught it by half: from right answers only, ended early (`half`). The curve that
counts is the held-out one. Baselines on the same questions: the start, sampled and greedy; and the
start after supervised training on the expert's demonstrations of the questions that training asks.
Out: a folder per run, `proof.json`, `proof.png`, and `SHA256SUMS` of the metrics. A run that is
complete is not repeated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from envserver_records import EnvserverError
from envserver_records.files import replace_file, sha256_of
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt
from rich.console import Console

from envserver_clients.training.metrics import HELD_OUT, draw_held_out, read_lines
from envserver_clients.training.settings import run_command

Task = Literal["sort", "tool"]
TASKS: Final[tuple[Task, ...]] = ("sort", "tool")
_CONFIGS: Final = Path(__file__).parent / "training"


@dataclass(frozen=True)
class _Plan:
    """How a start is trained; `groups` questions per step, each asked eight times."""

    groups: int
    steps: int
    evaluate_every: int
    learning_rate: float


_PLANS: Final = {"spoiled": _Plan(16, 40, 10, 3e-4), "half": _Plan(32, 300, 50, 1e-4)}


class ProofSettings(BaseModel):
    """Trains a tiny model on two tasks with several seeds and shows what generalises."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    output: Path = Path("out/proof")
    """Folder for all runs; those that are complete are kept."""
    task: Task | None = None
    """Only this task. Default: both."""
    start: Literal["spoiled", "half"] = "spoiled"
    """The tiny model that all runs start from: taught the task, then spoiled by wrong answers; or
    taught it only by half. Each has an --output of its own."""
    seeds: PositiveInt = 5
    """Number of seeds, from 0."""
    steps: PositiveInt | None = None
    """Steps of each run. Default: 40 (spoiled), 300 (half)."""
    evaluate_every: PositiveInt | None = None
    """Steps between evaluations. Default: 10 (spoiled), 50 (half)."""
    minutes: PositiveFloat = 10.0
    """Time limit of each run."""
    held_out: PositiveInt = 200
    """Number of held-out questions."""
    jobs: PositiveInt = 1
    """Runs at the same time; each is busy on one to two cores."""


def prove(settings: ProofSettings, console: Console) -> None:
    """Makes all runs and baselines that are missing, and the results."""
    settings.output.mkdir(parents=True, exist_ok=True)
    tasks = TASKS if settings.task is None else (settings.task,)
    for task in tasks:
        model = _start(settings, task)
        if not (model / "config.json").exists():
            kind = model.name.removeprefix("tiny-")
            _run(["envserver", "models", "tiny", str(model), "--tasks", kind], model)
    jobs: list[Callable[[], None]] = []
    for seed in range(settings.seeds):
        jobs += [_trained(settings, task, f"seed-{seed}", seed) for task in tasks]
    jobs += [_trained(settings, task, "shuffled", 0, "--shuffle-rewards") for task in tasks]
    for task in tasks:
        model = _start(settings, task)
        jobs.append(_evaluated(settings, task, "start", model, temperature=1))
        jobs.append(_evaluated(settings, task, "start", model, temperature=0))
    _run_all(settings, jobs)
    jobs = [_tuned(settings, task) for task in tasks]
    for task in tasks:
        for seed in range(settings.seeds):
            last = settings.output / f"{task}-seed-{seed}" / "model"
            jobs.append(_evaluated(settings, task, f"seed-{seed}", last, temperature=0))
    _run_all(settings, jobs)
    summarize(settings.output, tasks, console)


def _run_all(settings: ProofSettings, jobs: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(settings.jobs) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def _start(settings: ProofSettings, task: Task) -> Path:
    return settings.output / ("tiny-many" if settings.start == "spoiled" else f"tiny-half_{task}")


def _steps(settings: ProofSettings) -> int:
    return settings.steps or _PLANS[settings.start].steps


def _trained(
    settings: ProofSettings, task: Task, name: str, seed: int, *more: str
) -> Callable[[], None]:
    folder, plan = settings.output / f"{task}-{name}", _PLANS[settings.start]
    words = ["envserver_clients.learn", "--task", task, "--seed", str(seed)]
    words += ["--output", str(folder), "--model", str(_start(settings, task))]
    words += ["--groups", str(plan.groups), "--steps", str(_steps(settings))]
    words += ["--learning-rate", str(plan.learning_rate)]
    words += ["--minutes", str(settings.minutes), "--until-reward", "2"]
    words += ["--evaluate-every", str(settings.evaluate_every or plan.evaluate_every)]
    words += ["--held-out", str(settings.held_out), *more]
    return lambda: None if (folder / HELD_OUT).exists() else _run(words, folder)


def _evaluated(
    settings: ProofSettings, task: Task, name: str, model: Path, *, temperature: int
) -> Callable[[], None]:
    folder = settings.output / f"{task}-{name}-temperature-{temperature}"
    words = ["envserver", "evaluate", "--config", str(_CONFIGS / f"serve_{task}.yaml")]
    words += ["--model", str(model), "--engine.backend", "local", "--no_baselines"]
    words += ["--env.split", "test", "--env.total_steps", str(settings.held_out)]
    words += ["--env.group_size", "1", "--sampling.temperature", str(temperature)]
    words += ["--out", str(folder), "--overwrite"]
    return lambda: None if (folder / "report.json").exists() else _run(words, folder)


def _tuned(settings: ProofSettings, task: Task) -> Callable[[], None]:
    """Trains the start on right answers to as many questions as a run asks, one each."""
    folder, plan = settings.output / f"{task}-sft", _PLANS[settings.start]
    groups, chats = folder.with_suffix(".jsonl"), settings.output / f"{task}-chats"
    made = ["envserver", "process", "--config", str(_CONFIGS / f"serve_{task}.yaml")]
    made += ["--model", "sim", "--sim.openers", "false", "--sim.latency_seconds", "0"]
    made += ["--sim.solve_probability", "1", "--env.group_size", "1", "--env.seed", "0"]
    made += [
        "--env.include_messages",
        "true",
        "--env.total_steps",
        str(_steps(settings) * plan.groups),
    ]
    made += ["--out", str(groups)]
    exported = ["envserver", "export", str(groups), "--to", "messages", "--out", str(chats)]
    tuned = ["envserver_clients.sft", "--model", str(_start(settings, task)), "--data", str(chats)]
    tuned += ["--output", str(folder), "--steps", str(_steps(settings))]
    tuned += ["--batch-size", str(plan.groups)]
    tuned += ["--accumulate", "1", "--learning-rate", "3e-4", "--threads", "1"]

    def job() -> None:
        if not (folder / "config.json").exists():
            for words in (made, exported, tuned):
                _run(words, folder)
        _evaluated(settings, task, "sft", folder, temperature=1)()
        _evaluated(settings, task, "sft", folder, temperature=0)()

    return job


def _run(words: Sequence[str], folder: Path) -> None:
    log = folder.parent / f"{folder.name}.log"
    with log.open("ab") as out:
        status = subprocess.run(
            [sys.executable, "-m", *words], stdout=out, stderr=out, check=False
        ).returncode
    if status:
        raise EnvserverError(f"{' '.join(words)} ended with status {status}.", hint=f"See {log}.")


def summarize(output: Path, tasks: Sequence[Task], console: Console) -> None:
    """Writes proof.json, proof.png and SHA256SUMS from the runs in `output`; prints the numbers."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for task in tasks:
        runs = sorted(path.parent for path in output.glob(f"{task}-*/{HELD_OUT}"))
        rows = found[task] = {}
        for run in runs:
            curve = {
                f"version {x['version']}": x["reward_mean"] for x in read_lines(run / HELD_OUT)
            }
            seconds = max(line["seconds"] for line in read_lines(run / "metrics.jsonl"))
            rows[run.name.removeprefix(f"{task}-")] = {**curve, "seconds": seconds}
        for path in sorted(output.glob(f"{task}-*-temperature-*/report.json")):
            name, _, kind = path.parent.name.removeprefix(f"{task}-").rpartition("-temperature-")
            kind = "greedy" if kind == "0" else "sampled"
            rows.setdefault(name, {})[kind] = mean_reward(path)
        for name, row in rows.items():
            console.print(task, name, row, highlight=False, soft_wrap=True)
    replace_file(output / "proof.json", json.dumps(found, indent=1) + "\n", sync=False)
    draw_held_out(output, tasks, output / "proof.png")
    files = sorted(output.glob(f"*/{HELD_OUT}")) + sorted(output.glob("*/metrics.jsonl"))
    text = "".join(f"{sha256_of(file)}  {file.relative_to(output)}\n" for file in files)
    replace_file(output / "SHA256SUMS", text, sync=False)


def mean_reward(report: Path) -> float:
    value: float = json.loads(report.read_text())["run"]["overall"]["mean_reward"]["value"]
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    program = "python -m envserver_clients.proof"
    return run_command(ProofSettings, prove, arguments, program=program)


if __name__ == "__main__":
    sys.exit(main())
