"""Loads a task set with our harness for each agent, and refuses what would run programs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from inspect import getattr_static, signature
from types import SimpleNamespace
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.agent import Agents
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.state import State, state_cls
from verifiers.v1.taskset import Taskset
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import default_harness_id, environment_class

from envserver import ConfigError

from . import chat_harness
from .taskset_agents import played_by_us, roles_of

_HARMLESS = (None, "null", chat_harness.HARNESS_ID)
_WORKER_HOOKS = ("setup", "finalize", "stage_verifier", "runtime_env", "score", "toolsets")


def refuse_own_harness(name: str) -> None:
    own = default_harness_id(name)
    if own != "bash":  # verifiers' default, in whose place ours plays
        raise ConfigError(
            f"verifiers:{name} brings a harness of its own, which runs a program.",
            hint="envserver plays task sets with a chat loop; agents that are programs: --agent.",
        )


def loaded(name: str, own: Any) -> Any:
    """Makes its environment, with our harness for each role."""
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
    """
    Raises:
        ConfigError: rewards or hooks of its tasks ask for the runtime, which runs programs.
    """
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
            hint="envserver plays task sets with a chat loop; agents that are programs: --agent.",
        )


def trained_roles(env: Any) -> dict[str, bool]:
    """Returns whether its `setup` leaves each role trainable."""
    seats = Agents(env.config, lambda name, spec: SimpleNamespace(trainable=True, config=spec))
    _in_a_thread(lambda: asyncio.run(env.setup(seats)))
    return {role: bool(getattr(seats, role).trainable) for role in roles_of(type(env.config))}


def _in_a_thread(function: Callable[[], None]) -> None:
    """Runs a function where no event loop runs yet; raises what it raises."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if raised:
        raise ConfigError(f"Its setup failed: {raised[0]}") from raised[0]


def scores_apart(env: Any) -> bool:
    """Returns whether a scorer process can score: nothing that plays is the package's own."""
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
