"""Classic environments: packages with `load_environment` (verifiers before 0.4). Tasks are the rows
of its data set; a rollout is its own, over our endpoint; its rubric gives the reward.

If the environment's class is one of verifiers' own, the worker gets only the prompt, and the scorer
calls the rubric. A class of the package's own may read the answer while it plays, and its rubric
what it left in the state: then the worker has the whole row, and scores.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import openai
import openai.resources
import verifiers.legacy as vf
from envserver_records.tasks import Json
from pydantic_core import to_jsonable_python
from verifiers.legacy.clients import OpenAIChatCompletionsClient
from verifiers.legacy.types import RolloutTiming, State, flatten_task_input
from verifiers.legacy.utils.env_utils import env_module_name, import_env_module
from verifiers.legacy.utils.message_utils import normalize_messages

from envserver import (
    AgentError,
    ConfigError,
    Environment,
    InputError,
    Message,
    NotFoundError,
    PublicTask,
    Result,
    Rollout,
    Score,
    Split,
    Task,
)

from .common import (
    TLS_CONTEXT,
    VerifiersConfig,
    VerifiersEnvironment,
    kept_signals,
    names_limit,
    numbers,
)

# A state holds the conversation twice: whole, and by turn with the engine's answers. Its JSON has
# it once: turns refer to it by the number of their messages. What the environment added stays if it
# is JSON-like.

_LEFT_OUT = frozenset(
    {"input", "task", "client", "prompt", "completion", "trajectory", "timing", "error"}
    | {"tool_defs", "usage", "usage_tracker", "reward", "metrics", "advantage"}
)
_TURN = {
    **dict.fromkeys(("response", "tokens", "reward", "advantage")),
    "is_truncated": False,
    "trajectory_id": "",
}


def as_json(state: Mapping[str, Any]) -> Json:
    turns = [
        {
            "messages": len(step["prompt"]),
            "completion": _messages(step["completion"]),
            "is_truncated": bool(step.get("is_truncated")),
            "reward": step.get("reward"),
            "extras": _json_like(step.get("extras") or {}),
        }
        for step in state.get("trajectory") or []
    ]
    others = {
        name: value
        for name, value in ((key, _json_like(state[key])) for key in state if key not in _LEFT_OUT)
        if value is not None
    }
    return {
        "completion": _messages(state.get("completion") or []),
        "trajectory": turns,
        "timing": to_jsonable_python(state["timing"], fallback=str),
        "others": others,
    }


def from_json(row: Mapping[str, Any], kept: Mapping[str, Any]) -> State:
    state = new_state(row)
    conversation = [*state["prompt"], *normalize_messages(kept["completion"])]
    state["completion"] = conversation[len(state["prompt"]) :]
    state["trajectory"] = [
        _TURN
        | {
            "prompt": conversation[: turn["messages"]],
            "completion": normalize_messages(turn["completion"]),
            "reward": turn["reward"],
            "is_truncated": turn["is_truncated"],
            "trajectory_id": kept["others"].get("trajectory_id", ""),
            "extras": turn["extras"],
        }
        for turn in kept["trajectory"]
    ]
    state["timing"] = RolloutTiming.model_validate(kept["timing"])
    for name, value in kept["others"].items():
        state[name] = value
    return state


def from_messages(row: Mapping[str, Any], messages: list[Json]) -> State:
    """Returns a state of a conversation that was cut off, or of a bare response."""
    state = new_state(row)
    completion = messages[len(state["prompt"]) :]
    if not completion and messages and messages[-1].get("role") == "assistant":
        completion = messages[-1:]
    state["completion"] = normalize_messages(completion)
    state["is_truncated"] = True
    turns = [each for each in state["completion"] if each.role == "assistant"]
    state["trajectory"] = [
        _TURN | {"prompt": [], "completion": [turn], "extras": {}} for turn in turns
    ]
    return state


def new_state(row: Mapping[str, Any]) -> State:
    """Returns the state before a rollout, as `Environment.init_state` makes it, without a model."""
    given = dict(row)
    if isinstance(given.get("info"), str):
        given["info"] = json.loads(given["info"])
    task = flatten_task_input(given)
    state = State(input=task)
    state["task"] = task
    state["prompt"] = normalize_messages(task.get("prompt") or [])
    state["completion"] = []
    state["trajectory"] = []
    state["timing"] = RolloutTiming()
    for name in ("reward", "metrics", "error", "final_env_response", "stop_condition"):
        state[name] = None
    state["is_completed"], state["is_truncated"] = True, False
    return state


def _messages(messages: Any) -> Any:
    plain = to_jsonable_python(list(messages), fallback=str)
    return [
        {key: value for key, value in each.items() if value is not None}
        if isinstance(each, dict)
        else each
        for each in plain
    ]


def _json_like(value: Any) -> Any:
    try:
        return json.loads(json.dumps(to_jsonable_python(value), allow_nan=False))
    except (TypeError, ValueError):
        return None


# verifiers counts a reward function that raises as 0. Here it is a failure of scoring: the rollout
# is scored again, then dropped.

_raised: ContextVar[list[Exception] | None] = ContextVar("raised", default=None)


def watch(rubric: Any) -> None:
    """Makes the reward functions of a rubric, and of those in it, remember what they raise."""
    for each in _rubrics(rubric):
        each.funcs = [_watched(function) for function in each.funcs]


async def score_one(rubric: Any, state: Any) -> Score:
    await _checked(rubric.score_rollout(state))
    return score_of(rubric, state)


async def score_all(rubric: Any, states: Sequence[Any]) -> list[Score]:
    await _checked(rubric.score_group(list(states)))
    return [score_of(rubric, state) for state in states]


def score_of(rubric: Any, state: Any) -> Score:
    """Returns the score in a state: functions with a weight as components, others as metrics."""
    found = numbers(state["metrics"])
    names, weights = rubric._get_reward_func_names(), rubric._get_reward_weights()
    paid = {name for name, weight in zip(names, weights, strict=False) if weight != 0}
    return Score(
        reward=float(state["reward"]),
        components={name: value for name, value in found.items() if name in paid},
        metrics={name: value for name, value in found.items() if name not in paid},
    )


async def _checked(scoring: Any) -> None:
    raised: list[Exception] = []
    token = _raised.set(raised)
    try:
        await scoring
    finally:
        _raised.reset(token)
    if raised:
        raise raised[0]


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            value = await value if inspect.isawaitable(value) else value
            return value if isinstance(value, list) else float(value)
        except Exception as error:
            if (raised := _raised.get()) is not None:
                raised.append(error)
            raise

    if not hasattr(watched, "__name__"):
        watched.__name__ = type(function).__name__
    return watched


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    for each in getattr(rubric, "rubrics", ()):
        yield from _rubrics(each)
    for environment in getattr(rubric, "env_map", {}).values():
        yield from _rubrics(environment.rubric)


_RUN_CODE = (
    *("verifiers.legacy.envs.python_env", "verifiers.legacy.envs.sandbox_env"),
    *("verifiers.legacy.envs.experimental", "verifiers.legacy.envs.integrations.browser_env"),
    "verifiers.legacy.envs.integrations.openenv_env",
)
"""Modules of classes that run programs of the model, or fetch what they run."""
_OF_THE_MODEL = (vf.InvalidModelResponseError, vf.ToolParseError)
"""Errors that are no failure: the model answered nothing, or called a tool with broken JSON."""
_ALLOWED = ("verifiers.legacy.envs.experimental.gym_env",)


class ClassicEnvironment(VerifiersEnvironment):
    """An environment of a package with `load_environment`."""

    class Config(VerifiersConfig):
        demonstration: str = "{answer}"
        """What the simulated engine plays: a text with columns of the row in braces, or the name of
        a column with the model's messages."""

    def __init__(self, config: Environment.Config | None = None) -> None:
        super().__init__(config)
        self._env = _loaded(self.package, self.config.args)
        self._is_apart = _is_of_verifiers(self._env)
        watch(self._env.rubric)
        self.weighted(self._env.rubric._get_reward_weights())
        if isinstance(self._env, vf.MultiTurnEnv):
            most = self.config.max_turns
            self._env.max_turns = (
                min(self._env.max_turns, most) if self._env.max_turns > 0 else most
            )

    def tasks(self, split: Split) -> Iterator[Task]:
        """Validation and test are its evaluation data set, or else its only one."""
        if split == "train" and self._env.build_dataset() is None:
            raise ConfigError(
                f"verifiers:{self.package} has no data set for training.",
                hint="--env.split validation",
            )
        rows = self._env.get_dataset() if split == "train" else self._env.get_eval_dataset()
        for number in range(len(rows)):
            yield self._task(str(number), rows[number])

    def _task(self, name: str, row: Json) -> Task:
        plain = to_jsonable_python(row, fallback=str)
        public = plain
        if self._is_apart and "task" not in plain:
            public = {key: plain[key] for key in ("prompt", "example_id") if key in plain}
            info = plain.get("info")
            if isinstance(info, dict) and "tool_defs" in info:
                public["info"] = {"tool_defs": info["tool_defs"]}
        return Task(name, public, plain)

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        state, score = await self.loop.run(self._played(dict(task.public), run))
        run.log_metric("truncated", float(bool(state["others"].get("is_truncated"))))
        if (stop := state["others"].get("stop_condition")) is not None:
            run.log_metric(f"stopped_by.{stop}", 1.0)
        return {"state": state, "score": score}

    async def _played(self, row: Json, run: Rollout) -> tuple[Json, Any]:
        """Returns the state after the rollout; and its score, if only this process can score."""
        client = openai.AsyncOpenAI(
            base_url=run.base_url,
            api_key=run.api_key,
            max_retries=1,
            timeout=run.seconds_left,
            http_client=openai.DefaultAsyncHttpxClient(verify=TLS_CONTEXT, trust_env=False),
        )
        env = self._env
        async with client:
            state = await env.rollout(
                row, OpenAIChatCompletionsClient(client), run.model, _sampling(env)
            )
        _check_end(state)
        score = None
        if state["trajectory"] and not (self._is_apart or env.requires_group_rollouts):
            found = await score_one(env.rubric, state)
            score = [found.reward, found.components, found.metrics]
        await env.rubric.cleanup(state)
        return as_json(state), score

    async def score(self, task: Task, result: Result) -> Score:
        if self._env.requires_group_rollouts:
            return Score(reward=self.config.limit_reward)  # `score_group` gives it
        output = result.output if isinstance(result.output, dict) else None
        if output is not None and output["score"] is not None:
            reward, components, metrics = output["score"]
            return Score(reward=reward, components=components, metrics=metrics)
        state = self._state(task, result) if self._is_apart else None
        if state is None or not state["trajectory"]:
            return self.unscored()
        return await score_one(self._env.rubric, state)

    async def score_group(
        self, task: Task, results: list[Result], scores: list[Score]
    ) -> list[Score]:
        if not self._env.requires_group_rollouts:
            return scores
        states = [self._state(task, result) for result in results]
        spoken = [state for state in states if state["trajectory"]]
        found = iter(await score_all(self._env.rubric, spoken) if spoken else ())
        return [next(found) if state["trajectory"] else self.unscored() for state in states]

    def _state(self, task: Task, result: Result) -> Any:
        if isinstance(result.output, dict) and "state" in result.output:
            return from_json(task.hidden, result.output["state"])
        return from_messages(task.hidden, result.messages)

    def demonstration(self, task: Task) -> list[Message] | None:
        """Returns what `--env.demonstration` says, if the row has its columns."""
        messages = task.hidden.get(self.config.demonstration)
        if isinstance(messages, list):
            return messages
        try:
            text = self.config.demonstration.format_map(task.hidden)
        except (KeyError, IndexError, AttributeError):
            return None
        return [{"role": "assistant", "content": text}] if text else None

    def task_from_row(self, row: Json) -> Task:
        """Returns the task of a row of its data set, or of a question and an answer."""
        if "prompt" not in row and "question" not in row:
            raise InputError("A row needs a prompt or a question.")
        message = {"role": "user", "content": row.get("question")}
        return self._task("row", {"prompt": [message], "example_id": 0, **row})


