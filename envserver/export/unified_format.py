"""`--to unified`: `<domain>/<task_id>.json` below the folder, or JSONL.

Ids are unique and independent of the order of groups: a rollout of a group of several has its
task's id with eight digits that identify it; a single one has the task's own id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import orjson
from envserver_records.errors import InputError

from .formats import NamedFile, Options, Row
from .stored import StoredGroup, StoredRollout
from .traces import file_name
from .unified import problems_of, unified_of

_LONGEST_NAME = 200
_INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


class Unified:
    """Unified trajectories, each checked before it is written."""

    name = "unified"
    suffix = ".json"

    def __init__(self, options: Options) -> None:
        self._options = options
        self._given: set[bytes] = set()

    def rows(self, group: StoredGroup, kept: list[StoredRollout]) -> Iterator[Row]:
        for rollout in kept:
            document = unified_of(rollout, tokens=self._options.tokens)
            alone = len(group.rollouts) == 1 and group.asked <= 1
            document["task_id"] = self._unique(document["task_id"], rollout, alone)
            domain = document["domain"]
            if problems := problems_of(document, domains=[domain]):
                raise InputError(
                    f"{group.place}, rollout {rollout.rollout_id} is not a trajectory: "
                    f"{problems[0]}.",
                    place=group.place,
                )
            if self._options.jsonl:
                yield document
            else:
                path = f"{domain}/{document['task_id']}.json"
                yield NamedFile(path, orjson.dumps(document, option=_INDENTED))

    def _unique(self, task_id: str, rollout: StoredRollout, alone: bool) -> str:
        """Returns an id that is a valid file name and unique, ignoring case."""
        which = hashlib.blake2b(rollout.rollout_id.encode(), digest_size=4).hexdigest()
        plain = _short(file_name(task_id))
        if alone and self._take(plain):
            return plain
        name = wanted = f"{plain}-{which}"
        number = 1
        while not self._take(name):
            number += 1
            name = f"{wanted}-{number}"
        return name

    def _take(self, name: str) -> bool:
        digest = hashlib.blake2b(name.lower().encode(), digest_size=16).digest()
        if digest in self._given:
            return False
        self._given.add(digest)
        return True


def _short(name: str) -> str:
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    kept = name.encode()[: _LONGEST_NAME - 20].decode(errors="ignore")
    return f"{kept}-{digest}"
