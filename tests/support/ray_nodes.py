"""A Ray cluster of several nodes on this machine, in the Python that has Ray."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.commands import environment_variables

from .waiting import PATIENCE

PROGRAM = Path(__file__).parent / "ray_peer" / "cluster.py"


class RayNodes:
    """A running cluster.

    Attributes:
        address: for `--ray`.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = str(self._answer()["address"])

    def add(self) -> int:
        """Adds a node with one CPU; returns its number."""
        return int(self._ask("add")["node"])

    def kill(self, number: int) -> None:
        """Sends SIGKILL to the processes of a node."""
        self._ask(f"kill {number}")

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Returns the next answer; what Ray itself prints is passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError(f"The cluster has ended with {self._process.wait()}.")


@contextlib.contextmanager
def ray_nodes(python: Path, folder: Path, *, nodes: int) -> Iterator[RayNodes]:
    """Starts a cluster whose head has no CPU and whose other nodes have one each."""
    with (
        (folder / "cluster.log").open("wb") as log,
        subprocess.Popen(
            [str(python), str(PROGRAM), str(nodes)],
            cwd=folder,
            env=environment_variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            yield RayNodes(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(PATIENCE)


def group_numbers(store: Path, prefix: str) -> list[int]:
    """Numbers in their stream of the groups that were ever stored."""
    with contextlib.closing(sqlite3.connect(store)) as opened:
        rows = opened.execute("SELECT group_id FROM groups WHERE group_id LIKE ?", (f"{prefix}%",))
        return sorted(int(row[0].removeprefix(prefix)[:6]) for row in rows)
