"""A real `envserver serve` with the simulated engine, for a browser to look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from envserver_clients.http import SyncEnvClient

from .commands import Running, free_port, running, until
from .waiting import PATIENCE

_SERVE = (
    "serve", "--env", "math=2,code,video", "--model", "sim", "--sim.latency_seconds", 0,
    "--env.group_size", 4, "--env.ensure_scores_are_not_same", "false", "--workers.processes", 1,
    "--store", "groups.db",
)  # fmt: skip


class PageHouse:
    """A server at `url` that is killed and started again as a test likes.

    Args:
        words: further arguments of `serve`.
    """

    def __init__(self, folder: Path, *words: object) -> None:
        self.folder = folder
        self._words = (*_SERVE, *words)
        self._port = free_port()
        self._stack = ExitStack()
        self.url = f"http://127.0.0.1:{self._port}/"
        self.server: Running

    def start(self) -> None:
        """Starts the server; returns when trainers may come."""
        command = running(*self._words, "--port", self._port, folder=self.folder)
        self.server = self._stack.enter_context(command)
        self.server.wait_for("Trainers: ")

    def kill(self) -> None:
        """kill -9."""
        self.server.kill()

    def get(self, path: str, **parameters: Any) -> Any:
        """JSON of a route: get("v1/status")."""
        answer = httpx.get(self.url + path, params=parameters, timeout=PATIENCE)
        answer.raise_for_status()
        return answer.json()

    def made(self) -> int:
        """Number of groups in the store."""
        return int(sum(self.get("v1/status")["groups"].values()))

    def wait_for(self, groups: int) -> None:
        """Waits until so many groups were made."""
        until(lambda: self.made() >= groups, self.server.output, alive=self.server.process)

    def consume(self, groups: int, run: str = "trainer") -> None:
        """Is a trainer that takes so many groups, and publishes a version."""
        with SyncEnvClient(self.url.rstrip("/"), run=run, batch_size=2) as client:
            taken = 0
            while taken < groups:
                batch = next(client.batches(idle_seconds=PATIENCE))
                taken += len(batch.groups)
                client.ack(batch)

    def close(self) -> None:
        self._stack.close()


@contextmanager
def page_house(folder: Path, *words: object, groups: int = 12) -> Iterator[PageHouse]:
    """A server that makes so many groups, then waits for trainers.

    Args:
        words: further arguments of `serve`.
        groups: how many it makes in all; 0: no bound (it makes more while a trainer takes them).
    """
    total = ("--total_groups", groups) if groups else ()
    house = PageHouse(folder, *total, *words)
    try:
        house.start()
        if groups:
            house.wait_for(groups)
        yield house
    finally:
        house.close()
