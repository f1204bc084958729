"""Runs one sample of an Inspect task, in a worker: what the solver left, and the values of the
scorers if they run here. Inspect's own limits and errors become envserver's; every model call goes
through the rollout's endpoint."""

from __future__ import annotations

import copy
import tempfile
from asyncio import to_thread
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, cast, overload

import msgspec
import yaml
from inspect_ai import Task, eval_async, task_with
from inspect_ai._eval.loader import resolve_task_sandbox
from inspect_ai._eval.task.util import task_run_dir
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import EvalSample, read_eval_log_async
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.model._model import active_model, init_active_model
from inspect_ai.scorer import Score, Scorer, Target, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentSpec,
    sandboxenv,
)
from pydantic import BaseModel

from envserver import (
    AgentError,
    BlockingSandbox,
    ConfigError,
    InputError,
    LimitReached,
    Rollout,
    SandboxLimits,
    SandboxSpec,
)

from .scoring import State, named_scorers, state_of

# Tools and scorers of a task reach the sandbox by Inspect's own interface (`sandbox().exec`); what
# they run is run by `run.open_sandbox()`, in the server's sandbox backend. Nothing runs on the
# host.

NAME = "envserver"
DEFAULT_IMAGE = "aisiuk/inspect-tool-support"
"""What Inspect takes where a task names no image."""
LIMITS = SandboxLimits(
    wall_seconds=300.0,
    cpu_seconds=300.0,
    memory_mb=2048,
    disk_mb=1024,
    inodes=65536,
    processes=128,
    open_files=1024,
    output_kb=1024,
    input_kb=16384,
)
_MAX_READ = 64 << 20
_TIMED_OUT = 124

current_run: ContextVar[tuple[Rollout, str]] = ContextVar("current_run")
"""The rollout whose sample runs, and the image of its sandbox ("": none)."""


def image_of(task: Task, sample: Sample, wanted: str, ignored: bool) -> str | None:
    """Returns the image of a sample's sandbox; "": any sandbox will do; None: it has none."""
    kind = task.sandbox or sample.sandbox
    if kind is None:
        return None
    if kind.type == "local":
        return ""
    if kind.type != "docker":
        raise ConfigError(
            f"The task needs a sandbox of the kind {kind.type!r}, which envserver does not have.",
            hint="It has its own (for 'local') and containers (for 'docker').",
        )
    if wanted:
        return wanted
    spec = resolve_task_sandbox(task, None) or sample.sandbox
    own = sample.sandbox.config if sample.sandbox and sample.sandbox.type == "docker" else None
    image = _plain_image(own or spec.config, Path(task_run_dir(task)))
    return "" if ignored else image


def _plain_image(config: Any, folder: Path) -> str:
    if config is None:
        return DEFAULT_IMAGE
    if isinstance(config, str):
        path = folder / config
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(
                f"The task's sandbox is built from {path}; envserver builds no images.",
                hint=f"docker build -t NAME -f {path} {path.parent}, then --env.image NAME",
            )
        services: Mapping[str, Any] = yaml.safe_load(path.read_text())["services"]
    else:
        services = cast(Any, config).model_dump(exclude_none=True)["services"]
    (service, *more) = services.values()
    if more or "image" not in service or "build" in service:
        raise ConfigError(
            f"The task's sandbox has {len(services)} service(s) ({', '.join(services)}); envserver "
            "runs a single one that is made from an existing image.",
            hint="If one container is enough, build its image and name it: --env.image NAME",
        )
    return str(service["image"])


