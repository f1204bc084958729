"""Task sets: packages of verifiers from 0.4 on, with one agent or several.

A rollout is an episode of its environment: the traces of its agents. Each role is an agent of ours.
The harness is a chat loop in the worker (`chat_harness`), the runtime a folder on this machine in
which no program of the model runs. Where nothing but rewards and metrics of the task is the
package's own, the worker gets only what verifiers shows a model, and the scorer calls them;
otherwise the worker has the whole task, and verifiers scores there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from inspect import getattr_static, signature
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import verifiers.v1 as vf
from envserver_records.tasks import Json
from verifiers.v1.agent import Agents
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig, WireAgentConfig
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.state import State, state_cls
from verifiers.v1.task import WireTaskData
from verifiers.v1.taskset import Taskset
from verifiers.v1.trace import Trace
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import default_harness_id, environment_class
from verifiers.v1.utils.loaders import taskset_class as find_taskset

from envserver import (
    AgentError,
    AgentRole,
    ConfigError,
    Environment,
    Message,
    NotFoundError,
    PublicTask,
    Result,
    Rollout,
    Score,
    Split,
    Task,
)

from . import chat_harness
from .common import UNSCORED, VerifiersConfig, VerifiersEnvironment, names_limit, numbers

# Rollouts run side by side in one process: `setup`, verifiers' hook before an episode, reads the
# rollout of the episode from a context variable.


class _Playing(NamedTuple):
    run: Rollout
    variable: str


_playing: ContextVar[_Playing | None] = ContextVar("playing", default=None)


@contextmanager
def playing(run: Rollout) -> Iterator[Any]:
    """Within the block, episodes belong to `run`; yields the context that verifiers gives them."""
    # verifiers reads a key from the variable that a client names. Programs of its runtime do not
    # inherit variables with API_KEY in their names.
    variable = f"ENVSERVER_API_KEY_{run.api_key[-12:]}"
    os.environ[variable] = run.api_key
    token = _playing.set(_Playing(run, variable))
    _reach_directly(run.base_url)
    try:
        client = _client(run.base_url, variable)
        yield ModelContext(model=run.model, client=client, sampling=SamplingConfig())
    finally:
        _playing.reset(token)
        os.environ.pop(variable, None)


def roles_of(config: Any) -> dict[str, Any]:
    return {
        name: field.default
        for name, field in config.model_fields.items()
        if isinstance(field.default, AgentConfig)
    }


def played_by_us(kind: Any) -> Any:
    """Returns its class with one change: each agent asks the endpoint of its rollout. `setup` is
    the hook that sees an episode's agents before they play."""

    async def setup(self: Any, agents: Any) -> None:
        await kind.setup(self, agents)
        playing = _playing.get()
        if playing is None:
            return
        for role in roles_of(type(self.config)):
            agent = getattr(agents, role)
            run = playing.run
            url = run.base_url if issubclass(kind, SingleAgentEnv) else run.base_url_of(role)
            client = _client(url, playing.variable)
            agent.ctx = replace(agent.ctx, model=run.model, client=client)
            # A server for each rollout: a shared one keeps a client for each that it ever served.
            agent.interception = None

    return type(kind.__name__, (kind,), {"setup": setup, "__module__": kind.__module__})


def _client(url: str, variable: str) -> Any:
    return EvalClientConfig(base_url=url, api_key_var=variable)


def _reach_directly(url: str) -> None:
    host = urlsplit(url).hostname or ""
    kept = [each for each in os.environ.get("NO_PROXY", "").split(",") if each]
    if host not in kept:
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join([*kept, host, "127.0.0.1"])


_HARMLESS = (None, "null", chat_harness.HARNESS_ID)
_WORKER_HOOKS = ("setup", "finalize", "stage_verifier", "runtime_env", "score", "toolsets")


def refuse_own_harness(name: str) -> None:
    own = default_harness_id(name)
    if own != "bash":  # verifiers' default, which ours replaces
        raise ConfigError(
            f"verifiers:{name} brings a harness of its own, which runs a program.",
            hint="envserver runs task sets with a chat loop; for programs as agents: --agent.",
        )


def loaded(name: str, own: Any) -> Any:
    try:
        kind = environment_class(name)
        config = concrete_type(kind, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
        seat = {
            "runtime": {"type": "subprocess"},
            "harness": {"id": chat_harness.HARNESS_ID},
            "model": None,
            "client": None,
            "retries": {"max_retries": 0, "rules": []},  # whole attempts: those are ours
        }
        settings = dict(own.options)
        for role, default in roles_of(config).items():
            _refuse_program(name, role, default)
            turns = min(own.max_turns, default.max_turns or own.max_turns)
            settings[role] = {**settings.get(role, {}), **seat, "max_turns": turns}
        settings["taskset"] = {**own.args, "id": name}
        settings |= {"interception": {"type": "server"}, "retries": seat["retries"]}
        return played_by_us(kind)(config.model_validate(settings))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"verifiers:{name} cannot be loaded: {type(error).__name__}: {error}",
            hint="Settings of its task set are --env.args, as JSON.",
        ) from error


