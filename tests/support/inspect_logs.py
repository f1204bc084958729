"""envserver in the Python where inspect-ai is installed, and what Inspect itself makes of a log."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .commands import environment_variables
from .waiting import PATIENCE

_COMMAND = """
import json, sys
sys.path[:0], ours = json.loads(sys.argv.pop(1)), json.loads(sys.argv.pop(1))
sys.path += ours  # after Inspect's own packages
from envserver.cli import main
sys.exit(main())
"""
_READ = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log
for info in list_eval_logs(sys.argv[1]):
    log = read_eval_log(info, resolve_attachments=True)
    sys.stdout.write(log.model_dump_json() + chr(10))
"""
"""Reads the logs of a folder; one line of JSON each."""
_WRITE = """
import sys
from inspect_ai.log import EvalLog, write_eval_log
for path in sys.argv[1:]:
    write_eval_log(EvalLog.model_validate_json(sys.stdin.readline()), path)
"""
MESSAGES = """
import json, sys
sys.path[:0], ours = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sys.path += ours
from envserver.export.inspect_messages import inspect_message, message_of
from inspect_ai.model import ChatMessage
from pydantic import TypeAdapter
adapter = TypeAdapter(ChatMessage)
for line in sys.stdin:
    made = inspect_message(json.loads(line), "m-1")
    back = message_of(adapter.validate_json(adapter.dump_json(made)))
    sys.stdout.write(json.dumps(back) + chr(10))
    sys.stdout.flush()
"""
"""Turns each message into Inspect's JSON and back."""


def paths() -> tuple[str, str]:
    """Returns the folders of our code, and of what it needs, as JSON."""
    root = Path(__file__).parents[2]
    ours = [str(root), *(str(root / name) for name in ("clients", "tools", "environments"))]
    return json.dumps(ours), json.dumps([sysconfig.get_path("purelib")])


def envserver_beside_inspect(
    python: Path, *words: object, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Runs a command of envserver in Inspect's Python."""
    return _run(python, _COMMAND, *paths(), *words, folder=folder)


def read_by_inspect(python: Path, logs: Path) -> list[dict[str, Any]]:
    """Returns the logs of a folder, as Inspect's `read_eval_log` reads them."""
    done = _run(python, _READ, logs, folder=logs)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_by_inspect(python: Path, log: dict[str, Any], *places: Path) -> None:
    """Lets Inspect's `write_eval_log` write a log to each place."""
    lines = (json.dumps(log) + "\n") * len(places)
    done = _run(python, _WRITE, *places, folder=places[0].parent, input=lines)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def inspect_view(python: Path, logs: Path) -> Iterator[str]:
    """Runs Inspect View on a folder; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = python.with_name("inspect")
    words = ["view", "start", "--log-dir", str(logs), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [program, *words],
        cwd=logs,
        env=environment_variables() | {"HOME": str(logs.parent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        while not _answers(url):
            assert process.poll() is None, "inspect view ended"
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=PATIENCE).close()
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


def _run(
    python: Path, program: str, *words: object, folder: Path, input: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", program, *map(str, words)],
        cwd=folder,
        env=environment_variables(),
        capture_output=True,
        text=True,
        input=input,
        timeout=PATIENCE,
        check=False,
    )
