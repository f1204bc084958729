"""`envserver models sim`: runs the simulated engine; the work is in `running.simulated_server`."""

from __future__ import annotations

import asyncio
import sys

from ..environment import Environment
from ..models.sim import Solver
from ..registry import find
from ..running.mix import RunSpec
from ..running.sandboxes import sandboxes_of
from ..running.simulated_server import demonstration_solver, run_sim
from .logs import show_logs
from .loop import run_loop
from .specs.models_sim import COMMAND, ModelsSettings


def run(argv: list[str]) -> int:
    """Runs the command.

    Args:
        argv: the arguments after `models sim`.
    """
    settings = COMMAND.read(argv)
    show_logs(settings)
    solver = _solver(settings)
    run_loop(
        run_sim(
            settings.sim, host=settings.host, port=settings.port, solver=solver, announce=_announce
        )
    )
    return 0


def _solver(settings: ModelsSettings) -> Solver | None:
    """Returns the solver of the given environment, if any."""
    if settings.environment is None:
        return None
    line = RunSpec(settings, settings.environment, find(settings.environment))
    environment = line.make_environment()
    if environment.sandbox is None:
        return demonstration_solver(environment, settings.env.split)
    return run_loop(_with_sandboxes(environment, settings))


async def _with_sandboxes(environment: Environment, settings: ModelsSettings) -> Solver:
    """Returns the solver of an environment whose tasks need a sandbox to be read."""
    async with sandboxes_of(environment, settings.sandbox):
        return await asyncio.to_thread(demonstration_solver, environment, settings.env.split)


def _announce(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
