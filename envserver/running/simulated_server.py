"""`envserver models sim`: serves the simulated engine over HTTP, until Ctrl-C.
It knows the demonstrations of `--env` and is right with probability `--sim.solve_probability`;
without an environment its answers are arbitrary text.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable, Iterator

from envserver_local.simulated.policy import Solver, TextSolver
from envserver_local.simulated.server import serve_sim
from envserver_records.records import Message, Split, Task

from ..environment import Environment
from ..rollouts.agents import demonstrated
from ..settings.config import SimConfig

_QUESTION_NAMES = ("question", "problem", "prompt", "instruction", "query", "text")


async def run_sim(
    config: SimConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 9001,
    solver: Solver | None = None,
    announce: Callable[[str], None] = print,
) -> None:
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
    tasks = itertools.islice(environment.tasks(split), max_tasks)
    exact = environment.exact_demonstrations
    return TextSolver(_demonstrations(environment, tasks), exact=exact)


def question_text(task: Task) -> str:
    """Returns the text that identifies a prompt about `task`: its question, or its longest text."""
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
