"""A Ray cluster of several nodes on this machine, in the Python that has Ray."""

import contextlib
import json
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from envserver_clients.http import SyncEnvClient
from envserver_clients.records import Batch
from envserver_records.tasks import Json

from support.commands import Running, environment_variables

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

    def _ask(self, line: str) -> Json:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Json:
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


def served_at(server: Running) -> str:
    return server.wait_for(r"Trainers: (http://\S+)")[1]


class Trainer:
    """Takes and acknowledges batches."""

    def __init__(self, client: SyncEnvClient, batches: Iterator[Batch]) -> None:
        self._client, self._batches = client, batches
        self.got: list[str] = []

    def train(self, until: Callable[[], bool]) -> None:
        while not until():
            batch = next(self._batches)
            self.got.extend(group.group_id for group in batch.groups)
            self._client.ack(batch)


@contextlib.contextmanager
def trainer(url: str, batch_size: int) -> Iterator[Trainer]:
    with (
        SyncEnvClient(url, run="trainer", batch_size=batch_size) as client,
        contextlib.closing(client.batches()) as batches,
    ):
        yield Trainer(client, batches)


def assert_none_twice_and_no_hole(got: list[str], store: Path, streams: int) -> None:
    """No group was handed out twice, and the streams of math have all their groups."""
    assert len(set(got)) == len(got)
    for seed in range(streams):
        made = group_numbers(store, f"math-train-{seed}-")
        assert made == list(range(len(made)))


def group_numbers(store: Path, prefix: str) -> list[int]:
    """Numbers in their stream of the groups that were ever stored."""
    with contextlib.closing(sqlite3.connect(store)) as opened:
        rows = opened.execute("SELECT group_id FROM groups WHERE group_id LIKE ?", (f"{prefix}%",))
        return sorted(int(row[0].removeprefix(prefix)[:6]) for row in rows)
