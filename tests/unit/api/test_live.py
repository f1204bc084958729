"""What a server shows of now, over real HTTP: live events, failures and drops, engines."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import orjson
import pytest
from envserver_local.simulated.engine import SimEngine
from envserver_records.errors import EngineTimeout, LimitReached, RolloutError, Stale, StoreError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.types import Message
from support.api import Api, api_process, join, running_api, wire_group
from support.commands import free_port
from support.extent import examples
from support.waiting import PATIENCE, settled, until

from envserver.http.health import Metrics
from envserver.models.engine import MeasuredEngine
from envserver.rollouts.events import GroupDropped, RolloutFailed
from envserver.settings.config import SimConfig
from envserver.settings.server import AlarmsConfig
from envserver.store.listing import ListedGroup
from envserver.store.packed import GroupFacts
from envserver.store.rows import GroupRow
from envserver.trainers import live_events
from envserver.trainers.live import MOST_ALONE, MOST_ROWS, EngineSource, Follower, Live
from envserver.trainers.live_events import EventsAnswer, Feed
from envserver.trainers.status import AlarmWatch

FACTS: dict[str, Any] = {"index": 0, "task_id": "task"}


# A page that is open listens to live events, and connects again as browsers do


class Event(NamedTuple):
    """A server-sent event."""

    id: str
    name: str
    data: dict[str, Any]


def events_in(text: str) -> list[Event]:
    """The whole events of a stream's text, which may be cut off anywhere."""
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if "data" in fields:
            found.append(Event(fields["id"], fields["event"], orjson.loads(fields["data"])))
    return found


class Page:
    """What was seen over any number of connections.

    Args:
        last_id: cursor of the last event.
        groups: numbers of the groups that it was told of, in order.
    """

    def __init__(self) -> None:
        self.last_id = ""
        self.seq: int | None = None
        self.events: list[Event] = []
        self.groups: list[int] = []

    def see(self, event: Event) -> None:
        """Notes an event.

        Raises:
            AssertionError: a group came twice, or one was left out.
        """
        self.last_id = event.id
        self.events.append(event)
        if event.name == "hello":
            assert self.seq in (None, event.data["seq"])
            self.seq = event.data["seq"]
        if event.name in ("group", "groups"):
            one = event.data.get("seq")
            first, last = event.data.get("first_seq", one), event.data.get("last_seq", one)
            assert first == (self.seq or 0) + 1, event
            assert event.data.get("count", 1) == last - first + 1
            self.seq = last
            self.groups += range(first, last + 1)

    def named(self, name: str) -> list[dict[str, Any]]:
        """The data of the events of a name."""
        return [event.data for event in self.events if event.name == name]


class Connection:
    def __init__(self, page: Page, answer: httpx.Response) -> None:
        self._page = page
        self._lines = answer.aiter_lines()
        self.ended = False

    async def next(self) -> Event:
        """The next event.

        Raises:
            EOFError: the server ended the stream.
        """
        block = ""
        async with asyncio.timeout(PATIENCE):
            async for line in self._lines:
                block += f"{line}\n"
                if not line:
                    if found := events_in(block):
                        self._page.see(found[0])
                        return found[0]
                    block = ""
        raise EOFError

    async def until(self, name: str, **facts: Any) -> dict[str, Any]:
        """The data of the next event of this name with these facts."""
        while True:
            event = await self.next()
            if event.name == name and facts.items() <= event.data.items():
                return event.data


@asynccontextmanager
async def watching(http: httpx.AsyncClient, page: Page) -> AsyncIterator[Connection]:
    """A connection, from where the page was; `hello` has come."""
    known = {"last-event-id": page.last_id} if page.last_id else {}
    async with http.stream("GET", "/v1/events", headers=known) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        connection = Connection(page, answer)
        await connection.until("hello")
        yield connection


class Server:
    """An API and what its parts tell of."""

    def __init__(self, api: Api, live: Live, alarms: AlarmWatch) -> None:
        self.api, self.live, self.alarms = api, live, alarms
        self.tell = live.failures.observer("math")

    async def failures(self, **query: Any) -> dict[str, Any]:
        return dict(await self.api.get("/v1/failures", params=query))

    def failed(self, error: RolloutError, group_id: str = "g", *, final: bool = False) -> None:
        facts = FACTS | {"group_id": group_id, "rollout_id": f"{group_id}-r2", "at": time.time()}
        self.tell(RolloutFailed(attempt=3, failure=error.failure(), final=final, **facts))

    def dropped(self, reason: str, group_id: str = "g", *, is_failure: bool = False) -> None:
        facts = FACTS | {"group_id": group_id, "reason": reason, "at": time.time()}
        self.tell(GroupDropped(failed=is_failure, message="why", **facts))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    live, alarms = Live(), AlarmWatch(AlarmsConfig())
    async with running_api(tmp_path / "s.db", metrics=Metrics(), live=live, alarms=alarms) as api:
        yield Server(api, live, alarms)


# Events


async def test_a_page_is_told_what_happens(where: str) -> None:
    async with running_api(where) as api:
        await api.put("before")
        page = Page()
        async with watching(api.http, page) as connection:
            assert page.named("hello")[0]["policy_version"] == -1
            await api.put("a")
            row = await connection.until("group")
            assert row == (await api.get("/v1/groups?order=newest"))["groups"][0]
            assert (row["group_id"], row["rewards"]) == ("a", [0.0, 1.0])
            await api.run()
            assert await connection.until("run") == {"name": "run", "state": "open"}
            await api.post("/v1/policy-version", {"version": 3})
            assert (await connection.until("policy"))["version"] == 3
            await api.http.post("/v1/runs/run/close")
            assert await connection.until("run") == {"name": "run", "state": "closed"}
        assert page.groups == [2]


