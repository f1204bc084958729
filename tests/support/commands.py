"""The `envserver` command as a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from . import warm_commands
from .extent import WHOLE
from .waiting import PATIENCE

ENVSERVER = Path(sys.executable).with_name("envserver")
Process = subprocess.Popen[bytes] | warm_commands.WarmProcess
SLOW_MACHINE = {"ENVSERVER_WORKERS__HEARTBEAT_SECONDS": "60"}
"""A busy machine's worker may be silent for a minute; the shipped limit is a second."""
_AT_START = dict(os.environ)
_OF_MANY_COMMANDS = tuple(
    f"tests/integration/{name}"
    for name in (
        *("seeds/", "test_process.py", "test_sft_generate.py", "test_first_use.py"),
        "test_environments_of_several_files.py",
    )
)
"""Tests of what commands do and print, which look at no processes."""
_started_as_users_do: set[tuple[str, object]] = set()


def envserver(*words: object, folder: Path, **popen: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; the output of both streams is text.

    Args:
        popen: for subprocess.run; the command is started by it then.
    """
    argv = [str(ENVSERVER), *map(str, words)]
    variables = environment_variables()
    if not popen and _can_be_warm(words, variables):
        return _run_warm(argv, folder, variables)
    return subprocess.run(
        argv,
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
        **popen,
    )


def typed(
    line: str, folder: Path, status: int = 0, **popen: Any
) -> subprocess.CompletedProcess[str]:
    """Runs `envserver LINE`, which must end with `status`."""
    ended = envserver(*shlex.split(line), folder=folder, **popen)
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended


def _can_be_warm(words: tuple[object, ...], variables: dict[str, str]) -> bool:
    """Whether the command may be started by fork: Python itself reads its variables but once.

    In whole runs the tests of `_OF_MANY_COMMANDS` start the first of each command of a file as
    users do, those of the rooms none, and all others every one.
    """
    if WHOLE and not _may_be_warm_in_a_whole_run(words):
        return False
    return all(
        variables.get(name) == _AT_START.get(name)
        for name in {*variables, *_AT_START}
        if name.startswith(("PYTHON", "LD_"))
    )


def _may_be_warm_in_a_whole_run(words: tuple[object, ...]) -> bool:
    file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    if file.startswith(_OF_MANY_COMMANDS):
        first = (file, words[0]) not in _started_as_users_do
        _started_as_users_do.add((file, words[0]))
        return not first
    return file.startswith("tests/unit/")


def _run_warm(
    argv: list[str], folder: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = warm_commands.start(argv, folder, variables, stdout, stderr)
        try:
            status = process.wait(4 * PATIENCE)
        except BaseException:
            process.kill()
            raise
        outputs = [stream.seek(0) or stream.read() for stream in (stdout, stderr)]
        return subprocess.CompletedProcess(argv, status, *outputs)


def environment_variables() -> dict[str, str]:
    """Those of this process without any that would change settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ENVSERVER_")}
    return kept | {"COLUMNS": "100"} | SLOW_MACHINE


class Running:
    """A command that runs until it is ended. Its output goes to `log`."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, seconds: float = PATIENCE) -> re.Match[str]:
        """The first match of `pattern` in its output."""
        return until(
            lambda: re.search(pattern, self.output()),
            lambda: f"{pattern!r} in {self.output()[-3000:]!r}",
            alive=self.process,
            seconds=seconds,
        )

    def until(self, condition: Callable[[], Any]) -> Any:
        """The first true value of `condition`, while it lives."""
        return until(condition, self.output, alive=self.process)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def end(self) -> int:
        """Waits for its end; the exit status."""
        return self.process.wait(4 * PATIENCE)


@contextlib.contextmanager
def running(
    *words: object,
    folder: Path,
    program: Path = ENVSERVER,
    finish_seconds: float = 60,
    **popen: Any,
) -> Iterator[Running]:
    """A command in the background; ended by its id on the way out.

    Args:
        finish_seconds: for what it has open then; after that it is told to stop at once.
    """
    log = folder / f"output-{time.monotonic_ns()}.log"
    argv, variables = [str(program), *map(str, words)], environment_variables()
    process: Process
    with log.open("wb") as out:
        if not popen and program == ENVSERVER and _can_be_warm(words, variables):
            process = warm_commands.start(argv, folder, variables, out, out)
        else:
            process = subprocess.Popen(
                argv, cwd=folder, env=variables, stdout=out, stderr=subprocess.STDOUT, **popen
            )
    try:
        yield Running(process, log)
    finally:
        if process.poll() is None:
            _end(process, finish_seconds)


@contextlib.contextmanager
def served(line: str, folder: Path, **how: Any) -> Iterator[tuple[Running, str]]:
    """`envserver serve LINE` on a port that it chooses, and its address, once trainers may come.

    Args:
        how: for `running`.
    """
    with running("serve", *shlex.split(line), "--port", 0, folder=folder, **how) as server:
        yield server, server.wait_for(r"Trainers: (http\S+)\s")[1]


def _end(process: Process, finish_seconds: float) -> None:
    for seconds in (finish_seconds, 60):
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
    process.kill()
    process.wait(PATIENCE)


def until(
    condition: Callable[[], Any],
    what: Callable[[], str],
    *,
    alive: Process | None = None,
    seconds: float = PATIENCE,
) -> Any:
    """The first true value of `condition`, asked every 20 ms; one that takes long, less often."""
    end = time.monotonic() + seconds
    while (asked := time.monotonic()) < end:
        if value := condition():
            return value
        if alive is not None and alive.poll() is not None and not condition():
            raise AssertionError(f"It ended with {alive.returncode} while waiting for {what()}.")
        time.sleep(max(0.02, 4 * (time.monotonic() - asked)))
    raise AssertionError(f"Not within {seconds} s: {what()}")


_PORTS = itertools.count(random.randrange(10_000, 30_000))
"""Below those that systems choose for connections and for port 0 (Linux: from 32,768 on)."""


def free_port() -> int:
    """A free port, which no other process is given before a server of the test listens."""
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("There is no free port.")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def group_ids(path: Path) -> list[str]:
    """Of the groups that `envserver process` wrote, in order."""
    return [line["envserver"]["group_id"] for line in read_jsonl(path)]


def rollouts_of(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `envserver process` wrote of each rollout, group by group."""
    return [rollout for group in groups for rollout in group["envserver"]["rollouts"]]