def refuse_programs(name: str, kind: Any) -> None:
    """Refuses tasks whose rewards or hooks ask for the runtime, which runs programs."""
    own = [*declared(kind, "reward"), *declared(kind, "metric")]
    for hook in ("setup", "finalize"):
        if getattr_static(kind, hook) is not getattr_static(vf.Task, hook):
            own.append(getattr(kind, hook))
    for function in own:
        if _asks_for_runtime(function):
            raise ConfigError(
                f"verifiers:{name}: {function.__name__!r} of its tasks runs programs on this "
                "machine, without a sandbox.",
                hint="If they are not the model's: --env.allow_programs true",
            )


def _asks_for_runtime(function: Any) -> bool:
    return "runtime" in signature(function).parameters


def _refuse_program(name: str, role: str, default: Any) -> None:
    pinned = default.harness.id if default.harness is not None else None
    if pinned not in _HARMLESS:
        raise ConfigError(
            f"verifiers:{name}: its agent {role!r} is the harness {pinned!r}, which runs programs "
            "of the model on this machine.",
            hint="envserver runs task sets with a chat loop; for programs as agents: --agent.",
        )


def trained_roles(env: Any) -> dict[str, bool]:
    seats = Agents(env.config, lambda name, spec: SimpleNamespace(trainable=True, config=spec))
    with ThreadPoolExecutor(1) as thread:  # here an event loop may run
        try:
            thread.submit(lambda: asyncio.run(env.setup(seats))).result()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"Its setup failed: {error}") from error
    return {role: bool(getattr(seats, role).trainable) for role in roles_of(type(env.config))}


def scores_apart(env: Any) -> bool:
    """Returns whether a scorer process can score: no code of the rollout is the package's own."""
    kind = type(env.taskset).task_type()
    alone = type(env).__mro__[1] is SingleAgentEnv
    changed = any(
        getattr_static(kind, name) is not getattr_static(vf.Task, name) for name in _WORKER_HOOKS
    )
    config = env.taskset.config
    shares = getattr_static(type(env.taskset), "toolsets") is not Taskset.__dict__["toolsets"]
    hooks = [function for attr in ("metric", "reward") for function in declared(kind, attr)]
    needs_runtime = any(map(_asks_for_runtime, hooks))
    plugged = config.task.rewards or config.task.metrics or config.task.judges
    plays = any(declared(kind, attr) for attr in ("stop", "intercept")) or config.task.stops
    return bool(
        alone
        and state_cls(kind) is State
        and not (changed or shares or needs_runtime or plugged or plays)
    )


def declared(kind: Any, attr: str) -> list[Any]:
    held = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    return [value for value in held.values() if callable(value) and hasattr(value, attr)]


