"""Live events over real HTTP: what a page is told, resume, restarts, slow readers, shutdown."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from envserver_records.errors import StoreError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.types import Message
from support.api import Api, api_process, native_group, put_native, running_api
from support.commands import free_port
from support.extent import examples
from support.waiting import PATIENCE, settled, until
from support.watching import Page, events_in, watching

from envserver.alarms_config import AlarmsConfig
from envserver.api.access.tokens import create_token
from envserver.api.alarms import AlarmWatch
from envserver.api.live import Feed, Live, events
from envserver.api.live.events import EventsAnswer
from envserver.api.live.feed import FellBehind
from envserver.api.live.follower import MOST_ALONE, Follower
from envserver.api.metrics import Metrics
from envserver.running.api_serving import api_serving
from envserver.running.run_settings import RunApiSettings
from envserver.store.facts import GroupFacts
from envserver.store.listing import ListedGroup
from envserver.store.rows import GroupRow
from envserver.telemetry.alarms import Finding


async def put(api: Api, *names: str) -> None:
    for name in names:
        await put_native(api.store, native_group(name))


async def test_a_page_is_told_what_happens(where: str) -> None:
    async with running_api(where) as api:
        await put(api, "before")
        page = Page()
        async with watching(api.http, page) as connection:
            assert page.named("hello")[0]["policy_version"] == -1
            await put(api, "a")
            row = await connection.until("group")
            listed = (await api.get("/v1/groups?order=newest"))["groups"]
            assert row == listed[0]
            assert (row["group_id"], row["rewards"]) == ("a", [0.0, 1.0])
            await api.http.post("/v1/runs", json={"name": "run"})
            assert await connection.until("run") == {"name": "run", "state": "open"}
            await api.post("/v1/policy-version", {"version": 3})
            assert (await connection.until("policy"))["version"] == 3
            await api.http.post("/v1/runs/run/close")
            assert await connection.until("run") == {"name": "run", "state": "closed"}
        assert page.groups == [2]


async def test_numbers_and_alarms_are_told_as_they_are_recorded(tmp_path: Path) -> None:
    live, alarms = Live(), AlarmWatch(AlarmsConfig())
    async with running_api(tmp_path / "s.db", metrics=Metrics(), live=live, alarms=alarms) as api:
        page = Page()
        async with watching(api.http, page) as connection:
            live.sampled(5.0, {})
            sample = await connection.until("sample", time=5.0)
            assert sample["series"] == []
            for at in (1.0, 2.0):
                alarms.book.update(
                    at, [Finding(name="disk_full", severity="critical", text="Full.")]
                )
            alarm = await connection.until("alarm")
            assert (alarm["text"], alarm["active"]) == ("Full.", True)
        await until(lambda: "process_cpu_seconds_total" in names_told(live))


def names_told(live: Live) -> set[str]:
    """The names of the series of all samples."""
    text = live.feed.after(0)[0].decode()
    samples = [one.data["series"] for one in events_in(text) if one.name == "sample"]
    return {name for series in samples for name, _, _ in series}


async def test_who_was_away_is_told_what_was_missed_and_nothing_twice(tmp_path: Path) -> None:
    async with running_api(tmp_path / "s.db") as api:
        page = Page()
        async with watching(api.http, page) as connection:
            await put(api, "a")
            await connection.until("group")
        await put(api, "b", "c")
        async with watching(api.http, page) as connection:
            assert (await connection.until("group"))["group_id"] == "b"
        async with watching(api.http, page) as connection:  # cut off between two groups
            assert (await connection.until("group"))["group_id"] == "c"
        await put(api, *(f"g{number}" for number in range(MOST_ALONE + 1)))
        async with watching(api.http, page) as connection:
            missed = await connection.until("groups")
            assert missed == {"count": 11, "first_seq": 4, "last_seq": 14}
            await put(api, "last")
            assert (await connection.until("group"))["group_id"] == "last"
        assert page.groups == list(range(1, 16))
        assert page.named("resync") == []


@pytest.mark.thorough
async def test_a_killed_server_leaves_nothing_out(tmp_path: Path) -> None:
    place, port, page = tmp_path / "s.db", free_port(), Page()
    url = f"http://127.0.0.1:{port}"

    async def post(http: httpx.AsyncClient, mark: int) -> None:
        body = {"tokens": [[mark, 5]], "masks": [[-100, 5]], "scores": [0.5]}
        assert (await http.post("/scored_data", json=body)).status_code == 200

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
        with api_process(place, port) as first:
            async with watching(http, page) as connection:
                await post(http, 1)
                await connection.until("group")
                await post(http, 2)
                first.kill()
                with pytest.raises((EOFError, httpx.HTTPError)):
                    await connection.until("nothing")
        with api_process(place, port):
            await post(http, 3)
            async with watching(http, page) as connection:
                await post(http, 4)
                while page.seq != 4:
                    await connection.next()
            assert page.named("resync") == [{"reason": "restarted"}]
            listed = (await http.get("/v1/groups")).json()["groups"]
    assert page.groups == [one["seq"] for one in listed] == [1, 2, 3, 4]


async def test_readers_may_watch_and_a_token_has_so_many_streams(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token, _ = create_token(path, "page", "reader")
    headers = {"authorization": f"Bearer {token}"}
    server = {"tokens_file": path, "quota": {"open_streams": 1}}
    async with running_api(tmp_path / "s.db", server=server) as api:
        assert (await api.http.get("/v1/events")).status_code == 401
        async with watching(api.http, Page(), headers) as connection:
            assert (await api.http.get("/v1/events", headers=headers)).status_code == 429
            await put(api, "a")
            await connection.until("group")
        for path_ in ("/v1/failures", "/v1/engines", "/v1/rollouts/running"):
            assert (await api.http.get(path_)).status_code == 401
            assert (await api.http.get(path_, headers=headers)).status_code == 200


@pytest.mark.thorough
async def test_who_reads_nothing_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_SLOW_SECONDS", 0.2)
    live = Live()
    async with running_api(tmp_path / "s.db", live=live) as api:
        port = int(api.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as reader:
            reader.sendall(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await until(lambda: live.feed.watchers == 1)
            # More than all buffers of the machine hold.
            for _ in range(64):
                live.feed.publish("much", "x" * 2**20)
                await settled()
            page = Page()
            async with watching(api.http, page) as connection:  # others are told all the same
                live.feed.publish("policy", {"version": 1})
                await connection.until("policy")
            await until(lambda: not live.feed.watchers)


async def test_a_server_that_stops_ends_the_streams(tmp_path: Path) -> None:
    place = {"server": {"port": 0}, "store": str(tmp_path / "s.db")}
    page = Page()
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        async with api_serving(RunApiSettings.model_validate(place)) as url:
            http.base_url = httpx.URL(url)
            context = watching(http, page)
            connection = await context.__aenter__()
        with pytest.raises(EOFError):  # not an answer that breaks off
            await connection.until("nothing")
        await context.__aexit__(None, None, None)


def test_the_ring_keeps_so_many_events_and_so_many_bytes() -> None:
    for bounds in ({"most_events": 3}, {"most_bytes": 200}):
        feed = Feed(boot="0123abcd", **bounds)
        for number in range(10):
            feed.publish("policy", {"version": number})
        kept = [event.data["version"] for event in events_in(feed.after(7)[0].decode())]
        assert kept == [7, 8, 9]
        assert feed.start("0123abcd.7.0").resync == ""
        assert feed.start("0123abcd.6.0").resync == "missed"
        assert feed.start("0123abcd.99.0").resync == "missed"
        assert feed.start("89abcdef.9.0").resync == feed.start("nonsense").resync == "restarted"
        with pytest.raises(FellBehind):
            feed.after(6)


class FakeStore:
    """As many groups as were put; some of them are no longer kept."""

    def __init__(self) -> None:
        self.last_seq = 0
        self.gone: set[int] = set()
        self.open_runs: dict[str, Any] = {}
        self.fails = False

    async def counters(self) -> dict[str, int]:
        return {}

    async def list_groups(self, query: Any, cursor: str, limit: int) -> Any:
        await asyncio.sleep(0)
        if self.fails:
            raise StoreError("The disk is full.")
        seqs = range(query.after + 1, self.last_seq + 1)
        rows = [_row(seq) for seq in seqs if seq not in self.gone]
        return SimpleNamespace(groups=[ListedGroup(row, GroupFacts()) for row in rows[:limit]])


def _row(seq: int) -> GroupRow:
    return GroupRow(seq, f"g{seq}", "math", "group", 1, 1, 1, 0, None, "queued", None, 0.0)


async def connect(feed: Feed, follower: Follower, last_id: str) -> str:
    """The text of a connection, once nothing more comes."""
    parts: list[bytes] = []
    hung_up = asyncio.Event()

    async def receive() -> Message:
        await hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        parts.append(message.get("body", b""))

    answer = EventsAnswer(feed, last_id, lambda: 0, follower.look)
    task = asyncio.create_task(answer({"type": "http"}, receive, send))
    await settled()
    hung_up.set()
    await task
    return b"".join(parts).decode()


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 2 * MOST_ALONE), st.booleans()),
        st.tuples(st.just("tell"), st.integers(1, 6), st.booleans()),
        st.tuples(st.just("look"), st.just(0), st.booleans()),
        st.tuples(st.just("read"), st.integers(0, 6), st.booleans()),
        st.tuples(st.just("restart"), st.just(0), st.booleans()),
    ),
    max_size=25,
)


@given(_STEPS)
@example([("read", 1, False), ("put", 3, False), ("restart", 0, False), ("read", 2, False)])
@settings(max_examples=examples(120), deadline=None)
def test_whatever_breaks_no_group_comes_twice_or_is_left_out(
    steps: list[tuple[str, int, bool]],
) -> None:
    """A stream breaks after any of its events, again and again, over a small ring, restarts and a
    store that fails; other events come once, in order, and are missed only with a `resync`."""

    async def live_through() -> None:
        store, page, told = FakeStore(), Page(), 0
        live = Live()

        def boot() -> tuple[Feed, Follower]:
            live.feed = Feed(most_events=8)
            return live.feed, Follower(live, store)

        feed, follower = boot()
        for what, number, odd in [*steps, ("read", 10**9, False)]:
            if what == "put":
                store.last_seq += number
                if odd:
                    store.gone.add(store.last_seq)
            elif what == "tell":
                for _ in range(number):
                    told += 1
                    feed.publish("policy", {"version": told})
            elif what == "look":
                store.fails = odd
                await follower.look()
                store.fails = False
            elif what == "restart":
                feed, follower = boot()
            else:
                text = await connect(feed, follower, page.last_id)
                for event in events_in(text)[:number]:
                    page.see(event)
        begun = page.named("hello")[0]["seq"]
        assert page.groups == list(range(begun + 1, store.last_seq + 1))
        versions = [one["version"] for one in page.named("policy")]
        assert versions == sorted(set(versions))
        if versions and not page.named("resync"):
            assert versions == list(range(versions[0], told + 1))

    asyncio.run(live_through())
