"""`envserver models sim`: the simulated engine as an HTTP server, until Ctrl-C.

Answers are right as often as `--sim.solve_probability` says for the tasks of `--env`, whose
demonstrations the engine then knows; without an environment it babbles.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable, Iterator

from envserver_records.records import Message, Split, Task

from ..config import SimConfig
from ..environment import Environment
from ..models.sim import Solver, TextSolver, serve_sim
from ..rollouts.agents import demonstrated

_QUESTION_NAMES = ("question", "problem", "prompt", "instruction", "query", "text")


async def run_sim(
    config: SimConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 9001,
    solver: Solver | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serves the simulated engine until SIGINT or SIGTERM, then ends in an orderly way.

    Args:
        port: 0 takes a free one.
        announce: given one line with the base URL once the server listens.

    Raises:
        ConfigError: the address cannot be bound.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        await serve_sim(
            config,
            host,
            port,
            solver,
            listening=lambda url: announce(f"Simulated engine (no language model) at {url}"),
            stop=stop,
        )
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def demonstration_solver(
    environment: Environment, split: Split = "train", *, max_tasks: int = 10_000
) -> TextSolver:
    """A solver that knows the first tasks of an environment that have a demonstration."""
    tasks = itertools.islice(environment.tasks(split), max_tasks)
    return TextSolver(_demonstrations(environment, tasks))


def question_text(task: Task) -> str:
    """The text by which a prompt about `task` is known: its question, else its longest text."""
    texts = {name: value for name, value in task.public.items() if isinstance(value, str)}
    for name in _QUESTION_NAMES:
        if texts.get(name):
            return texts[name]
    return max(texts.values(), key=len, default="")


def _demonstrations(
    environment: Environment, tasks: Iterator[Task]
) -> Iterator[tuple[str, list[Message]]]:
    for task in tasks:
        roles = {name: role.trained for name, role in environment.agents().items()}
        for turns in list(demonstrated(environment, task, roles).values())[:1]:
            yield question_text(task), turns
