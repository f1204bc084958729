"""User-supplied sandbox backends, such as a cloud provider's.

In: `package.module:Class` or `path/to/file.py:Class`, with the methods of
`sandbox_interface.Sandboxes`. Out: sandboxes as the server uses them. What holds: whatever such a
class raises is a SandboxError or an InputError, so a failing cloud is never the model's fault.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar

from envserver_records.errors import (
    ConfigError,
    InputError,
    SandboxError,
    SandboxLost,
    SandboxUnavailable,
)
from envserver_records.records import SandboxSpec

from ..folders import import_path
from ..sandbox_interface import Sandbox, Sandboxes
from .maker import StartedProgram

P = ParamSpec("P")
T = TypeVar("T")


def maker_class(reference: str) -> Callable[[], Sandboxes]:
    """Returns the class that `reference` names.
    Raises ConfigError: it cannot be imported, or has no `open`.
    """
    place, _, name = reference.rpartition(":")
    try:
        if place.endswith(".py"):
            (module,) = import_path(Path(place))
        else:
            module = importlib.import_module(place)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"--sandbox.maker {reference}: {error}") from error
    found: Callable[[], Sandboxes] | None = getattr(module, name, None)
    if not callable(getattr(found, "open", None)) or found is None:
        raise ConfigError(
            f"--sandbox.maker {reference}: there is no class {name!r} with a method `open`.",
            hint="docs/sandboxes.md shows one.",
        )
    return found


class ForeignSandboxes:
    """See `maker.SandboxMaker`. The class may have an async context of its own."""

    def __init__(self, reference: str) -> None:
        self._made = maker_class(reference)()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if isinstance(self._made, AbstractAsyncContextManager):
            await self._stack.enter_async_context(self._made)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[ForeignSandbox]:
        """See `sandbox_interface.Sandboxes.open`."""
        async with AsyncExitStack() as stack:
            try:
                sandbox = await stack.enter_async_context(self._made.open(spec))
            except (SandboxError, InputError):
                raise
            except Exception as error:
                raise SandboxUnavailable(f"No sandbox could be made: {_words(error)}") from error
            yield ForeignSandbox(sandbox)


def _typed(
    method: Callable[Concatenate[Sandbox, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[ForeignSandbox, P], Coroutine[Any, Any, T]]:
    """Derives a method of `ForeignSandbox` from the method of `Sandbox`."""

    @functools.wraps(method)
    async def call(self: ForeignSandbox, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            result: T = await getattr(self.sandbox, method.__name__)(*args, **kwargs)
            return result
        except (SandboxError, InputError):
            raise
        except Exception as error:
            raise SandboxLost(f"The sandbox was lost: {_words(error)}") from error

    return call


class ForeignSandbox:
    """A sandbox of such a class; see `maker.TalkingSandbox`. It has no interactive programs."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.id = sandbox.id
        self.isolation = sandbox.isolation
        self.sandbox = sandbox

    exec = _typed(Sandbox.exec)
    run_python = _typed(Sandbox.run_python)
    read = _typed(Sandbox.read)
    write = _typed(Sandbox.write)
    total = _typed(Sandbox.total)
    close = _typed(Sandbox.close)

    @asynccontextmanager
    async def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], wall_seconds: float
    ) -> AsyncIterator[StartedProgram]:
        """Refuses."""
        self._cannot("run interactive programs")
        yield

    async def lead_out(self, serve: Any) -> NoReturn:
        """Refuses."""
        self._cannot("reach hosts outside through the server (`egress`)")

    def _cannot(self, what: str) -> NoReturn:
        raise SandboxUnavailable(f"Sandboxes of {self.isolation} cannot {what}.")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
