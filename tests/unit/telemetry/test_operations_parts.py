"""Parts of what makes a server operable, each by itself."""

import asyncio
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp.web
import httpx
import pytest
import structlog
from aiohttp.test_utils import TestServer
from envserver_records.errors import EngineRefused, EngineUnavailable, StoreError
from fastapi import FastAPI, Request
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from support.api import native_group, put_native
from support.cases import cases_of
from support.cpu import cpu_limit
from support.extent import examples
from support.waiting import PATIENCE, until

from envserver import OpenAIConfig, ServerConfig
from envserver.api.app import create_api
from envserver.api.bootstrap import BootstrapApp
from envserver.http.health import Health, Metrics
from envserver.http.server import serve_api
from envserver.models.engine import EngineRequest, MeasuredEngine
from envserver.models.openai import OpenAIEngine
from envserver.running.bootstrap import bootstrap_server
from envserver.settings.server import TelemetryConfig
from envserver.store import database, open_store
from envserver.telemetry.numbers import OTHER, Counts, Labelled
from envserver.telemetry.process import TICK_SECONDS, LoopLag
from envserver.telemetry.redaction import STRUCK, redacted
from envserver.telemetry.tracing import (
    MOST_CHARACTERS,
    Span,
    inputs,
    outputs,
    tool_texts,
    within,
)
from envserver.tools.watching import watched_loop

CASES = cases_of(__file__)


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        await serve_api(app, "127.0.0.1", 0) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http,
    ):
        yield http


async def test_ready_means_that_every_part_is(tmp_path: Path) -> None:
    health = Health()
    health.expect("engine")
    well = True

    async def engine() -> str:
        if not well:
            raise EngineUnavailable("Nobody listens.")
        return ""

    async with (
        open_store(tmp_path / "s.db") as store,
        served(create_api(store, settings=ServerConfig(), health=health)) as http,
    ):

        async def parts(status: int) -> dict[str, Any]:
            answer = await http.get("/readyz")
            assert answer.status_code == status, answer.text
            return dict(answer.json()["parts"])

        assert (await parts(503))["engine"]["state"] == "starting"
        health.found("engine", engine)
        began = (await parts(200))["engine"]["since"]
        assert (await parts(200))["engine"]["since"] == began
        well = False
        assert (await parts(503))["engine"]["reason"] == "Nobody listens."
        assert "Nobody listens." in (await http.get("/readyz")).json()["detail"]
        well = True
        await parts(200)
        health.drain()
        assert (await parts(503))["server"]["state"] == "draining"
        assert (await http.get("/healthz")).status_code == 200


