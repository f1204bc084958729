"""Several servers on one PostgreSQL: one leads, all answer, and another takes over when it ends."""

import contextlib
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api import mark_of, wire_group
from support.commands import Running, envserver, free_port, running, until
from support.waiting import PATIENCE

pytestmark = pytest.mark.thorough

RUN = {"name": "trainer", "batch_size": 1}


class Server:
    """One of the servers, and a client of it."""

    def __init__(self, process: Running, url: str) -> None:
        self.process = process
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=60)

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response | None:
        """Its answer; None if it does not answer."""
        try:
            return self.client.request(method, path, **more)
        except httpx.TransportError:
            return None

    def role(self) -> str:
        """Returns what it does ("leader", "follower") once it is ready; "" before."""
        answer = self.ask("GET", "/readyz")
        return str(answer.json()["role"]) if answer is not None and answer.is_success else ""

    def until_ready(self, role: str = "") -> None:
        until(lambda: self.role() == role if role else self.role(), lambda: self.said())

    def said(self) -> str:
        return self.process.output()[-3000:]

    def metric(self, name: str) -> float:
        text = self.client.get("/metrics").text
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found, text[-2000:]
        return float(found[1])


@contextlib.contextmanager
def servers(
    count: int, store: str, folder: Path, *words: object, command: str = "run-api"
) -> Iterator[list[Server]]:
    """Servers that share `store`, started at once; all are ready."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            port = free_port()
            shared = (command, "--store", store, "--store.shared", "--port", port)
            process = stack.enter_context(running(*shared, *words, folder=folder))
            made.append(Server(process, f"http://127.0.0.1:{port}"))
            stack.callback(made[-1].client.close)
        for server in made:
            server.until_ready()
        yield made


def parted(made: list[Server]) -> tuple[Server, list[Server]]:
    """The leader and the others."""
    leaders = [one for one in made if one.role() == "leader"]
    assert len(leaders) == 1
    return leaders[0], [one for one in made if one not in leaders]


def asked(server: Server, path: str, **more: Any) -> Any:
    """The answer to a POST, which is repeated until it is accepted: that is safe."""
    wanted = 204 if path.endswith("/ack") else 200

    def accepted() -> httpx.Response | None:
        answer = server.ask("POST", path, **more)
        return answer if answer is not None and answer.status_code == wanted else None

    return until(accepted, server.said)


def post(server: Server, mark: int) -> None:
    key = {"idempotency-key": f"group-{mark}"}
    asked(server, "/scored_data", json=wire_group(2, mark), headers=key)


def lease(server: Server, **more: Any) -> Any:
    """The next group and its lease."""
    return asked(server, "/v1/runs/trainer/lease", json={"max_groups": 1, **more}).json()


def ack(server: Server, leased: Any) -> None:
    asked(server, "/v1/runs/trainer/ack", json={"lease_id": leased["lease_id"]})


def test_all_answer_and_another_leads_after_the_leader(postgres_url: str, tmp_path: Path) -> None:
    with servers(3, postgres_url, tmp_path) as made:
        leader, (one, other) = parted(made)
        assert [one.metric("envserver_leader"), leader.metric("envserver_leader")] == [0, 1]

        def known() -> bool:
            status = other.client.get("/v1/status").json()["server"]["leader"]
            return status["url"] == leader.url and set(status["followers"]) == {one.url, other.url}

        until(known, leader.said)
        assert leader.metric("envserver_followers") == 2

        assert one.client.post("/v1/runs", json=RUN).status_code == 201
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(lease, one, wait_seconds=20)  # before there is a group
            post(other, 1)
            first = waiting.result()
        post(one, 2)
        second = lease(other)
        ack(leader, first)
        with one.client.stream("GET", "/v1/events") as live:
            lines = live.iter_lines()
            assert next(lines)
            leader.process.kill()
            # A stream that breaks off must not look like one that ended.
            with pytest.raises(httpx.TransportError):
                list(lines)

        ack(other, second)
        post(one, 2)  # it is known
        post(one, 3)
        assert mark_of(lease(other)["groups"][0]["group"]) == 3
        counts = one.client.get("/v1/status").json()["groups"]
        assert (counts["acked"], counts["leased"], counts["queued"]) == (2, 1, 0)
        # One that is told to stop hands over; followers need not have done anything before.
        leader, (last,) = parted([one, other])
        leader.process.send(signal.SIGTERM)
        last.until_ready("leader")
        assert leader.process.end() == 0
        post(last, 4)
        last.process.send(signal.SIGTERM)
        assert last.process.end() == 0


def test_a_stopped_leader_loses_the_store_and_then_ends(postgres_url: str, tmp_path: Path) -> None:
    with servers(2, postgres_url, tmp_path) as made:
        leader, (other,) = parted(made)
        assert other.client.post("/v1/runs", json=RUN).status_code == 201
        post(other, 1)
        leased = lease(other)
        leader.process.send(signal.SIGSTOP)
        with ThreadPoolExecutor() as threads:
            # These wait in its sockets, and are read when it wakes.
            late = threads.submit(
                leader.ask, "POST", "/scored_data", json=wire_group(2, 9), timeout=PATIENCE
            )
            stale = {"lease_id": leased["lease_id"]}
            acked = threads.submit(
                leader.ask, "POST", "/v1/runs/trainer/nack", json=stale, timeout=PATIENCE
            )
            post(other, 2)
            ack(other, leased)
            leader.process.send(signal.SIGCONT)
            for answer in (late.result(), acked.result()):
                assert answer is None or answer.status_code >= 500
        assert leader.process.end() == 1
        assert "StoreLost" in leader.said() or "Another process" in leader.said()
        assert other.role() == "leader"
        assert mark_of(lease(other)["groups"][0]["group"]) == 2
        counts = other.client.get("/v1/status").json()["groups"]
        assert (counts["acked"], counts["leased"], counts["queued"]) == (1, 1, 0)


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    refused = envserver("run-api", "--store.shared", folder=tmp_path)
    assert refused.returncode == 2
    assert "cannot share an SQLite store" in refused.stderr
    (tmp_path / "tokens").write_text("")
    refused = envserver(
        *("run-api", "--store.shared", "--store", "postgresql://user@localhost/name"),
        *("--server.host", "0.0.0.0", "--server.tokens_file", "tokens"),
        folder=tmp_path,
    )
    assert refused.returncode == 2
    assert "--server.advertise" in refused.stderr
