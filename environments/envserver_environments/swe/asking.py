"""A repository and a problem that a person names, and that person's word on each command.

In: `--question` and `--repo` of `run`. Out: the task; and the service that asks on the terminal
before a command runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

from envserver import Caller, InputError, Task

from .repositories import folder_tree


def asked_task(question: str, repository: Path, *, confirm: bool) -> Task:
    """
    Raises:
        InputError: there is no such folder, it is too large, or there is no terminal to ask at.
    """
    if not question.strip():
        raise InputError("The question is empty.")
    folder = repository.expanduser().resolve()
    if not folder.is_dir():
        raise InputError(f"{str(repository)!r} is not a folder.", hint="Name one with --repo.")
    if confirm and not sys.stdin.isatty():
        raise InputError(
            "Each command is to be confirmed, and there is no terminal to ask on.",
            hint="--yolo runs them without asking (in the sandbox).",
        )
    folder_tree(str(folder))
    name = hashlib.sha256(f"{folder}\0{question}".encode()).hexdigest()[:12]
    public = {"problem": question, "folder": str(folder), "asked": True, "confirm": confirm}
    return Task(f"asked-{name}", public)


class Terminal:
    """Asks before commands; `a` allows all that follow."""

    def __init__(self) -> None:
        self._all = False
        self._asking = asyncio.Lock()

    async def confirm(self, arguments: dict[str, Any], caller: Caller) -> bool:
        """Asks whether this command may run; a service of the environment."""
        if not caller.task.public.get("confirm"):
            raise InputError("This task asks for no confirmation.")
        command = arguments.get("command") or arguments.get("cmd") or arguments
        async with self._asking:
            if self._all:
                return True
            shown = command if isinstance(command, str) else json.dumps(command)
            # Control characters could show another command than the one that runs.
            shown = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in shown)
            sys.stderr.write(f"\n{shown}\nRun it? [y]es, [n]o, [a]ll: ")
            sys.stderr.flush()
            answer = (await _line()).strip().lower()
            self._all = answer in ("a", "all")
            return self._all or answer in ("y", "yes")


def _line() -> asyncio.Future[str]:
    """Reads a line from the terminal, in a thread that is not joined at the end."""
    reading: concurrent.futures.Future[str] = concurrent.futures.Future()
    reading.set_running_or_notify_cancel()

    def work() -> None:
        try:
            reading.set_result(sys.stdin.readline())
        except BaseException as error:  # noqa: BLE001 - it goes to whoever awaits
            reading.set_exception(error)

    threading.Thread(target=work, name="terminal", daemon=True).start()
    return asyncio.wrap_future(reading)
