"""kill -9 of the server and a full disk while environments post and a trainer fetches: nothing that
was accepted is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_records.errors import StoreFull
from support.api import (
    ENVIRONMENT,
    REGISTRATION,
    api_process,
    mark_of,
    running_api,
    wire_group,
)
from support.commands import free_port
from support.waiting import PATIENCE

pytestmark = pytest.mark.thorough

KILLS = 3
POSTS = 12
"""That are accepted in each life."""


def test_accepted_groups_are_delivered_once_and_nobody_registers_again(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    accepted: list[int] = []
    fetched: list[int] = []
    stop = threading.Event()

    def post_until_stopped() -> None:
        mark = 0
        with httpx.Client(timeout=60) as client:
            while not stop.is_set():
                mark += 1
                key = {"idempotency-key": f"group-{mark}"}
                body = wire_group(2, mark, env_id=0)
                answer = patiently(
                    lambda body=body, key=key: client.post(
                        f"{url}/scored_data", json=body, headers=key
                    ),
                    stop,
                )
                if answer is not None:
                    accepted.append(mark)

    poster = threading.Thread(target=post_until_stopped)
    for life in range(KILLS):
        with api_process(tmp_path / "store.db", port) as server:
            if life == 0:
                assert ask("POST", f"{url}/register", json=REGISTRATION).status_code == 200
                assert ask("GET", f"{url}/batch").json() == {"batch": None}
                assert ask("POST", f"{url}/register-env", json=ENVIRONMENT).json()["env_id"] == 0
                poster.start()
            until = len(accepted) + POSTS
            while len(accepted) < until:
                fetched += fetch(url)
                time.sleep(0.02)  # the poster's turn
            server.kill()
    stop.set()
    with api_process(tmp_path / "store.db", port):
        poster.join(PATIENCE)
        status = ask("GET", f"{url}/status-env", json={"env_id": 0})
        assert status.status_code == 200
        while batch := fetch(url):
            fetched += batch
        left = ask("GET", f"{url}/status").json()["queue_size"]
    assert len(fetched) == len(set(fetched))
    assert fetched == sorted(fetched)
    # The last one may wait for a second to make a batch.
    assert left <= 1
    assert set(accepted) - set(fetched) <= {max(accepted)}


def ask(method: str, url: str, **more: Any) -> httpx.Response:
    return httpx.request(method, url, timeout=PATIENCE, **more)


def fetch(url: str) -> list[int]:
    batch: list[dict[str, Any]] | None = ask("GET", f"{url}/batch").json()["batch"]
    return [mark_of(group) for group in batch or []]


def patiently(
    request: Callable[[], httpx.Response], stop: threading.Event
) -> httpx.Response | None:
    """The answer, asked for again while there is none; None when stopped meanwhile."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            answer = request()
            assert answer.status_code == 200, answer.text
            return answer
        except httpx.TransportError:
            if stop.is_set():
                return None
            time.sleep(0.02)
    raise AssertionError("The server did not come back.")


def test_a_batch_that_was_formed_and_not_fetched_survives(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with api_process(tmp_path / "store.db", port) as server:
        ask("POST", f"{url}/register", json=REGISTRATION)
        for mark in range(7):
            ask("POST", f"{url}/scored_data", json=wire_group(2, mark))
        leased = ask("GET", f"{url}/batch", headers={"x-envserver-ack": "lease"})
        assert [mark_of(group) for group in leased.json()["batch"]] == [0, 1]
        before = ask("GET", f"{url}/status").json()
        server.kill()
    with api_process(tmp_path / "store.db", port):
        assert ask("GET", f"{url}/status").json() == before
        assert before == {"current_step": 6, "queue_size": 1}
        assert fetch(url) == [2, 3]
        assert ask("GET", f"{url}/status").json() == before
        ack = {"lease_id": leased.headers["x-envserver-lease"]}
        assert ask("POST", f"{url}/ack", json=ack).json() == {"status": "success"}
        assert fetch(url) == [4, 5]
        assert fetch(url) == []
        assert mark_of(ask("GET", f"{url}/latest_example").json()) == 6


@pytest.mark.parametrize("broken", ["lease", "set_value", "ack"])
async def test_a_batch_that_could_not_be_recorded_is_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    async with running_api(tmp_path / "s.db") as api:
        await api.start()
        for mark in range(6):
            await api.post("/scored_data", wire_group(mark=mark))

        async def fail(*_: object, **__: object) -> None:
            raise StoreFull("No.")

        with monkeypatch.context() as full:
            full.setattr(api.store, broken, fail)
            for _ in range(2):
                assert (await api.http.get("/batch")).status_code == 507
        assert [await api.batch_marks() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
        assert await api.batch_marks() is None
        assert (await api.get("/status"))["current_step"] == 6
