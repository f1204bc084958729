"""`--env gymnasium:FrozenLake-v1`, `--env gymnasium:my_world.py:MyText-v0`: text environments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envserver import Backend, Environment, Integration

VERSION = "1.4.0"


def _environment(world: str) -> type[Environment]:
    from .env import gymnasium_environment

    return gymnasium_environment(world)


def _backend(world: str, packages: Sequence[str]) -> Backend:
    return Backend(name="gymnasium", requirements=[f"gymnasium=={VERSION}"])


def _absolute(world: str) -> str:
    """Returns `MODULE:ID` with the path of a module that is a file in this folder."""
    module, colon, name = world.rpartition(":")
    if not module:
        return world
    path = Path(module if module.endswith(".py") else module.replace(".", "/") + ".py")
    return f"{path.resolve()}{colon}{name}" if path.exists() else world


INTEGRATION = Integration(
    what="text environments of Gymnasium",
    environment=_environment,
    module="gymnasium",
    backend=_backend,
    absolute=_absolute,
)
