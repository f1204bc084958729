"""Requests to sandboxes: of a worker to those of its attempt, `POST {url}/sandbox/...`, too.

    open                Open -> Opened
    {id}/exec           Exec -> ExecResult
    {id}/python         RunPython -> ExecResult
    {id}/read           Read -> bytes
    {id}/write          Write -> None
    {id}/total          None -> SandboxUsage
    {id}/close          None -> None
    {id}/start          Start -> None          the only program of this sandbox
    {id}/send           Send -> None
    {id}/receive        None -> Received       waits for output, or the program's end

Bodies are MessagePack both ways; what is not 200 is the proxy's JSON error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from envserver_records.errors import InputError
from envserver_records.sandboxes import ExecResult, SandboxLimits, SandboxSpec, SandboxUsage

from .wire import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from ..sandbox_interface import Sandbox

T = TypeVar("T")

MOST_READ_BYTES = 64 << 20


class Open(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`spec` None: the environment's own."""

    spec: SandboxSpec | None = None


class Opened(msgspec.Struct, frozen=True):
    """`id` is known to this attempt only; `isolation`: the backend."""

    id: str
    isolation: str


class Exec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    argv: list[str]
    stdin: bytes
    cwd: str
    env: dict[str, str] | None
    limits: SandboxLimits | None


class RunPython(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    code: str
    argv: list[str]
    stdin: bytes
    cwd: str
    limits: SandboxLimits | None


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    argv: list[str]
    env: dict[str, str]


class Send(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    data: bytes


class Received(msgspec.Struct, frozen=True):
    """Output of the program, or how it ended."""

    data: bytes = b""
    result: ExecResult | None = None


class Read(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    max_bytes: int


class Write(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    data: bytes


BODIES: dict[str, Any] = {
    "exec": Exec,
    "python": RunPython,
    "read": Read,
    "write": Write,
    "start": Start,
    "send": Send,
}


class AskedSandbox(ABC):
    """A `sandbox_interface.Sandbox` whose methods are requests, which a subclass sends."""

    @abstractmethod
    async def ask(self, action: str, body: Any, kind: type[T]) -> T: ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "/work",
        env: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        if not argv:
            raise InputError("An empty command cannot be run.")
        variables = None if env is None else dict(env)
        body = Exec(argv=list(argv), stdin=stdin, cwd=cwd, env=variables, limits=limits)
        return await self.ask("exec", body, ExecResult)

    async def run_python(
        self,
        code: str,
        *,
        argv: Sequence[str] = (),
        stdin: bytes = b"",
        cwd: str = "/work",
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        body = RunPython(code=code, argv=list(argv), stdin=stdin, cwd=cwd, limits=limits)
        return await self.ask("python", body, ExecResult)

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        return await self.ask("read", Read(path=path, max_bytes=max_bytes), bytes)

    async def write(self, path: str, data: bytes) -> None:
        await self.ask("write", Write(path=path, data=data), type(None))

    async def total(self) -> SandboxUsage:
        return await self.ask("total", None, SandboxUsage)


class AskedProgramSandbox(AskedSandbox):
    """One whose interactive program is talked to by requests, too."""

    result: ExecResult | None = None
    """How the program ended."""

    async def send(self, data: bytes) -> None:
        await self.ask("send", Send(data=data), type(None))

    async def receive(self) -> bytes:
        received = await self.ask("receive", None, Received)
        self.result = received.result
        return received.data


async def perform(sandbox: Sandbox, action: str, body: Any) -> Any:
    """Calls the method of `sandbox` that a request of `AskedSandbox` stands for."""
    match body:
        case Exec():
            return await sandbox.exec(
                body.argv, stdin=body.stdin, cwd=body.cwd, env=body.env, limits=body.limits
            )
        case RunPython():
            return await sandbox.run_python(
                body.code, argv=body.argv, stdin=body.stdin, cwd=body.cwd, limits=body.limits
            )
        case Read():
            return await sandbox.read(body.path, body.max_bytes)
        case Write():
            return await sandbox.write(body.path, body.data)
    if action == "total":
        return await sandbox.total()
    raise InputError(f"A sandbox cannot {action[:40]!r}.")


def checked(body: T, most: SandboxLimits) -> T:
    """`body`, which is not trusted, if it can be performed; its limits are cut down to `most`."""
    for name in getattr(body, "__struct_fields__", ()):
        match name, getattr(body, name):
            case "argv", argv:
                for text in argv:
                    plain(text)
            case "cwd" | "path", path:
                plain(path)
            case "env", dict() as env:
                variables(env)
            case "max_bytes", max_bytes if not 0 <= max_bytes <= MOST_READ_BYTES:
                raise InputError(f"max_bytes must be from 0 to {MOST_READ_BYTES}.")
            case "limits", SandboxLimits() as limits:
                body = msgspec.structs.replace(body, limits=cut_down(limits, most))  # type: ignore[type-var]
    return body


def packed(encode: Callable[..., bytes], *parts: Any) -> bytes:
    try:
        frame = encode(*parts)
    except UnicodeEncodeError as error:  # half a surrogate pair: a model can write that
        raise InputError(f"Text for a sandbox must be valid Unicode: {error}.") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise InputError(f"{len(frame)} bytes are too many for a sandbox at once.")
    return frame


def check_input(body: Any, limits: SandboxLimits) -> None:
    """Raises InputError if the request's program gets more input than the sandbox allows."""
    if isinstance(body, Exec | RunPython) and len(body.stdin) > limits.input_kb * 1024:
        raise InputError(f"The input has {len(body.stdin)} bytes, over {limits.input_kb} KB.")


def cut_down(wanted: SandboxLimits, most: SandboxLimits) -> SandboxLimits:
    """Each limit of `wanted`, reduced to at most that of `most`."""
    limits = {}
    for name, value in msgspec.structs.asdict(wanted).items():
        if not value > 0:  # also rejects NaN
            raise InputError(f"The limit {name} must be positive.", place=name)
        limits[name] = min(value, getattr(most, name))
    return SandboxLimits(**limits)


def plain(text: str) -> str:
    """`text` if the kernel accepts it as an argument or a path (no NUL)."""
    if "\0" in text:
        raise InputError("Arguments, paths and variables must not contain NUL.")
    return text


def variables(env: dict[str, str]) -> dict[str, str]:
    """`env` if it can be a program's environment."""
    for name, value in env.items():
        if not name or "=" in plain(name):
            raise InputError(f"A variable cannot be called {name[:40]!r}.")
        plain(value)
    return env
