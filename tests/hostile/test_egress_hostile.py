"""A sandboxed agent, or a program in a sandbox, reaches the listed hosts through the server, and
nothing else.

The sandbox is a real one (`namespace`), before the real proxy and the simulated engine.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.api import requested
from support.cases import cases_of

from envserver import Settings
from envserver.proxy.egress_rules import EgressRules
from envserver.registry import find
from envserver.rollouts.group import make_group
from envserver.running.context import rollout_context

CASES = cases_of(__file__)


@pytest.mark.parametrize("kind_name", ["Outgoing", "Boxed"])
async def test_sandboxed_code_reaches_what_is_listed_only(
    tmp_path: Path, kind_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = partial(EgressRules, addresses_for_tests={"api.test": "127.0.0.1"})
    monkeypatch.setattr("envserver.running.context.EgressRules", rules)
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\noutside")
        writer.close()

    outside = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = outside.sockets[0].getsockname()[1]
    file = tmp_path / "outgoing.py"
    file.write_text(CASES["environment"].replace("PORT", str(port)))
    reference = f"{file}:{kind_name}"
    kind = find(reference)
    settings = Settings.model_validate(
        {"model": "sim", "sandbox": {"backend": "namespace"}, "sim": {"latency_seconds": 0}}
    )
    environment = kind(kind.Config(group_size=1))
    context: Any
    async with rollout_context(settings, environment, reference) as context:
        group = await make_group(context, requested(0, env="outgoing"))
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
    if kind_name == "Boxed":  # its socket leads to hosts outside only: not to the model's API
        assert (said[next(one for one in said if one.startswith("/r/"))], said["/v1/models"]) == (
            400,
            400,
        )
        assert said["proxy"] == "http://127.0.0.1" and not said["key"]
