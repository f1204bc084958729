"""Agents that ask the proxy for too much, for test_proxy_connections.py."""

import asyncio
import contextlib
import os
import select
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from envserver import Environment, EnvironmentConfig, Score, Task

MB = 10**6


class Greedy(Environment):
    isolation = "sandboxed"

    class Config(EnvironmentConfig):
        doings: list[str] = ["chat"]
        hold_seconds: float = 3600

    def tasks(self, split):
        for number, do in enumerate(self.config.doings):
            yield Task(f"{do}-{number}", {"do": do}, {})

    def score(self, task, result):
        return Score(reward=1.0)

    async def rollout(self, task, run):
        reply = await run.chat([{"role": "user", "content": "hi"}])
        do = task.public["do"]
        return reply.content if do == "chat" else await asyncio.to_thread(getattr(self, do), run)

    def hold(self, run):
        """Holds 1,000 connections: silent ones, half a head, half a body."""
        starts = (b"", head(run, 10)[:20], head(run, 10) + b"{", head(run, 10))
        holding, hold = os.pipe()
        for number in range(4):
            if os.fork() == 0:
                held = []
                with contextlib.suppress(OSError):
                    for _ in range(250):
                        held.append(connected(run))
                        held[-1].sendall(starts[number])
                os.write(hold, b".")
                time.sleep(3600)
        for _ in starts:
            os.read(holding, 1)
        time.sleep(self.config.hold_seconds)
        return "held"

    def come_and_go(self, run):
        """Connects as fast as it can, from several processes, and never asks for anything."""
        for _ in range(3):
            if os.fork() == 0:
                while True:
                    with contextlib.suppress(OSError):
                        connected(run)
        time.sleep(3600)

    def bodies(self, run):
        """Sends 62 of 63 MB of each of 40 bodies, and waits until all but two are refused."""
        statuses, held = Counter(), []
        piece = b" " * MB
        for _ in range(40):
            client = connected(run)
            try:
                client.sendall(head(run, 63 * MB))
                for _ in range(62):
                    client.sendall(piece)
                held.append(client)
            except OSError:
                statuses["closed"] += 1
        while statuses.total() < 38:
            for client in select.select(held, [], [])[0]:
                held.remove(client)
                try:
                    statuses[status_of(client)] += 1
                except OSError:
                    statuses["closed"] += 1
        return {**statuses, "held": len(held)}

    def flood(self, run):
        """Asks 800 times over 40 connections at a time."""
        with ThreadPoolExecutor(40) as threads:
            told = list(threads.map(lambda _: self._ask(run, 20), range(40)))
        return dict(sum(told, Counter()))

    def _ask(self, run, times):
        statuses = Counter()
        for _ in range(times):
            with connected(run) as client:
                client.sendall(f"GET {path(run)}/models HTTP/1.1\r\nhost: a\r\n\r\n".encode())
                statuses[status_of(client)] += 1
        return statuses

    def slow(self, run):
        """A head and a body that never end: what comes back."""
        told = []
        for start in (head(run, 10)[:20], head(run, 10) + b"{"):
            with connected(run) as client:
                client.sendall(start)
                told.append(status_of(client))
        return told


class Trusted(Greedy):
    """Its workers share one socket of the proxy."""

    isolation = "dedicated"


def connected(run):
    url = urlsplit(run.base_url)
    return socket.create_connection((url.hostname, url.port), timeout=60)


def path(run):
    return urlsplit(run.base_url).path


def head(run, length):
    lines = (
        f"POST {path(run)}/chat/completions HTTP/1.1",
        *("host: a", "content-type: application/json", f"content-length: {length}", "", ""),
    )
    return "\r\n".join(lines).encode()


def status_of(client):
    """The status of the answer; what is sent back must be read before the end."""
    return client.recv(65536).partition(b" ")[2][:3].decode()
