"""The sandbox machines in `envserver doctor --sandbox.remote`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..config import SandboxConfig
from ..sandbox.elsewhere import address_of
from ..sandbox.remote.machines import Machines
from ..sandbox.remote.messages import Load
from .console import Console


class MachineFact(msgspec.Struct, frozen=True):
    """A machine: its load, or why it does not answer."""

    url: str
    load: Load | None
    problem: str = ""


async def look_at_machines(config: SandboxConfig) -> list[MachineFact]:
    """Returns what the machines in the settings tell; none if there are none in them.
    Raises ConfigError: a file for their token or certificates cannot be read.
    """
    if not config.remote:
        return []
    async with Machines(address_of(config)) as machines:
        await machines.look()
        return [
            MachineFact(one.url, None if one.problem else one.load, one.problem)
            for one in machines.known
        ]


def show_machines(console: Console, machines: Sequence[MachineFact]) -> None:
    """Shows them, one line each."""
    for one in machines:
        load = one.load
        if load is None:
            text = f"does not work: {one.problem}"
        else:
            state = "about to stop" if load.draining else "works"
            text = (
                f"{state} ({load.backend}), {load.open} of {load.sandboxes} sandboxes open, "
                f"{load.waiting} waited for, {load.running} of {load.room} programs running, "
                f"{load.queued} queued"
            )
        console.say(f" sandbox machine {one.url}: {text}")