@contextmanager
def locked(store: Path) -> Iterator[None]:
    """Another program writes to the store's file."""
    with closing(sqlite3.connect(store)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


async def test_a_store_that_cannot_be_written_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_MS", 100)
    place = tmp_path / "s.db"

    async def health() -> tuple[int, dict[str, Any]]:
        answer = await http.get("/readyz")
        return answer.status_code, answer.json()["parts"]["store"]

    async with (
        open_store(place) as store,
        served(create_api(store, settings=ServerConfig())) as http,
    ):
        assert (await health())[0] == 200
        with locked(place):
            status, part = await health()
            assert (status, part["state"]) == (503, "down") and "locked" in part["reason"]
        assert (await health())[0] == 200
        monkeypatch.setattr(store, "touch", asyncio.Event().wait)
        monkeypatch.setattr("envserver.http.health.PROBE_SECONDS", 0.05)
        assert "cannot be written" in (await health())[1]["reason"]
    with locked(place), pytest.raises(StoreError, match="cannot be written") as refused:
        async with open_store(place):
            pass
    assert "Another program" in refused.value.hint


async def test_who_comes_too_early_is_told_so_and_who_waits_at_the_end_is_answered() -> None:
    app = FastAPI()

    @app.get("/wait")
    async def wait(request: Request) -> Response:
        while not await request.is_disconnected():
            await asyncio.sleep(0.02)
        return Response(status_code=204)

    @app.get("/stream")
    async def stream() -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"one"
            await asyncio.Event().wait()

        return StreamingResponse(parts())

    health = Health()
    health.expect("store")
    door = BootstrapApp(health)
    async with served(door) as http:
        early = await http.get("/v1/status")
        assert (early.status_code, early.headers["retry-after"]) == (503, "1")
        assert "store is starting" in early.json()["detail"]
        assert (await http.get("/readyz")).status_code == 503
        assert (await http.get("/healthz")).status_code == 200
        await door.open(app)
        waiting = asyncio.create_task(http.get("/wait"))
        async with http.stream("GET", "/stream") as streamed:
            chunks = streamed.aiter_bytes()
            assert await anext(chunks) == b"one"
            door.close()
            assert [chunk async for chunk in chunks] == []  # ended, not broken off
        assert (await waiting).status_code == 204


async def test_a_server_is_ready_when_its_routes_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks when its port opens must not hear that everything is there."""
    heard: list[httpx.Response] = []

    async def asked_at_once(*words: Any) -> Any:
        server = await serve_api(*words)
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            heard.append(await http.get(f"{server.url}/readyz"))
        return server

    monkeypatch.setattr("envserver.running.bootstrap.serve_api", asked_at_once)
    config, settings = ServerConfig(port=0), TelemetryConfig()
    async with bootstrap_server(config, settings, tmp_path / "a.db", ("engine",)):
        (answer,) = heard
    assert answer.status_code == 503
    assert set(answer.json()["parts"]) == {"store", "disk", "engine", "routes"}


async def test_a_lease_stays_with_its_stream_when_the_server_ends(tmp_path: Path) -> None:
    async with open_store(tmp_path / "s.db") as store:
        door = BootstrapApp(Health())
        async with served(door) as http:
            api, arrived = create_api(store, settings=ServerConfig()), asyncio.Event()

            async def app(scope: Scope, receive: Receive, send: Send) -> None:
                if scope.get("path", "").endswith("/lease"):
                    arrived.set()
                await api(scope, receive, send)

            await door.open(app)
            await put_native(store, native_group("group-1"))
            await http.post("/v1/runs", json={"name": "run", "batch_size": 1})
            waiting = asyncio.create_task(
                http.post("/v1/runs/run/lease", json={"min_groups": 2, "wait_seconds": 60})
            )
            await arrived.wait()
            query = {"on_hangup": "give_back"}
            async with http.stream(
                "GET", "/v1/runs/run/stream", params=query, headers={"accept": "text/event-stream"}
            ) as streamed:
                lines = streamed.aiter_lines()
                async for line in lines:
                    if line.startswith("id: "):
                        break
                lease_id = line.removeprefix("id: ")
                door.close()
                async for _ in lines:
                    pass
            assert (await waiting).status_code == 204
        await store.ack(lease_id)
        assert (await store.counts())["acked"] == 1


async def test_requests_are_counted_by_the_template_of_their_route(tmp_path: Path) -> None:
    metrics = Metrics()
    groups = "/v1/environments/a-secret-id/groups"
    async with (
        open_store(tmp_path / "s.db") as store,
        served(create_api(store, settings=ServerConfig(), metrics=metrics)) as http,
    ):
        for name in ("a-secret-id", "another"):
            for path in (f"/v1/groups/{name}", f"/nowhere/{name}"):
                assert (await http.get(path)).status_code == 404
        # Posts of groups, the plain one on its shorter way and the other, have the same place.
        assert (await http.post("/scored_data", json={})).status_code == 422
        for query, status in (("open=1&begun=2", 404), ("open=-1", 422), ("begun=x", 422)):
            assert (await http.post(f"{groups}?{query}", content=b"x")).status_code == status
        text = (await http.get("/metrics")).text
    posts = 'method="POST",route="/v1/environments/{env_id}/groups"'
    for counted in (
        'method="POST",route="/scored_data",status="422"} 1.0',
        f'{posts},status="404"}} 1.0',
        f'{posts},status="422"}} 2.0',
        'method="GET",route="/v1/groups/{group_id:path}",status="404"} 2.0',
        'route="unmatched",status="404"} 2.0',
    ):
        assert counted in text
    assert "a-secret-id" not in text


async def test_the_lag_of_the_loop_counts_what_a_block_swallowed() -> None:
    def is_seen() -> bool:
        return any("test_the_lag_of_the_loop" in one.get("place", "") for one in lines)

    with structlog.testing.capture_logs() as lines:
        async with watched_loop(0.1), LoopLag() as lag, asyncio.timeout(PATIENCE):
            while not is_seen():
                await asyncio.sleep(0.1)
                time.sleep(0.5)  # the block
                assert lag.tick_age_seconds >= 0.5
            await until(lambda: lag.tick_age_seconds < 0.5)
    late = sum(lag.seconds.counts[list(lag.seconds.bounds).index(0.1) + 1 :])
    assert late >= (0.5 - 0.1) / TICK_SECONDS - 3
    assert lag.p99_seconds() >= 0.3
    assert {one["event"] for one in lines} == {"loop_is_blocked", "loop_turns_again"}


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcdefghij"), max_size=30))
def test_labels_have_a_bounded_number_of_values(names: list[str]) -> None:
    counts, labelled = Counts(most=5), Labelled((1.0,), most=5)
    for name in names:
        counts.add((name,))
        labelled.add((name,), 0.5)
    assert len(counts) <= 6 and len(labelled) <= 6
    assert sum(counts.values()) == len(names)
    assert {label for (label,) in counts} <= {*names, OTHER}


KEY = st.text(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_", min_size=24, max_size=40
)


@settings(deadline=None)
@given(
    KEY,
    st.sampled_from(CASES["secrets"]),
)
def test_what_looks_like_a_secret_is_struck_out(key: str, form: str) -> None:
    line = redacted(f"before {form.format(key)} after")
    assert key not in line
    assert STRUCK in line
    assert line.startswith("before ")
    assert line.endswith(" after")


SLOW = ("eyJ-", "eyJhbGci.", "a:", "://a:", ":", "/r/", "bearer ", "token ", "api_key=", "sk-", " ")
PLAIN = (
    "max_tokens: 1024",
    "the key is: unknown_setting",
    "The token limit is reached.",
    "http://h:1/v1/runs/abc",
    "tokens=1234567",
)


def test_plain_lines_stay_as_they_are_and_none_takes_long_to_search_for_secrets() -> None:
    assert [redacted(line) for line in PLAIN] == [*PLAIN]
    for part in SLOW:
        began = time.process_time()
        redacted(f"key token bearer ://{part * (60_000 // len(part))}")
        assert time.process_time() - began < cpu_limit(0.5), part


@pytest.mark.parametrize("form", ["json", "console"])
def test_all_log_lines_are_bounded_and_have_one_form_ids_and_no_secrets(form: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CASES["logging"], form], capture_output=True, text=True, check=True
    )
    flood, told = ran.stderr.split("=====\n")
    # What clients and models send makes few and short lines.
    assert flood.count("Invalid HTTP request received.") == 10
    assert flood.count("ours") == 1000  # an error is the server's
    assert flood.count("the model's") >= 2
    assert "characters left out" in flood
    assert max(map(len, flood.splitlines())) < 200_000
    assert len(flood) < 500_000
    assert not any(secret * 20 in told for secret in "kbs")
    assert all(event in told for event in ("ours", "theirs", "python's", "raised"))
    if form == "json":
        assert [json.loads(line)["rollout_id"] for line in told.splitlines()] == ["rollout-7"] * 4
    else:
        assert told.count("rollout_id=rollout-7") == 4


class _Spanned(Span):
    traceparent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


async def test_the_engine_gets_the_trace_of_a_call_and_is_measured() -> None:
    seen: list[str | None] = []

    async def answer(request: aiohttp.web.Request) -> aiohttp.web.Response:
        seen.append(request.headers.get("traceparent"))
        if len(seen) > 2:
            return aiohttp.web.json_response({"error": {"message": "no"}}, status=400)
        return aiohttp.web.json_response({"choices": []})

    app = aiohttp.web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        config = OpenAIConfig(base_url=f"http://127.0.0.1:{server.port}/v1", model_name="m")
        async with MeasuredEngine(OpenAIEngine(config)) as engine:

            async def post() -> None:
                await engine.post(EngineRequest("/v1/chat/completions", {}, "r", 60))

            await post()
            with within(nullcontext(_Spanned())):
                await post()
            with pytest.raises(EngineRefused, match="no"):
                await post()
            assert engine.seconds[("/v1/chat/completions",)].count == 2
            assert engine.errors == {("engine_refused",): 1}
            assert engine.in_flight == 0
    assert seen == [None, _Spanned.traceparent, None]


# Texts in spans: bounded, without secrets, and JSON whatever a model says -------------------------

SECRET = "sk-telemetry-0123456789abcdef"
TEXTS = st.one_of(
    st.text(max_size=40),
    st.builds(lambda size: f"{'x ' * size}{SECRET}{' y' * size}", st.sampled_from([0, 20_000])),
)
CALLS = st.lists(
    st.one_of(
        st.none(),
        st.builds(lambda text: {"id": "c", "function": {"name": "f", "arguments": text}}, TEXTS),
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "critic"])},
        optional={
            "content": st.one_of(TEXTS, st.none(), st.just([{"type": "text", "text": "part"}])),
            "tool_calls": CALLS,
            "reasoning_content": TEXTS,
            "tool_call_id": TEXTS,
        },
    ),
    max_size=12,
)
TOOLS = st.lists(st.fixed_dictionaries({"name": TEXTS, "parameters": st.just({})}), max_size=4)


@settings(max_examples=examples(60))
@given(messages=MESSAGES, tools=TOOLS)
def test_texts_are_bounded_json_without_secrets(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    tools = [{"type": "function", "function": one} for one in tools]
    found = {**inputs(messages, tools), **outputs((one, None) for one in messages)}
    for name, text in found.items():
        assert isinstance(json.loads(text), list), name
        if name != "gen_ai.tool.definitions":  # what an environment declares
            assert SECRET not in text
        # One message alone may be longer: its texts are cut one by one.
        assert len(text) < 3 * MOST_CHARACTERS


def test_a_secret_that_the_cut_would_halve_is_removed() -> None:
    text = f"{'x' * 4090} {SECRET} {'y' * 20_000}"
    (cut,) = {value for key, value in tool_texts("", text).items() if key.endswith("result")}
    assert "sk-" not in cut and len(cut) < 9000