@sandboxenv(name=NAME)
class EnvserverSandbox(SandboxEnvironment):  # type: ignore[misc] # Inspect is not installed here
    """One sandbox of the rollout, for one sample. Inspect has an event loop of its own, so requests
    wait in threads."""

    def __init__(self, opening: AbstractContextManager[BlockingSandbox]) -> None:
        super().__init__()
        self.opening = opening
        self.sandbox = opening.__enter__()

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        run, image = current_run.get()
        opening = run.open_sandbox_blocking(SandboxSpec(limits=LIMITS, image=image))
        return {"default": await to_thread(cls, opening)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            opening = cast(EnvserverSandbox, environment).opening
            await to_thread(opening.__exit__, None, None, None)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Runs a program as the sandbox's only user; its stderr reports an end at a limit."""
        ended = await to_thread(
            self.sandbox.exec,
            cmd,
            stdin=input.encode() if isinstance(input, str) else input or b"",
            cwd=_absolute(cwd or ""),
            env=env,
            limits=None if timeout is None else _with_timeout(timeout),
        )
        if ended.killed_by == "wall" and timeout is not None:
            raise TimeoutError(f"The program ran longer than {timeout} seconds.")
        code = ended.exit if ended.exit is not None else 128 + (ended.signal or 0)
        stderr = ended.stderr.decode(errors="replace")
        if ended.killed_by:
            code = _TIMED_OUT if ended.killed_by == "wall" else 137
            stderr += f"\nKilled: the sandbox's limit of {ended.killed_by} was reached."
        return ExecResult(code == 0, code, ended.stdout.decode(errors="replace"), stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        try:
            await to_thread(self.sandbox.write, _absolute(file), data)
        except InputError as error:
            raise await self._as_os_error(file, error) from None

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        try:
            data = await to_thread(self.sandbox.read, _absolute(file), _MAX_READ)
        except InputError as error:
            raise await self._as_os_error(file, error) from None
        if len(data) == _MAX_READ:
            raise OutputLimitExceededError(limit_str=f"{_MAX_READ >> 20} MiB", truncated_output="")
        return data.decode() if text else data

    async def _as_os_error(self, file: str, error: InputError) -> OSError:
        """Returns the exception that Inspect documents for a file that cannot be used."""
        path = _absolute(file)
        for option, kind in (("-d", IsADirectoryError), ("-e", PermissionError)):
            if (await to_thread(self.sandbox.exec, ["test", option, path])).ok:
                return kind(f"{file}: {error.message}")
        return FileNotFoundError(f"{file}: {error.message}")


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"/work/{path}".rstrip("/")


def _with_timeout(seconds: float) -> SandboxLimits:
    wall = min(float(seconds), LIMITS.wall_seconds)
    return msgspec.structs.replace(LIMITS, wall_seconds=wall)


SPEC = SandboxEnvironmentSpec(NAME)


_LIMITS = {
    "message": "turns",
    "turn": "turns",
    "custom": "turns",
    "token": "tokens",
    "cost": "tokens",
    "time": "time",
    "working": "time",
    "context": "context",
    "operator": "refused",
}
"""envserver's names of Inspect's limits."""
_SOLVING_SHARE, _SCORED_HERE_SHARE = 0.95, 0.6
"""Share of the rollout's time for the solver. Inspect lets scorers take half as much again."""


class Outcome(BaseModel):
    """What `run_sample` returns: what the solver left, values of scorers that have run here, and
    the error that ended the sample."""

    state: State | None = None
    values: dict[str, Any] = {}
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)


async def run_sample(
    task: Task,
    sample: Sample,
    run: Rollout,
    *,
    scored: bool,
    image: str | None,
    roles: Sequence[str],
) -> Outcome:
    outcome = Outcome()
    grader = _model(run, "grader") if "grader" in roles else None
    change = {"sandbox": SPEC if image is not None else None}
    sample = sample.model_copy(update=change if scored else change | {"target": ""})
    withheld = _Withheld()
    setup = [*([] if scored else [_withholds(withheld)]), *_solvers(task.setup)]
    share = _SCORED_HERE_SHARE if scored else _SOLVING_SHARE
    left = max(1, int(run.seconds_left * share))
    before = sample.metadata or {}
    if scored:  # a solver that scores calls these, too; the last call is the one after it
        own = named_scorers(task).items()
        recorders = [_recorder(name, score, before, outcome, grader) for name, score in own]
    else:
        recorders = [_state_recorder(before, outcome, withheld)]
    arranged = task_with(
        copy.copy(task),
        dataset=MemoryDataset([sample], name=task.dataset.name),
        setup=setup,
        scorer=recorders,
        metrics=None,
        model=None,
        sandbox=None,
        time_limit=min(left, task.time_limit or left),
    )
    token = current_run.set((run, image or ""))
    try:
        with tempfile.TemporaryDirectory(prefix="inspect-") as folder:
            logs = await eval_async(
                arranged,
                model=_model(run),
                model_roles={role: _model(run, role) for role in roles},
                epochs=1,
                score_on_error=True,
                fail_on_error=False,
                log_dir=folder,
                log_realtime=False,
                log_images=False,
                ctl_server=False,
                score_display=False,
            )
            # logs[0].samples would be read by an event loop within this one.
            log = await read_eval_log_async(logs[0].location)
    finally:
        current_run.reset(token)
    if withheld.wanted:
        raise _needs_target()
    if not log.samples:
        error = log.error
        raise AgentError(f"Inspect ran no sample: {error.message if error else 'no error'}")
    return _judged(log.samples[0], outcome)


def _judged(done: EvalSample, outcome: Outcome) -> Outcome:
    """Returns the outcome of a sample that ended by itself; raises like `run_sample`."""
    if done.error is not None:
        outcome.error = done.error.message
        raise AgentError(
            f"The sample's error: {done.error.message}\n{done.error.traceback[-4000:]}",
            output=outcome.as_json(),
        )
    if done.limit is not None:
        name = _LIMITS.get(done.limit.type, "turns")
        raise LimitReached(
            f"The task's limit: {done.limit.reason or done.limit.type}",
            limit=name,
            output=outcome.as_json(),
        )
    return outcome


def _solvers(setup: Any) -> list[Solver]:
    if setup is None:
        return []
    return list(setup) if isinstance(setup, Sequence) else [setup]


def _model(run: Rollout, role: str | None = None) -> Model:
    return get_model(
        f"openai-api/envserver/{run.model}",
        base_url=run.base_url if role is None else run.base_url_of(role),
        api_key=run.api_key,
        memoize=False,
        config=GenerateConfig(max_retries=0),
        max_retries=0,
        strict_tools=False,
    )


@solver  # type: ignore[untyped-decorator, unused-ignore]
def _withholds(target: _Withheld) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state._target = target
        return state

    return solve


class _Withheld(Target):  # type: ignore[misc] # Inspect is not installed here
    """The target of a sample that another process scores; `wanted`: a solver read it."""

    def __init__(self) -> None:
        self.wanted = False

    @property
    def target(self) -> list[str]:
        self.wanted = True
        raise _needs_target()


def _needs_target() -> ConfigError:
    return ConfigError(
        "This task's solver reads the target of its sample, or scores by itself.",
        hint="--env.scoring rollout gives the target to the worker.",
    )


def _state_recorder(before: Mapping[str, Any], outcome: Outcome, withheld: _Withheld) -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        if not state.completed:  # the solver scores
            withheld.wanted = True
            raise _needs_target()
        outcome.state = state_of(state, before)
        return Score(value=0)

    return cast(Scorer, scorer(metrics=[], name="state")(lambda: score)())


def _recorder(
    name: str, own: Scorer, before: Mapping[str, Any], outcome: Outcome, grader: Model | None
) -> Scorer:
    async def score(state: TaskState, target: Target) -> Score | None:
        outcome.state = state_of(state, before)
        solving = active_model()
        init_active_model(grader or solving, GenerateConfig())
        try:
            made: Score | None = await own(state, target)
        finally:
            init_active_model(solving, GenerateConfig())
        outcome.values[name] = None if made is None else made.value
        return made

    return cast(Scorer, scorer(metrics=[], name=name)(lambda: score)())
