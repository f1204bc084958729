"""Our sandboxes as a sandbox environment of Inspect.

Tools and scorers of a task reach the sandbox by Inspect's own interface (`sandbox().exec`); what
they run is run by `run.open_sandbox()`, in the server's sandbox backend. Nothing runs on the host.
"""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, cast, overload

import msgspec
import yaml
from inspect_ai import Task
from inspect_ai._eval.loader import resolve_task_sandbox
from inspect_ai._eval.task.util import task_run_dir
from inspect_ai.dataset import Sample
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentSpec,
    sandboxenv,
)

from envserver import (
    BlockingSandbox,
    ConfigError,
    InputError,
    Rollout,
    SandboxLimits,
    SandboxSpec,
)

NAME = "envserver"
DEFAULT_IMAGE = "aisiuk/inspect-tool-support"
"""What Inspect takes where a task names no image."""
LIMITS = SandboxLimits(
    wall_seconds=300.0,
    cpu_seconds=300.0,
    memory_mb=2048,
    disk_mb=1024,
    inodes=65536,
    processes=128,
    open_files=1024,
    output_kb=1024,
    input_kb=16384,
)
_MAX_READ = 64 << 20
_TIMED_OUT = 124

current_run: ContextVar[tuple[Rollout, str]] = ContextVar("current_run")
"""The rollout whose sample runs, and the image of its sandbox ("": none)."""


def image_of(task: Task, sample: Sample, wanted: str, ignored: bool) -> str | None:
    """Returns the image of a sample's sandbox; "": any sandbox will do; None: it has none.

    Args:
        wanted: the image to use instead of that of the task.
        ignored: whether to do without a plain image.
    """
    kind = task.sandbox or sample.sandbox
    if kind is None:
        return None
    if kind.type == "local":
        return ""
    if kind.type != "docker":
        raise ConfigError(
            f"The task needs a sandbox of the kind {kind.type!r}, which envserver does not have.",
            hint="It has its own (for 'local') and containers (for 'docker').",
        )
    if wanted:
        return wanted
    spec = resolve_task_sandbox(task, None) or sample.sandbox
    own = sample.sandbox.config if sample.sandbox and sample.sandbox.type == "docker" else None
    image = _plain_image(own or spec.config, Path(task_run_dir(task)))
    return "" if ignored else image


def _plain_image(config: Any, folder: Path) -> str:
    if config is None:
        return DEFAULT_IMAGE
    if isinstance(config, str):
        path = folder / config
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(
                f"The task's sandbox is built from {path}; envserver builds no images.",
                hint=f"docker build -t NAME -f {path} {path.parent}, then --env.image NAME",
            )
        services: Mapping[str, Any] = yaml.safe_load(path.read_text())["services"]
    else:
        services = cast(Any, config).model_dump(exclude_none=True)["services"]
    (service, *more) = services.values()
    if more or "image" not in service or "build" in service:
        raise ConfigError(
            f"The task's sandbox has {len(services)} service(s) ({', '.join(services)}); envserver "
            "runs a single one that is made from an existing image.",
            hint="If one container is enough, build its image and name it: --env.image NAME",
        )
    return str(service["image"])


@sandboxenv(name=NAME)
class EnvserverSandbox(SandboxEnvironment):  # type: ignore[misc] # Inspect is not installed here
    """One sandbox of the rollout, for one sample.

    Inspect has an event loop of its own, so requests wait in threads.
    """

    def __init__(self, opening: AbstractContextManager[BlockingSandbox]) -> None:
        super().__init__()
        self.opening = opening
        self.sandbox = opening.__enter__()

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        run, image = current_run.get()
        opening = run.open_sandbox_blocking(SandboxSpec(limits=LIMITS, image=image))
        return {"default": await to_thread(cls, opening)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            opening = cast(EnvserverSandbox, environment).opening
            await to_thread(opening.__exit__, None, None, None)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Runs a program as the sandbox's only user; its stderr reports an end at a limit."""
        ended = await to_thread(
            self.sandbox.exec,
            cmd,
            stdin=input.encode() if isinstance(input, str) else input or b"",
            cwd=_absolute(cwd or ""),
            env=env,
            limits=None if timeout is None else _with_timeout(timeout),
        )
        if ended.killed_by == "wall" and timeout is not None:
            raise TimeoutError(f"The program ran longer than {timeout} seconds.")
        code = ended.exit if ended.exit is not None else 128 + (ended.signal or 0)
        stderr = ended.stderr.decode(errors="replace")
        if ended.killed_by:
            code = _TIMED_OUT if ended.killed_by == "wall" else 137
            stderr += f"\nKilled: the sandbox's limit of {ended.killed_by} was reached."
        return ExecResult(code == 0, code, ended.stdout.decode(errors="replace"), stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        try:
            await to_thread(self.sandbox.write, _absolute(file), data)
        except InputError as error:
            raise await self._as_os_error(file, error) from None

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        try:
            data = await to_thread(self.sandbox.read, _absolute(file), _MAX_READ)
        except InputError as error:
            raise await self._as_os_error(file, error) from None
        if len(data) == _MAX_READ:
            raise OutputLimitExceededError(limit_str=f"{_MAX_READ >> 20} MiB", truncated_output="")
        return data.decode() if text else data

    async def _as_os_error(self, file: str, error: InputError) -> OSError:
        """Returns the exception that Inspect documents for a file that cannot be used."""
        path = _absolute(file)
        for option, kind in (("-d", IsADirectoryError), ("-e", PermissionError)):
            if (await to_thread(self.sandbox.exec, ["test", option, path])).ok:
                return kind(f"{file}: {error.message}")
        return FileNotFoundError(f"{file}: {error.message}")


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"/work/{path}".rstrip("/")


def _with_timeout(seconds: float) -> SandboxLimits:
    wall = min(float(seconds), LIMITS.wall_seconds)
    return msgspec.structs.replace(LIMITS, wall_seconds=wall)


SPEC = SandboxEnvironmentSpec(NAME)
