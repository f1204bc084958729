"""The first tasks of an environment and their digests, by which two processes compare them.

Scorer processes import this module: it imports no part of scoring.
"""

from __future__ import annotations

import hashlib
import itertools

from envserver_records.packing import pack
from envserver_records.tasks import Task

from ..environment import Environment
from .stream import group_requests


def first_tasks(environment: Environment, count: int) -> list[Task]:
    """Returns the first `count` tasks of the environment's split.
    Raises ConfigError: there are none, or they cannot be read.
    """
    made = group_requests(environment, repeat=False)
    return [request.task for request in itertools.islice(made, count)]


def packed(task: Task) -> bytes | None:
    """Returns the task as it is sent; None if it cannot be."""
    try:
        return pack(task)
    except (TypeError, ValueError, RecursionError):  # reported by `checking.task_problems`
        return None


def digest_of(task: Task) -> str:
    """Returns a digest of all of a task; "" if it cannot be sent."""
    data = packed(task)
    return "" if data is None else hashlib.blake2b(data, digest_size=16).hexdigest()