def classic_class(name: str) -> type[Environment]:
    try:
        module = import_env_module(name)
    except ModuleNotFoundError as error:
        if error.name != env_module_name(name):
            raise
        raise NotFoundError(
            f"There is no package {env_module_name(name)!r}.",
            hint=f"envserver env install verifiers:{name} --with PACKAGE",
        ) from error
    if not hasattr(module, "load_environment"):
        raise ConfigError(
            f"{name!r} has no load_environment: it is not an environment of verifiers before 0.4.",
            hint=f"envserver env install verifiers:{name} --with PACKAGE --with 'verifiers>=0.4'",
        )
    return type(
        "Classic", (ClassicEnvironment,), {"name": name, "package": name, "__doc__": module.__doc__}
    )


def _loaded(name: str, arguments: Json) -> Any:
    try:
        with kept_signals():
            environment = import_env_module(name).load_environment(**arguments)
    except Exception as error:
        raise ConfigError(
            f"verifiers:{name} cannot be loaded: {type(error).__name__}: {error}",
            hint="Its arguments are --env.args, as JSON.",
        ) from error
    for each in _environments(environment):
        for kind in type(each).__mro__:
            if kind.__module__.startswith(_RUN_CODE) and not kind.__module__.startswith(_ALLOWED):
                raise ConfigError(
                    f"verifiers:{name} is a {kind.__name__}, which runs programs of the model or "
                    "of a third party; they do not run in a sandbox of envserver.",
                    hint="Give the model a sandboxed tool of envserver, see tools/README.md.",
                )
    environment.env_id = environment.env_id or name
    return environment