@pytest.mark.thorough
async def test_a_killed_server_leaves_nothing_out(tmp_path: Path) -> None:
    place, port, page = tmp_path / "s.db", free_port(), Page()

    async def post(mark: int) -> None:
        assert (await http.post("/scored_data", json=wire_group(1, mark))).status_code == 200

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http:
        with api_process(place, port) as first:
            async with watching(http, page) as connection:
                await post(1)
                await connection.until("group")
                await post(2)
                first.kill()
                with pytest.raises((EOFError, httpx.HTTPError)):
                    await connection.until("nothing")
        with api_process(place, port):
            await post(3)
            async with watching(http, page) as connection:
                await post(4)
                while page.seq != 4:
                    await connection.next()
            assert page.named("resync") == [{"reason": "restarted"}]
            listed = (await http.get("/v1/groups")).json()["groups"]
    assert page.groups == [one["seq"] for one in listed] == [1, 2, 3, 4]


@pytest.mark.thorough
async def test_slow_readers_are_cut_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "_SLOW_SECONDS", 0.2)
    feed = server.live.feed
    with socket.create_connection(("127.0.0.1", int(server.api.url.rpartition(":")[2]))) as reader:
        reader.sendall(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await until(lambda: feed.watchers == 1)
        # More than all buffers of the machine hold.
        for _ in range(64):
            feed.publish("much", "x" * 2**20)
            await settled()
        async with watching(server.api.http, Page()) as connection:  # others are told all the same
            feed.publish("policy", {"version": 1})
            await connection.until("policy")
        await until(lambda: not feed.watchers)


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
def test_whatever_breaks_each_group_comes_once(steps: list[tuple[str, int, bool]]) -> None:
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
                for event in events_in(await connect(feed, follower, page.last_id))[:number]:
                    page.see(event)
        assert page.groups == list(range(page.named("hello")[0]["seq"] + 1, store.last_seq + 1))
        versions = [one["version"] for one in page.named("policy")]
        assert versions == sorted(set(versions))
        if versions and not page.named("resync"):
            assert versions == list(range(versions[0], told + 1))

    asyncio.run(live_through())


# Failures, engines


async def test_failures_say_whose_fault_in_words_without_secrets(server: Server) -> None:
    key = "sk-abcdefghijklmnopqrstuvwx"
    server.failed(EngineTimeout(f"No answer to\x1b[1m {key}."))
    server.failed(LimitReached("Too many turns."), final=True)
    server.failed(Stale("Too old."), "other", final=True)
    server.dropped("incomplete", is_failure=True)
    server.dropped("zero_variance", "all alike")  # a statistic
    found = await server.failures()
    assert [(row["kind"], row["fault"], row["what"]) for row in found["failures"]] == [
        ("incomplete", "model", "group"),
        ("stale", "trainer", "rollout"),
        ("limit_reached", "model", "rollout"),
        ("engine_timeout", "engine", "attempt"),
    ]
    last = found["failures"][-1]
    assert (last["environment"], last["task_id"], last["group_id"]) == ("math", "task", "g")
    assert (last["rollout"], last["attempt"]) == (2, 3)
    assert last["message"] == "No answer to [redacted]."


async def test_failures_are_filtered_counted_and_paged(server: Server) -> None:
    for number in range(MOST_ROWS + 5):
        server.failed(EngineTimeout("late") if number % 5 else LimitReached("turns"))
    seen, before = [], {}
    while before is not None:
        found = await server.failures(fault="engine", limit=300, **before)
        assert found["counts"] == {"engine_timeout": 800}
        seen += [row["n"] for row in found["failures"]]
        before = found["next"] and {"before": found["next"]}
    assert len(seen) == 800 and seen == sorted(set(seen), reverse=True)
    assert (await server.failures(environment="other"))["failures"] == []


async def test_runners_and_trainers_tell_of_failures_too(server: Server) -> None:
    joined = await join(server.api)
    await joined.beat(failures={"engine_timeout": 7}, dropped={})  # from before
    await joined.beat(failures={"engine_timeout": 9, "agent_error": 1}, dropped={"too_long": 3})
    found = await server.failures()
    told = {row["kind"]: (row["fault"], row["count"], row["what"]) for row in found["failures"]}
    assert told == {
        "engine_timeout": ("engine", 2, "attempt"),
        "agent_error": ("environment", 1, "attempt"),
        "too_long": ("model", 3, "drop"),
    }
    assert found["failures"][0]["runner"] == "math@one"
    api = server.api
    await api.put("useless")
    await api.run()
    await api.end("nack", await api.lease(), reason="too hard", group_ids=["useless"])
    (row,) = (await server.failures(fault="trainer"))["failures"]
    assert (row["group_id"], row["environment"], row["kind"]) == ("useless", "math", "set_aside")
    assert (row["message"], row["what"]) == ("too hard", "drop")


async def test_an_engine_is_told_of_when_it_changes(server: Server) -> None:
    version = 1
    async with MeasuredEngine(SimEngine(SimConfig())) as engine:
        server.live.engines.append(EngineSource("", engine, "tiny", lambda: version))
        (row,) = (await server.api.get("/v1/engines"))["engines"]
        assert (row["url"], row["weights_version"], row["calls_total"]) == ("sim", 1, 0)
        assert (row["seconds_p50"], row["breaker"], row["ready"]) == (None, "closed", True)
        async with watching(server.api.http, Page()) as connection:
            version = 2
            await connection.until("engine", weights_version=2)
