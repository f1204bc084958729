"""`envserver join URL`: runs an environment on this machine for a server elsewhere; the work is in
`running.joining`."""

from __future__ import annotations

from envserver_records.errors import ConfigError

from ..running.joining import identity, joined
from ..running.mix import RunSpec
from ..running.run_settings import JoinSettings
from ..running.tally import counted
from .command_line import read_run_spec
from .console import Console
from .logs import show_logs
from .loop import run_loop
from .signals import SignalStop
from .specs.join import COMMAND


def run(argv: list[str]) -> int:
    line = read_run_spec(COMMAND, argv)
    if not line.settings.url:
        raise ConfigError("Which server?", hint="envserver join http://host:8000 --env NAME")
    show_logs(line.settings)
    return run_loop(join(line, Console(stderr=True)))


async def join(line: RunSpec[JoinSettings], console: Console) -> int:
    """Makes groups for the server until it ends; returns 1 if open groups were cancelled, else 0.
    Raises EnvserverError: see `joined` and `Runner.run`.
    """
    settings = line.settings
    seconds = settings.server.drain_seconds
    if settings.dealt:
        return await join_dealt(line, console)
    with identity(line) as held:
        console.print(f"Joining {settings.url} as {held.name}", highlight=False)
        async with joined(line, held) as runner:
            console.print(
                f"Joined {settings.url} as {held.name}: {line.environment_class.name}, seed "
                f"{runner.seed}, {counted(runner.stored, 'group')} already on the server",
                highlight=False,
            )
            ending = await runner.run(
                SignalStop(console.print, drain_seconds=seconds), drain_seconds=seconds
            )
        console.print(f"{counted(runner.tally.groups, 'group')} delivered.", highlight=False)
    return 1 if ending == "overdue" else 0


async def join_dealt(line: RunSpec[JoinSettings], console: Console) -> int:
    """Makes the groups that a run deals, until it ends; returns as `join` does."""
    from ..running.joining import dealt_runner

    settings = line.settings
    seconds = settings.server.drain_seconds
    async with dealt_runner(line) as runner:
        console.print(f"Joined {settings.url} as {runner.name}", highlight=False)
        ending = await runner.run(
            SignalStop(console.print, drain_seconds=seconds), drain_seconds=seconds
        )
    console.print(f"{counted(runner.delivered, 'group')} delivered.", highlight=False)
    return 1 if ending == "overdue" else 0
