"""Somebody else's environment: posts groups of random tokens over the Atropos wire, each until it
is told that it is accepted.
"""

from __future__ import annotations

import random
import threading
from typing import Self

import httpx
from envserver_records.servers import ServersClient
from envserver_records.urls import Urls
from support.waiting import PATIENCE

_PAUSE_SECONDS = 0.15


class Poster:
    """A thread; `start` it, `stop` it. The relay in between remembers what was accepted."""

    def __init__(self, urls: Urls) -> None:
        self._urls = urls
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poster", daemon=True)
        self._random = random.Random(17)
        self.repeated = 0
        self.posted = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after the group that is under way."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self) -> None:
        with ServersClient(self._urls, timeout=15) as http:
            while not self._stopping.wait(_PAUSE_SECONDS):
                self._post(http, f"poster-{self.posted}")
                self.posted += 1

    def _post(self, http: httpx.Client, key: str) -> None:
        """Until it is accepted; the same key makes sure that it is stored once."""
        draw = self._random
        lengths = [draw.randint(4, 300) for _ in range(2)]
        tokens = [[draw.randrange(50_000) for _ in range(length)] for length in lengths]
        masks = [[-100] * 2 + row[2:] for row in tokens]
        group = {"tokens": tokens, "masks": masks, "scores": [0.0, 1.0]}
        for _ in range(600):
            try:
                answer = http.post("/scored_data", json=group, headers={"Idempotency-Key": key})
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code == 200:
                return
            self.repeated += 1
            if self._stopping.wait(0.1) and self.repeated % 600 == 599:
                return
