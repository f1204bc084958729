"""A sandboxed agent reaches the listed hosts through the server, and nothing else.

The worker is a real one (`namespace`), before the real proxy and the simulated engine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from envserver_records.records import Task

from envserver import Settings
from envserver.registry import find
from envserver.rollouts.group import make_group
from envserver.rollouts.stream import GroupRequest
from envserver.running.context import rollout_context

ENVIRONMENT = '''
import socket, urllib.error, urllib.request
from envserver import Environment, Score, Task


class Outgoing(Environment):
    """Its agent fetches what the task says."""

    isolation = "sandboxed"
    egress = ["api.test:PORT", "127.0.0.2:PORT"]

    def tasks(self, split):
        yield Task("t", {})

    def demonstration(self, task):
        return [{"role": "assistant", "content": "done"}]

    def rollout(self, task, run):
        run.chat_blocking([{"role": "user", "content": "?"}])
        said = {}
        for name in ("api.test", "127.0.0.2", "127.0.0.1", "169.254.169.254", "other.test"):
            try:
                with urllib.request.urlopen(f"http://{name}:PORT/x?secret=1", timeout=20) as answer:
                    said[name] = answer.read().decode()
            except urllib.error.HTTPError as error:
                said[name] = error.code
            except OSError as error:
                said[name] = type(error).__name__
        try:
            socket.create_connection(("127.0.0.1", PORT), timeout=5)
            said["direct"] = "connected"
        except OSError as error:
            said["direct"] = type(error).__name__
        return said

    def score(self, task, result):
        return Score(reward=1.0)
'''


async def test_a_sandboxed_agent_reaches_what_is_listed_and_nothing_else(tmp_path: Path) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\noutside")
        writer.close()

    outside = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = outside.sockets[0].getsockname()[1]
    file = tmp_path / "outgoing.py"
    file.write_text(ENVIRONMENT.replace("PORT", str(port)))
    reference = f"{file}:Outgoing"
    kind = find(reference)
    settings = Settings.model_validate(
        {"model": "sim", "sandbox": {"backend": "namespace"}, "sim": {"latency_seconds": 0}}
    )
    environment = kind(kind.Config(group_size=1))
    context: Any
    async with rollout_context(
        settings, environment, reference, egress_addresses_for_tests={"api.test": "127.0.0.1"}
    ) as context:
        request = GroupRequest(
            group_id="g-0", index=0, env="outgoing", split="train", seed=0, task=Task("t", {})
        )
        group = await make_group(context, request)
    outside.close()
    (trajectory,) = group.trajectories
    said = trajectory.output
    assert said["api.test"] == "outside"
    assert (said["127.0.0.2"], said["other.test"], said["169.254.169.254"]) == (403, 403, 403)
    # Clients take 127.0.0.1 directly (NO_PROXY): nothing else listens in the worker's network.
    assert said["127.0.0.1"] == "URLError" and said["direct"] == "ConnectionRefusedError"
    assert len(asked) == 1 and b"Host: api.test" in asked[0]
    assert [(one.host, one.path, one.status, one.end) for one in trajectory.egress] == [
        ("api.test", "/x", 200, ""),
        ("127.0.0.2", "/x", 0, "address"),
        ("169.254.169.254", "/x", 0, "host"),
        ("other.test", "/x", 0, "host"),
    ]
    assert "egress_refused" in trajectory.flags


pytestmark = pytest.mark.thorough
