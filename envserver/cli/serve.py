"""`envserver serve`: runs rollouts for trainers and keeps them until they are acknowledged.

`run-api` is the same server without an environment.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from ..running.hosting import Members
from ..running.mix import alone
from ..running.run_settings import ServeSettings
from ..running.serving import Served, serving
from ..running.tally import counted
from .command_line import read_run_spec
from .console import Console
from .live_overview import shown
from .logs import show_logs
from .loop import run_loop
from .mixing import read_mix
from .samples import sampled
from .signals import SignalStop
from .specs.serve import COMMAND


def run(argv: list[str]) -> int:
    members = read_mix(COMMAND, argv)
    if members is None:
        line = read_run_spec(COMMAND, argv)
        members = [alone(line)]
    settings = members[0].spec.settings
    show_logs(settings)
    return run_loop(serve(members, Console(stderr=True)))


async def serve(members: Members, console: Console) -> int:
    """Serves until stopped, or until the wanted number of groups is made and delivered.

    Returns:
        The exit status: 1 when groups had to be cancelled at the end, else 0.
    """
    if members[0].spec.settings.ray.address:
        return await serve_on_ray(members, console)
    async with serving(members) as server:
        console.say(f"Trainers: {server.url}")
        console.say(f"Model endpoint for other environments: {server.model_url}")
        async with AsyncExitStack() as views:
            await views.enter_async_context(shown(console, server.numbers, server.alarms))
            if _is_verbose(members):
                await views.enter_async_context(sampled(console, server.latest_group))
            served = await server.run(_stop(members, console), console.print)
    return _report(served, members, console)


async def serve_on_ray(members: Members, console: Console) -> int:
    """Serves like `serve`, with the environments on a Ray cluster."""
    from ..running.ray_serving import ray_serving

    async with ray_serving(members) as server:
        console.say(f"Trainers: {server.url}")
        console.say(f"Runners on the Ray cluster: {server.runner_url}")
        async with shown(console, server.numbers, server.alarms):
            served = await server.run(_stop(members, console), console.print)
    return _report(served, members, console)


def _stop(members: Members, console: Console) -> SignalStop:
    seconds = members[0].spec.settings.server.drain_seconds
    return SignalStop(console.print, drain_seconds=seconds)


def _report(served: Served, members: Members, console: Console) -> int:
    """Says how the server ended; returns the exit status."""
    if served.audit:
        console.say(served.audit)
    if served.judge:
        console.say(served.judge)
    # The address of a database may hold a password: it is not repeated.
    console.say(f"{counted(served.waiting, 'group')} kept in the store for trainers.")
    if served.ending != "overdue":
        return 0
    seconds = members[0].spec.settings.server.drain_seconds
    cancelled = counted(sum(served.cut_off.values()), "group")
    console.say(
        f"Stopped after {seconds:g} s: {cancelled} cancelled; the next start here makes them "
        "again.",
    )
    return 1


def _is_verbose(members: Members) -> bool:
    settings = members[0].spec.settings
    return isinstance(settings, ServeSettings) and settings.verbose
