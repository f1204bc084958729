"""Commands that serve until a signal: `serve`, `run-api`, `join` and `sandboxes serve`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING

from envserver_records.errors import ConfigError

from ..running.run_settings import (
    JoinSettings,
    RunApiSettings,
    SandboxesServeSettings,
    ServeSettings,
)
from ..settings.config import MixSettings
from ..telemetry.redaction import counted
from . import lean_imports
from .command_line import FREQUENT, CommandSpec, read_run_spec, say

if TYPE_CHECKING:
    from ..running.api_serving import ApiServer
    from ..running.hosting import Members
    from ..running.mix import RunSpec
    from ..running.ray_serving import RayServing
    from ..running.sandbox_serving import ServedSandboxes
    from ..running.serving import Served, Serving
    from .console import Console


SUMMARY = """Runs rollouts of one or more environments and serves the groups to trainers. The
first SIGTERM or Ctrl-C finishes the open groups and stops; the second stops at once; the third
kills."""

COMMAND: CommandSpec[MixSettings] = CommandSpec(
    "serve",
    SUMMARY,
    ServeSettings,
    usage="--env NAME[=WEIGHT,NAME=WEIGHT]",
    frequent=(
        *FREQUENT,
        "server.port",
        "server.host",
        "server.tokens_file",
        "store",
        "rollouts.max_staleness",
        "verbose",
        "ray.address",
        "ray.runners",
    ),
    aliases={"ray": "ray.address"},
    openai_variables="engine",
)


def run(argv: list[str]) -> int:
    with lean_imports():
        from ..running.serving import serving
        from .console import Console
        from .loop import run_loop, show_logs
        from .mixing import read_mix

    members = read_mix(COMMAND, argv)
    settings = members[0].spec.settings
    show_logs(settings)
    console = Console(stderr=True)
    if settings.ray.address:
        from ..running.ray_serving import ray_serving

        return run_loop(_serve(ray_serving(members), members, console))
    return run_loop(_serve(serving(members), members, console))


async def _serve(
    serving: AbstractAsyncContextManager[Serving | RayServing], members: Members, console: Console
) -> int:
    from .conversation import sampled
    from .loop import SignalStop
    from .overview import shown

    settings = members[0].spec.settings
    async with serving as server:
        console.say(f"Trainers: {server.url}\nPage in a browser: {server.url}/")
        console.say(
            f"Model endpoint for other environments: {server.model_url}"
            if server.model_url
            else f"Runners on the Ray cluster: {server.runner_url}"
        )
        async with AsyncExitStack() as views:
            await views.enter_async_context(shown(console, server.numbers, server.alarms))
            if isinstance(settings, ServeSettings) and settings.verbose:
                await views.enter_async_context(sampled(console, server.latest_group))
            stop = SignalStop(console.print, drain_seconds=settings.server.drain_seconds)
            served = await server.run(stop, console.print)
    return _report(served, members, console)


def _report(served: Served, members: Members, console: Console) -> int:
    """Returns 1 if groups were cancelled, else 0."""
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


_RUN_API = """Serves trainers, and remote environments, over the Atropos API and /v1.
Ctrl-C or SIGTERM stops it; accepted groups stay in the store."""

RUN_API = CommandSpec(
    "run-api",
    _RUN_API,
    RunApiSettings,
    frequent=(
        *("server.port", "server.host", "server.tokens_file", "store"),
        *("rollouts.max_staleness_at_delivery", "log_level", "log_format"),
    ),
)


def run_api(argv: list[str]) -> int:
    with lean_imports():
        from ..running.api_serving import api_server
        from .loop import run_loop, show_logs

    settings = RUN_API.read(argv)
    show_logs(settings)
    return run_loop(_until_signal(api_server(settings)))


async def _until_signal(serving: AbstractAsyncContextManager[ApiServer]) -> int:
    from .loop import stopped

    async with serving as server:
        stop = stopped()  # not before: a signal ends a start, which may wait for its database
        say(f"Trainers and environments: {server.url}\nPage in a browser: {server.url}/")
        await stop.wait()
    return 0


_SANDBOXES = """Makes sandboxes on this machine for remote servers and runners, which name it in
--sandbox.remote. Clients need a token of the role `environment` (--server.tokens_file); without a
tokens file only this machine can connect. The first SIGTERM or Ctrl-C waits until the open
sandboxes are closed, at most --server.drain_seconds; the second stops at once."""

SANDBOXES_SERVE = CommandSpec(
    "sandboxes serve",
    _SANDBOXES,
    SandboxesServeSettings,
    frequent=(
        *("server.host", "server.port", "server.tokens_file"),
        *("server.ssl_certfile", "server.ssl_keyfile", "server.drain_seconds"),
        *("sandbox.backend", "sandbox.concurrent", "sandbox.room", "sandbox.docker_image"),
        *("sandbox.max_memory_mb", "sandbox.max_disk_mb", "log_level", "log_format"),
    ),
)


def run_sandboxes_serve(argv: list[str]) -> int:
    with lean_imports():
        from ..running.sandbox_serving import sandbox_serving
        from .loop import run_loop, show_logs

    settings = SANDBOXES_SERVE.read(argv)
    show_logs(settings)
    return run_loop(_serve_sandboxes(sandbox_serving(settings), settings.server.drain_seconds))


async def _serve_sandboxes(
    serving: AbstractAsyncContextManager[ServedSandboxes], drain_seconds: float
) -> int:
    """Returns 1 if open sandboxes were ended, else 0."""
    import asyncio

    from .loop import on_signals

    stop, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if stop.is_set() else stop).set()

    async with serving as served:
        on_signals(on_signal)  # not before: a signal ends a start
        load = served.machine.load
        say(
            f"Sandboxes ({load.backend}, {load.sandboxes} at a time, {load.room} programs at a "
            f"time): --sandbox.remote {served.url}"
        )
        await stop.wait()
        left = served.machine.load.open
        if left:
            say(f"Waiting for {left} open sandboxes to be closed; a second signal stops at once.")
        draining = asyncio.create_task(served.drain())
        ending = asyncio.create_task(at_once.wait())
        await asyncio.wait(
            {draining, ending},
            timeout=drain_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        ending.cancel()
        draining.cancel()
        return 1 if served.machine.load.open else 0


_JOIN = """Runs rollouts of an environment on this machine for the server at URL (`serve` or
`run-api`). It reconnects automatically and continues with its own groups after a restart.
The first SIGTERM or Ctrl-C finishes and delivers the open groups, then stops; the second stops at
once; the third kills."""

JOIN = CommandSpec(
    "join",
    _JOIN,
    JoinSettings,
    usage="URL --env NAME",
    arguments=("url",),
    frequent=(*FREQUENT, "url", "token", "name", "weight"),
)


def run_join(argv: list[str]) -> int:
    with lean_imports():
        from .console import Console
        from .loop import run_loop, show_logs

    line = read_run_spec(JOIN, argv)
    if not line.settings.url:
        raise ConfigError("Which server?", hint="envserver join http://host:8000 --env NAME")
    show_logs(line.settings)
    return run_loop(_join(line, Console(stderr=True)))


async def _join(line: RunSpec[JoinSettings], console: Console) -> int:
    """Returns 1 if open groups were cancelled, else 0."""
    from ..running.joining import dealt_runner, identity, joined
    from .loop import SignalStop

    def say(text: str) -> None:
        console.print(text, highlight=False)

    settings = line.settings
    seconds = settings.server.drain_seconds
    stop = SignalStop(console.print, drain_seconds=seconds)
    if settings.dealt:
        async with dealt_runner(line) as dealt:
            say(f"Joined {settings.url} as {dealt.name}")
            ending = await dealt.run(stop, drain_seconds=seconds)
        delivered = dealt.delivered
    else:
        with identity(line) as held:
            say(f"Joining {settings.url} as {held.name}")
            async with joined(line, held) as runner:
                say(
                    f"Joined {settings.url} as {held.name}: {line.environment_class.name}, seed "
                    f"{runner.seed}, {counted(runner.stored, 'group')} already on the server"
                )
                ending = await runner.run(stop, drain_seconds=seconds)
        delivered = runner.tally.groups
    say(f"{counted(delivered, 'group')} delivered.")
    return 1 if ending == "overdue" else 0
