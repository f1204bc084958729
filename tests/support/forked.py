"""Runs a function in a forked child, for what cannot be undone in a process."""

import json
import os
from collections.abc import Callable
from typing import Any


def forked(function: Callable[[], Any]) -> Any:
    """What it returns (as JSON), or how the child ended: a negative signal number."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(ours)
            with os.fdopen(theirs, "w") as pipe:
                json.dump(function(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        return status
    assert status == 0, "the child failed: its traceback is above"
    return json.loads(text)


def words(function: Callable[[], Any]) -> str:
    """How a call fails, "" where it does not."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


def failures(attempts: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """How each of them fails, in `words`."""
    return {name: words(attempt) for name, attempt in attempts.items()}
