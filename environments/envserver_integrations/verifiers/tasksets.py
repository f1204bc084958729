"""Task sets: packages of verifiers from 0.4 on, with one agent or several.

A rollout is an episode of its environment: the traces of its agents. Each role is an agent of ours
with its own rows, and the rewards of its traces are its reward. The harness is a chat loop in the
worker (`chat_harness`), the runtime a folder on this machine in which no program of the model runs.

Where nothing but rewards and metrics of the task is the package's own, the worker gets only what
verifiers shows a model, and the scorer calls them. Otherwise the worker has the whole task, and
verifiers scores there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.state import state_cls
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import Trace
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
from .taskset_agents import playing, roles_of
from .taskset_loading import (
    declared,
    loaded,
    refuse_own_harness,
    refuse_programs,
    scores_apart,
    trained_roles,
)


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
        """Starts what its episodes share."""
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

    async def rollout(self, task: PublicTask, run: Rollout) -> dict[str, Any]:
        traces = await self.loop.run(self._played(task.public, run))
        for trace in traces:
            prefix = "" if self._is_alone else f"{trace['agent']}."
            run.log_metric(f"{prefix}truncated", float(trace["truncated"]))
            if trace["stop"]:
                run.log_metric(f"{prefix}stopped_by.{trace['stop']}", 1.0)
        return {"traces": traces}

    async def _played(self, data: Mapping[str, Any], run: Rollout) -> list[dict[str, Any]]:
        """Returns the traces of an episode."""
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

    def _trace_as_json(self, trace: Any) -> dict[str, Any]:
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

    async def _scored(self, task: Task, record: dict[str, Any]) -> dict[str, Any]:
        """Returns what the task's rewards and metrics say of a trace."""
        kind = self._task_kind
        data = kind.data_type().model_validate(task.hidden)
        record = {**record, "rewards": {}, "metrics": {}, "ok": True}
        record["task"] = {**record["task"], "type": kind.__name__, "data": task.hidden}
        trace = Trace[WireTaskData, state_cls(kind), WireAgentConfig].model_validate(record)
        await kind(data, self._env.taskset.config.task).score(trace)
        return _scored(trace)

    def _score_of(self, traces: list[dict[str, Any]]) -> Score:
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
        """Returns the answer of the task, if it has one."""
        answer = task.hidden.get("answer")
        return [{"role": "assistant", "content": str(answer)}] if answer is not None else None


def _scored(trace: Any) -> dict[str, Any]:
    """Returns what was scored; no reward if a failure came before."""
    rewards = {name: one.score for name, one in trace.rewards.items() if one is not None}
    return {
        "reward": trace.reward if rewards or trace.ok else None,
        "rewards": rewards,
        "metrics": numbers(trace.metrics),
    }


def taskset_class(name: str) -> type[Environment]:
    """Returns the class of a package."""
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