class TasksetEnvironment(VerifiersEnvironment):
    """A task set with its agents."""

    class Config(VerifiersConfig):
        options: dict[str, Any] = {}
        """Other settings of its environment, as JSON: '{"rounds": 3}'."""
        allow_programs: bool = False
        """Let its rewards and hooks run programs on this machine, without a sandbox."""

    def __init__(self, config: Environment.Config | None = None) -> None:
        super().__init__(config)
        chat_harness.register()
        self._env = loaded(self.package, self.config)
        if not self.config.allow_programs:
            refuse_programs(self.package, type(self._env.taskset).task_type())
        self._roles = list(roles_of(type(self._env.config)))
        self._is_apart = scores_apart(self._env)
        self._task_kind = type(self._env.taskset).task_type()
        if self._is_alone:
            self.weighted(hook._vf_weight for hook in declared(self._task_kind, "reward"))
        self._done: asyncio.Event | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def _is_alone(self) -> bool:
        return isinstance(self._env, SingleAgentEnv)

    def agents(self) -> Mapping[str, AgentRole]:
        """Returns the roles of its environment; one agent alone has no name."""
        if self._is_alone:
            return {}
        trained = trained_roles(self._env)
        return {role: AgentRole(trained=trained[role]) for role in self._roles}

    def tasks(self, split: Split) -> Iterator[Task]:
        """Yields its tasks, perhaps forever; the same in each split, since it has none."""
        for number, task in enumerate(self._env.taskset):
            if task.NEEDS_CONTAINER or task.data.image:
                raise ConfigError(
                    f"verifiers:{self.package}: its task {number} needs a container, and programs "
                    "of its agent do not run in a sandbox of envserver.",
                    hint="Use a task set that only chats or has tools of its own.",
                )
            whole = task.data.model_dump(mode="json")
            shown = {
                name: value for name, value in whole.items() if name in vf.TaskData.model_fields
            }
            yield Task(str(number), shown if self._is_apart else whole, whole)

    async def setup(self) -> None:
        await self.loop.run(self._start())

    async def close(self) -> None:
        if self._serving is not None:
            await self.loop.run(self._stop())

    async def _start(self) -> None:
        ready, self._done = asyncio.Event(), asyncio.Event()
        # One task enters and leaves the block.
        self._serving = asyncio.create_task(self._serve(ready, self._done))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.is_set():
            waiting.cancel()
            await self._serving

    async def _stop(self) -> None:
        if self._done is not None and self._serving is not None:
            self._done.set()
            await self._serving

    async def _serve(self, ready: asyncio.Event, done: asyncio.Event) -> None:
        async with self._env.serving():
            ready.set()
            await done.wait()

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        traces = await self.loop.run(self._played(task.public, run))
        for trace in traces:
            prefix = "" if self._is_alone else f"{trace['agent']}."
            run.log_metric(f"{prefix}truncated", float(trace["truncated"]))
            if trace["stop"]:
                run.log_metric(f"{prefix}stopped_by.{trace['stop']}", 1.0)
        return {"traces": traces}

    async def _played(self, data: Mapping[str, Any], run: Rollout) -> list[Json]:
        with playing(run) as context:
            slot = self._env.slots(self._task(data))[0]
            episode = await self._env.run_slot(slot, context)
        self._check_end(episode)
        return [self._trace_as_json(trace) for trace in episode.traces]

    def _task(self, data: Mapping[str, Any]) -> Any:
        config = self._env.taskset.config.task
        if self._is_apart:
            return vf.Task(vf.TaskData.model_validate(data), config)
        return self._task_kind(self._task_kind.data_type().model_validate(data), config)

    def _check_end(self, episode: Any) -> None:
        if self._env.complete(episode):
            return
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        texts = [f"{error.type}: {error.message}" for error in errors]
        if not any(map(names_limit, texts)):
            raise AgentError(
                f"The episode of verifiers failed: {'; '.join(texts) or 'it has no traces'}"
            )

    def _trace_as_json(self, trace: Any) -> Json:
        about = {
            "agent": trace.agent.name,
            "stop": trace.stop_condition,
            "truncated": bool(trace.is_truncated or not trace.ok),
        }
        if self._is_apart:
            return {**about, "record": trace.to_record()}
        return {**about, **_scored(trace)}

    async def score(self, task: Task, result: Result) -> Score:
        if not isinstance(result.output, dict):
            return self.unscored()
        traces = result.output["traces"]
        if self._is_apart:
            traces = [{**trace, **await self._scored(task, trace["record"])} for trace in traces]
        return self._score_of(traces)

    async def _scored(self, task: Task, record: Json) -> Json:
        kind = self._task_kind
        data = kind.data_type().model_validate(task.hidden)
        record = {**record, "rewards": {}, "metrics": {}, "ok": True}
        record["task"] = {**record["task"], "type": kind.__name__, "data": task.hidden}
        trace = Trace[WireTaskData, state_cls(kind), WireAgentConfig].model_validate(record)
        await kind(data, self._env.taskset.config.task).score(trace)
        return _scored(trace)

    def _score_of(self, traces: list[Json]) -> Score:
        """Each agent's reward is the mean of those of its traces; without one, as of a limit."""
        score = Score()
        for role in self._roles:
            own = [trace for trace in traces if trace["agent"] == role]
            paid = [trace["reward"] for trace in own if trace["reward"] is not None]
            score.rewards[role] = fmean(paid) if paid else self.config.limit_reward
            for part, name in ((score.components, "rewards"), (score.metrics, "metrics")):
                for each in {each for trace in own for each in trace[name]}:
                    held = [trace[name][each] for trace in own if each in trace[name]]
                    part[each if self._is_alone else f"{role}.{each}"] = fmean(held)
            if not paid:
                score.metrics[UNSCORED if self._is_alone else f"{role}.{UNSCORED}"] = 1.0
        if self._is_alone:
            (score.reward,) = score.rewards.values()
            score.rewards = {}
        return score

    def demonstration(self, task: Task) -> list[Message] | None:
        answer = task.hidden.get("answer")
        return [{"role": "assistant", "content": str(answer)}] if answer is not None else None


def _scored(trace: Any) -> Json:
    rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    return {
        "reward": trace.reward if rewards or trace.ok else None,
        "rewards": rewards,
        "metrics": numbers(trace.metrics),
    }


def taskset_class(name: str) -> type[Environment]:
    try:
        kind = find_taskset(name)
    except ModuleNotFoundError as error:
        raise NotFoundError(
            f"verifiers:{name}: {error}",
            hint=f"envserver env install verifiers:{name} --with PACKAGE",
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"verifiers:{name}: {error}",
            hint="A package with load_environment needs --with 'verifiers<0.4'.",
        ) from error
    refuse_own_harness(name)
    return type(
        "V1", (TasksetEnvironment,), {"name": name, "package": name, "__doc__": kind.__doc__}
    )
