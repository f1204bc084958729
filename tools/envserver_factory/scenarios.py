"""The work of `envserver scenarios`: runs scenarios many times with several models; saves traces.

A run with a complete trace is not made again. A run that fails through no fault of the model is
retried; if it fails again, it has no trace, and the same command makes it later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from envserver_records.errors import ConfigError, ConflictError, RolloutError
from envserver_records.records import Json, Task

from envserver.environment import Environment
from envserver.export.unified import problems_of_trace, write_json
from envserver.models.catalogue import find_model, read_catalogue
from envserver.rollouts.group import RolloutContext, run_single
from envserver.running.context import rollout_context
from envserver.running.engines import SIMULATED
from envserver.settings.config import Settings

# Files are written atomically; a damaged one counts as missing, so that its run is made again.
# `index.json` beside them lists what exists.

INDEX = "index.json"


def whole_trace(path: Path) -> Json | None:
    """Returns the trace in `path`; None where there is none, or a damaged or wrong one."""
    try:
        document = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    if not isinstance(document, dict) or list(problems_of_trace(document)):
        return None
    return document


def write_index(folder: Path, facts: Json, paths: Iterable[Path]) -> None:
    runs = []
    for path in sorted(paths):
        trace = whole_trace(path)
        if trace is not None:
            name = path.relative_to(folder).as_posix()
            runs.append({"path": name, "run_id": trace["run_id"], **trace["outcome"]})
    write_json(folder / INDEX, {**facts, "runs": runs})


Embed = Callable[[Json], Json]


@dataclass(frozen=True)
class Runner:
    settings: Settings
    model: dict[str, str]

    @property
    def name(self) -> str:
        return self.model["name"]


@dataclass
class Runs:
    """Counts of runs. `failed`: messages of the runs that have no trace."""

    wanted: int = 0
    already: int = 0
    made: int = 0
    completed: int = 0
    rewards: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        return self.already + self.made + len(self.failed)


def runners(names: Sequence[str], settings: Settings) -> list[Runner]:
    """Returns the models in `names`: catalogue entries, folders, `NAME=URL`, URLs or "sim"."""
    found = [_runner(name, settings) for name in names]
    twice = {
        scenario.name
        for scenario in found
        if sum(scenario.name == other.name for other in found) > 1
    }
    if twice:
        raise ConfigError(
            f"Two models are called {min(twice)!r}.", hint="Name one of them: NAME=http://..."
        )
    return found


def _runner(said: str, settings: Settings) -> Runner:
    if said == SIMULATED:
        return _made(settings, {"model": SIMULATED}, SIMULATED, "", SIMULATED)
    name, _, url = said.partition("=")
    if said.startswith(("http://", "https://")):
        name, url = said.split("://", 1)[1].rstrip("/").removesuffix("/v1"), said
    if url:
        openai = type(settings.openai).model_validate(
            settings.openai.model_dump() | {"base_url": url}
        )
        return _made(settings, {"model": None, "openai": openai}, name, "", openai.server_type)
    place = settings.engine.models_file
    entry = find_model(said, read_catalogue(place), place)
    usual = type(settings.sampling)()
    said_of = settings.sampling.model_dump()
    sampling = {
        key: value for key, value in entry.sampling.items() if said_of[key] == getattr(usual, key)
    }
    update = {"model": said, "sampling": settings.sampling.model_copy(update=sampling)}
    return _made(
        settings, update, entry.name, entry.files, settings.engine.backend or entry.backend
    )


def _made(settings: Settings, update: Json, name: str, files: str, backend: str) -> Runner:
    model = {"name": name, "hf_id": files, "backend": backend}
    return Runner(settings.model_copy(update=update), model)


async def run_scenarios(
    models: Sequence[Runner],
    work: Work,
    scenario: Path,
    labels: Sequence[str],
    *,
    n: int,
    seed: int,
    overwrite: bool = False,
) -> Runs:
    """Makes `n` runs of each model and label and writes their traces."""
    todo: list[tuple[Runner, list[Task]]] = []
    wanted: list[Task] = []
    for runner in models:
        tasks = [
            work.environment.task_from_row(
                {
                    "scenario": str(scenario),
                    "label": label,
                    "number": number,
                    "seed": seed + number,
                    "model": runner.model,
                }
            )
            for label in labels
            for number in range(1, n + 1)
        ]
        wanted += tasks
        missing = [task for task in tasks if overwrite or not _is_there(task, work.out)]
        work.runs.wanted += len(tasks)
        work.runs.already += len(tasks) - len(missing)
        todo.append((runner, missing))
    work.on_progress(work.runs)
    for runner, tasks in todo:
        if tasks:
            await work.run_model(runner, tasks)
    facts = {
        "scenario": wanted[0].public["scenario"],
        "models": [runner.name for runner in models],
        "labels": list(labels),
        "n": n,
        "seed": seed,
    }
    paths = [work.out / task.public["path"] for task in wanted]
    await asyncio.to_thread(write_index, work.out, facts, paths)
    return work.runs


def _is_there(task: Task, out: Path) -> bool:
    path = out / task.public["path"]
    trace = whole_trace(path)
    if trace is None:
        return False
    for key in ("scenario", "label", "prompt", "seed"):
        if trace.get(key) != task.public[key]:
            raise ConflictError(
                f"{path} belongs to another run: its {key} differs.",
                hint="Name another folder by --out, or another --label; or --overwrite.",
            )
    return True


@dataclass
class Work:
    """Runs of one scenario, whose traces go below `out`."""

    environment: Environment
    reference: str
    out: Path
    embed: Embed | None = None
    on_progress: Callable[[Runs], None] = lambda runs: None
    runs: Runs = field(default_factory=Runs)

    async def run_model(self, runner: Runner, tasks: Sequence[Task]) -> None:
        context = rollout_context(runner.settings, self.environment, self.reference)
        async with context as parts, asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(self._run(parts, task))

    async def _run(self, parts: RolloutContext, task: Task) -> None:
        if (problem := await self._problem(parts, task)) is not None:
            self.runs.failed.append(f"{task.public['path']}: {problem}")
        self.on_progress(self.runs)

    async def _problem(self, parts: RolloutContext, task: Task) -> str | None:
        """Makes a run and writes its trace; returns why there is none."""
        try:  # a failure that is retried is not reported
            trajectory = await run_single(parts, task, scored=True, failed=lambda failure: None)
        except RolloutError as error:
            return str(error)
        output = trajectory.output if isinstance(trajectory.output, dict) else {}
        trace: Json = output.get("trace") or {}
        if not trace:
            return f"it was ended by {trajectory.limit or 'its agent'} without a trace"
        if not trace["model"]["hf_id"]:
            trace["model"]["hf_id"] = parts.model
        if self.embed is not None:
            trace = await asyncio.to_thread(self.embed, trace)
        await asyncio.to_thread(write_json, self.out / task.public["path"], trace)
        self.runs.made += 1
        self.runs.completed += bool(trace["outcome"]["completed"])
        if trajectory.score.reward is not None:
            self.runs.rewards.append(trajectory.score.reward)
        return None