def _environments(environment: Any) -> Iterator[Any]:
    yield environment
    for each in getattr(environment, "envs", ()):
        yield from _environments(each)


def _is_of_verifiers(environment: Any) -> bool:
    """Returns whether all code of the rollout is verifiers' own, which reads no answer."""
    if isinstance(environment, vf.EnvGroup):
        return False
    kinds = [kind for kind in type(environment).__mro__ if issubclass(kind, vf.Environment)]
    return all(kind.__module__.startswith("verifiers.") for kind in kinds)


def _sampling(environment: Any) -> Json:
    """Returns its sampling settings without empty ones and the number of answers, which is 1."""
    given = dict(environment.sampling_args or {})
    return {name: value for name, value in given.items() if name != "n" and value not in (None, {})}


def _check_end(state: Any) -> None:
    error = state.get("error")
    if error is None:
        return
    chain, cause = [], error
    while cause is not None:
        chain.append(
            f"{type(cause).__name__}: {getattr(cause, 'body', None) or ''} {cause}".strip()
        )
        cause = cause.__cause__
    text = " <- ".join(chain)
    if not (isinstance(error, _OF_THE_MODEL) or names_limit(text)):
        raise AgentError(f"The rollout of verifiers failed: {text}") from error
    state["is_truncated"] = True
