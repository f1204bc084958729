"""Checks what clients ask of sandboxes: limits, paths, words and variables."""

from __future__ import annotations

import msgspec
from envserver_records.errors import InputError
from envserver_records.records import SandboxLimits


def cut_down(asked: SandboxLimits, most: SandboxLimits) -> SandboxLimits:
    """Returns `asked` with each limit reduced to at most that of `most`.
    Raises InputError: a limit is not a positive number.
    """
    limits = {}
    for name, value in msgspec.structs.asdict(asked).items():
        if not value > 0:  # also rejects NaN
            raise InputError(f"The limit {name} must be positive.", place=name)
        limits[name] = min(value, getattr(most, name))
    return SandboxLimits(**limits)


def plain(text: str) -> str:
    """Returns `text` if the kernel accepts it as an argument or a path (no NUL)."""
    if "\0" in text:
        raise InputError("Arguments, paths and variables must not contain NUL.")
    return text


def variables(env: dict[str, str]) -> dict[str, str]:
    """Returns `env` if it can be a program's environment.
    Raises InputError: a name or a value cannot.
    """
    for name, value in env.items():
        if not name or "=" in plain(name):
            raise InputError(f"A variable cannot be called {name[:40]!r}.")
        plain(value)
    return env
