"""The engine over HTTP: addresses, replicas that die, hang, slow down and come back, typed errors.

No call is lost while one replica is left. What the client makes of any bytes is in
`test_engine_fuzz.py`.
"""

import asyncio
import itertools
import json
import socket
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from envserver_local.simulated.server import sim_app
from envserver_records.errors import (
    ConfigError,
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
)
from structlog.testing import capture_logs
from support.commands import envserver, free_port
from support.engine_stand_in import (
    ALL,
    COMPLETIONS,
    DERENDER,
    GENERATE,
    RENDER,
    Bytes,
    FakeVllm,
    fake_vllm,
)
from support.serving import serving
from support.sim import engine as sim_engine
from support.vllm_server import VllmServer
from support.waiting import PATIENCE, settled, until

from envserver import OpenAIConfig
from envserver.models.connections import SseParser
from envserver.models.engine import EngineRequest, ReplicaHealth
from envserver.models.openai import OpenAIEngine
from envserver.models.probe import ProbeResult, probe
from envserver.models.replicas import FLOOR
from envserver.settings.config import Mode

CHAT = "/v1/chat/completions"
SELDOM_SECONDS = 60.0
"""Between health checks where they do not matter: one that is late would set a replica aside."""
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**ASK, "return_token_ids": True, "logprobs": True, "stream": True}


@asynccontextmanager
async def engine(
    *urls: str,
    tries: int = 6,
    check_seconds: float = 1.0,
    measure_seconds: float = 0.02,
    **config: Any,
) -> AsyncIterator[OpenAIEngine]:
    async with OpenAIEngine(
        OpenAIConfig(base_url=list(urls), **config),
        tries=tries,
        pause_seconds=0.01,
        check_seconds=check_seconds,
        measure_seconds=measure_seconds,
    ) as opened:
        yield opened


@asynccontextmanager
async def alone(
    *faults: Any, how: dict[str, Any] | None = None, **fake: Any
) -> AsyncIterator[tuple[FakeVllm, OpenAIEngine]]:
    """One fake with these faults, and the engine before it, which is made as `how` says."""
    async with (
        fake_vllm(faults=deque(faults), **fake) as made,
        engine(made.url, **(how or {})) as opened,
    ):
        yield made, opened


@asynccontextmanager
async def pair(
    how: dict[str, Any] | None = None, **fake: Any
) -> AsyncIterator[tuple[FakeVllm, FakeVllm, OpenAIEngine]]:
    """Two replicas (the first as `fake` says), and the engine before them."""
    async with (
        fake_vllm(**fake) as one,
        fake_vllm() as two,
        engine(one.url, two.url, **(how or {})) as opened,
    ):
        yield one, two, opened


async def ask(opened: OpenAIEngine, rollout_id: str = "r", seconds: float = 60.0) -> dict[str, Any]:
    return await opened.post(EngineRequest(CHAT, ASK, rollout_id, seconds))


async def stream(opened: OpenAIEngine, rollout_id: str = "r", seconds: float = 60.0) -> list[Any]:
    async with opened.stream(EngineRequest(CHAT, STREAM, rollout_id, seconds)) as chunks:
        return [chunk async for chunk in chunks]


async def both(opened: OpenAIEngine, rollout_id: str = "r") -> None:
    """A whole answer and a streamed one."""
    assert (await ask(opened, rollout_id))["choices"]
    assert len(await stream(opened, rollout_id)) > 2


async def crowd(opened: OpenAIEngine, size: int, turns: int = 1) -> None:
    """`size` rollouts at a time; fails unless every call is answered."""

    async def rollout(number: int) -> None:
        for _ in range(turns):
            await both(opened, f"rollout-{number}")

    async with asyncio.TaskGroup() as group:
        for number in range(size):
            group.create_task(rollout(number))


async def homed(opened: OpenAIEngine, fake: FakeVllm) -> str:
    """A rollout whose calls go to `fake`."""
    async with asyncio.timeout(PATIENCE):
        for number in itertools.count():
            before = len(fake.requests)
            await ask(opened, f"homed-{number}")
            if len(fake.requests) > before:
                return f"homed-{number}"
    raise AssertionError("no rollout goes there")


async def health_of(opened: OpenAIEngine, fake: FakeVllm) -> ReplicaHealth:
    return next(entry for entry in await opened.health() if entry.base_url == fake.url)


def replica_of(opened: OpenAIEngine, fake: FakeVllm) -> ReplicaHealth:
    """What is known of `fake` now; it is not asked."""
    return next(entry for entry in opened.replicas() if entry.base_url == fake.url)


def dead_url() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


# Addresses and names


async def test_an_address_may_end_in_v1_and_stand_with_others_behind_commas() -> None:
    async with fake_vllm() as one, fake_vllm() as two:
        for tail in ("", "/", "/v1", "/v1/"):
            async with engine(one.url + tail) as opened:
                assert (await ask(opened))["choices"][0]["message"]["content"] == "Hëllo."
                assert await opened.model_name() == "tiny"
        async with OpenAIEngine(OpenAIConfig(base_url=f"{one.url}/v1, {two.url}")) as opened:
            assert [r.base_url for r in await opened.health()] == [one.url, two.url]


async def test_what_is_set_is_not_asked_for_and_credentials_in_an_address_are_not_told() -> None:
    async with engine(dead_url(), model_name="mine", server_type="openai") as opened:
        assert await opened.model_name() == "mine"
        assert not opened.exact
    with pytest.raises(ConfigError) as caught:
        OpenAIEngine(OpenAIConfig(base_url="http://user:pass@host/v1"))
    assert "pass" not in str(caught.value)


# Repetitions and errors


async def test_passing_failures_are_repeated_and_any_is_asked_for_elsewhere() -> None:
    async with alone() as (fake, opened):
        for fault in (500, 502, 503, 429, 408, "close", 307, "garbage", "null", "nothing"):
            fake.requests.clear()
            fake.faults.extend([fault, fault])
            assert (await ask(opened))["choices"]
            assert len(fake.requests) == 3
            fake.faults.append(fault)
            assert len(await stream(opened)) > 2
    for fault in ("half", "close", 503, "garbage", "error_body", "html_stream"):
        async with pair() as (one, _, opened):
            home = await homed(opened, one)
            one.faults = deque([fault, fault])
            await both(opened, home)


async def test_a_redirect_is_not_followed_and_is_named() -> None:
    async with alone(*[307] * 9, how={"api_key": "key=k"}) as (_, opened):
        said = r"redirects \(HTTP 307\) to http://else.where/v1\?\*\*\*"
        with pytest.raises(EngineUnavailable, match=said) as caught:
            await ask(opened)
        assert "openai.base_url" in caught.value.hint


async def test_a_refusal_is_not_repeated_and_tells_the_engines_words_without_the_key() -> None:
    secret, statuses = "sk-very-secret", (400, 401, 404, 422) * 8
    async with alone(*statuses, how={"api_key": secret}) as (fake, opened):
        for number, status in enumerate(statuses, start=1):
            with pytest.raises(EngineRefused, match=r"told Bearer \*\*\*") as caught:
                await ask(opened)
            assert caught.value.detail["status"] == status
            assert len(fake.requests) == number
            assert secret not in repr(caught.value.failure())
        assert fake.headers[0]["Authorization"] == f"Bearer {secret}"
        assert (await health_of(opened, fake)).state == "closed"  # it says nothing against it


async def test_a_slow_answer_times_out_and_is_aborted() -> None:
    async with alone(held=asyncio.Event()) as (fake, opened):
        for way in (ask, stream):
            with pytest.raises(EngineTimeout):
                await way(opened, seconds=0.1)
        await until(lambda: fake.aborted == 2)


async def test_an_error_of_the_consumer_leaves_a_stream_as_it_is() -> None:
    async with alone() as (_, opened):
        with pytest.raises(ConnectionResetError, match="mine"):
            async with opened.stream(EngineRequest(CHAT, STREAM, "r", 60)):
                raise ConnectionResetError("mine")


async def test_an_engine_that_asks_for_patience_is_left_alone() -> None:
    async with alone(429, retry_after="1") as (fake, opened):
        began = time.monotonic()
        await ask(opened)
        assert time.monotonic() - began >= 1
        fake.faults, fake.retry_after = deque([503]), "3600"
        before = len(fake.requests)
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(EngineUnavailable):
                await ask(opened)
        assert len(fake.requests) == before + 1
    async with pair({"check_seconds": SELDOM_SECONDS}) as (one, _, opened):
        home = await homed(opened, one)
        one.faults, one.retry_after = deque([503]), "30"
        before = len(one.requests)
        for _ in range(10):
            await ask(opened, home)
        assert len(one.requests) == before + 1
        assert (await health_of(opened, one)).state == "closed"


# Replicas that die, hang and come back


async def test_a_replica_that_is_killed_under_load_loses_no_call() -> None:
    async with pair({"check_seconds": SELDOM_SECONDS}, slow_seconds=0.02) as (one, two, opened):
        two.slow_seconds = 0.02
        calls = asyncio.create_task(crowd(opened, 30, turns=4))
        await until(lambda: len(one.requests) > 40)
        await one.kill()
        await calls
        assert len(two.requests) > len(one.requests)
        await until(lambda: replica_of(opened, one).state == "open")


@pytest.mark.parametrize("trouble", ["killed", "hung", "unwell"])
async def test_a_replica_in_trouble_gets_no_calls_and_changes_are_logged_once(trouble: str) -> None:
    with capture_logs() as lines:
        async with pair({"check_seconds": 0.5}) as (one, _, opened), AsyncExitStack() as again:
            home = await homed(opened, one)
            if trouble == "killed":
                await one.kill()
            one.hung, one.health_status = trouble == "hung", 503 if trouble == "unwell" else 200
            before = len(one.requests)
            if trouble != "unwell":  # no call is lost before that is known, either
                await crowd(opened, 20)
            await until(lambda: replica_of(opened, one).state == "open")
            await crowd(opened, 10)
            state = await health_of(opened, one)
            assert (state.state, state.in_flight) == ("open", 0)
            assert not state.healthy or trouble == "unwell"  # which still answers
            assert len(one.requests) == before
            one.hung, one.health_status, well = False, 200, one
            if trouble == "killed":
                well = await again.enter_async_context(fake_vllm(int(one.url.rpartition(":")[2])))
            await until(lambda: replica_of(opened, well).state == "closed")
            before = len(well.requests)
            await ask(opened, home)
            assert len(well.requests) == before + 1
    events = ["engine_replica_set_aside", "engine_replica_is_back"]
    # A busy machine may be late with the other's check.
    assert [line["event"] for line in lines if line["base_url"] == one.url] == events


async def test_calls_in_flight_when_a_replica_begins_to_hang_are_sent_elsewhere() -> None:
    held = asyncio.Event()
    async with pair({"check_seconds": 0.5}, held=held) as (one, two, opened):
        held.set()
        home = await homed(opened, one)
        held.clear()
        before = len(one.requests) + len(two.requests)
        calls = [asyncio.create_task(ask(opened, home)) for _ in range(5)]
        async with opened.stream(EngineRequest(CHAT, STREAM, home, 60)) as chunks:
            assert await anext(chunks)
            await until(lambda: len(one.requests) + len(two.requests) == before + 6)
            elsewhere = len(two.requests)
            one.hung = True
            for answer in await asyncio.gather(*calls):
                assert answer["choices"]
            # Of this stream something was given out: it waits for its own replica.
            held.set()
            assert len([chunk async for chunk in chunks]) > 1
        assert len(two.requests) >= elsewhere + 5


async def test_the_only_replica_is_never_given_up_however_silent_it_is() -> None:
    held = asyncio.Event()
    how = {"check_seconds": 0.02, "tries": 5}
    async with alone(*[503] * 5, how=how, held=held, health_status=503) as (fake, opened):
        with pytest.raises(EngineError):
            await ask(opened)
        assert replica_of(opened, fake).state == "open"
        fake.requests.clear()
        calls = [asyncio.create_task(ask(opened)) for _ in range(3)]
        await until(lambda: len(fake.requests) == 3)
        seen = fake.checks
        await until(lambda: fake.checks > seen + 1)
        held.set()
        assert all(answer["choices"] for answer in await asyncio.gather(*calls))
        assert len(fake.requests) == 3


async def test_a_slow_replica_shares_its_calls_with_one_that_has_room() -> None:
    held = asyncio.Event()
    held.set()
    how = {"check_seconds": SELDOM_SECONDS, "num_max_requests_at_once": 2}
    async with pair(how, held=held) as (one, two, opened):
        home = await homed(opened, one)
        before = len(two.requests)
        held.clear()
        calls = []
        for _ in range(30):
            calls.append(asyncio.create_task(ask(opened, home)))
            await settled()
            await until(lambda: not replica_of(opened, two).in_flight)
        held.set()
        await asyncio.gather(*calls)
        assert len(two.requests) - before == 28


# Calls in flight


async def test_calls_wait_for_a_slot_are_aborted_when_cancelled_and_leave_none_taken() -> None:
    held = asyncio.Event()
    async with alone(how={"num_max_requests_at_once": 2}, held=held) as (fake, opened):
        calls = [asyncio.create_task(ask(opened, str(number))) for number in range(5)]
        await until(lambda: len(fake.requests) == 2)
        with pytest.raises(EngineTimeout, match="no free slot"):
            await ask(opened, seconds=0.05)
        await opened.get("/v1/models")
        state = await health_of(opened, fake)
        assert (state.in_flight, state.waiting, state.limit) == (2, 3, 2)
        for call in calls:
            call.cancel()
        await until(lambda: fake.aborted == 2)
        await asyncio.gather(*calls, return_exceptions=True)
        state = await health_of(opened, fake)
        assert (state.in_flight, state.waiting) == (0, 0)
        assert len(fake.requests) == 2
        held.set()
        await asyncio.gather(*(ask(opened, str(number)) for number in range(5)))
        assert len(fake.requests) == 7


async def test_fewer_calls_are_sent_while_calls_wait_in_the_engine() -> None:
    busy = 'vllm:num_requests_running{engine="0"} 8.0\nvllm:num_requests_waiting{engine="0"} 9.0\n'
    how = {"measure_seconds": 0.01, "num_max_requests_at_once": 32}
    async with alone(how=how, metrics=busy, slow_seconds=0.005) as (fake, opened):

        async def rollout() -> None:
            while True:
                await ask(opened)

        calls = [asyncio.create_task(rollout()) for _ in range(64)]
        limits = set()

        def limit() -> int:
            limits.add(replica_of(opened, fake).limit)
            return replica_of(opened, fake).limit

        await until(lambda: limit() == FLOOR)
        fake.metrics = busy.replace("9.0", "0.0")
        await until(lambda: limit() >= FLOOR + 5)
        fake.metrics = None
        await until(lambda: limit() == 32)
        assert len(limits) > 3
        for call in calls:
            call.cancel()


# Server-sent events


@pytest.mark.parametrize("piece", [b"data: xxxx", b"data: xxxx\n"])
def test_an_event_without_end_is_garbage(piece: bytes) -> None:
    parser = SseParser(max_event_bytes=100)
    with pytest.raises(EngineGarbage):
        for _ in range(50):
            parser.feed(piece)


# What a probe reports about an engine: its mode, what it lacks, and why

Json = dict[str, Any]
CARDS = [{"id": "tiny", "root": "/models/tiny", "max_model_len": 2048}]
LOGITS = (3.0, 2.0, 1.0, 0.0, -1.0)


def fake(can: frozenset[str] = ALL, **how: Any) -> FakeVllm:
    """A vLLM that samples the likeliest of some tokens."""
    how = {"text": "Yes, it is.", "words": Bytes(*LOGITS), "cards": CARDS, **how}
    return FakeVllm(can=can, version="0.32.0", metrics="# HELP\n", **how)


@asynccontextmanager
async def connected(url: str, **config: Any) -> AsyncIterator[OpenAIEngine]:
    async with OpenAIEngine(OpenAIConfig(base_url=url, **config), tries=1) as engine:
        yield engine


async def probed(engine: FakeVllm, *, wanted: Mode = "auto", model: str = "tiny") -> ProbeResult:
    async with engine.listening(), connected(engine.url) as client:
        return await probe(client, wanted=wanted, model=model)


def lies(*paths: str, change: Callable[[Json], object]) -> dict[str, Any]:
    """An engine whose answers at `paths` are changed."""

    def spoil(path: str, answer: Json) -> None:
        if path in paths:
            change(answer)

    return {"spoil": spoil}


def others(answer: Json) -> None:
    """Other tokens than chat samples."""
    for choice in answer["choices"]:
        choice["token_ids"] = [*bytes(choice["token_ids"]).swapcase()]


def other_message(answer: Json) -> None:
    message = answer["choices"][0]["message"]
    message["content"] = message["content"].upper()


def other_prompt(answer: Json) -> None:
    for one in (answer, *answer["choices"]):
        if "prompt_token_ids" in one:
            one["prompt_token_ids"] = one["prompt_token_ids"][1:]


def tie(answer: Json) -> None:
    answer["choices"][0]["token_ids"][1] = 33


DERENDERS_OTHERWISE = lies(DERENDER, change=other_message)


@pytest.mark.parametrize(
    ("can", "how", "mode", "reasons"),
    [
        (ALL - {"scale_out"}, {}, "completions", {"tokens": "--enable-scale-out"}),
        (
            ALL - {"scale_out", "completions"},
            {},
            "chat",
            {"tokens": "HTTP 403", "completions": "no token_ids"},
        ),
        (ALL, {"strict": True}, "opaque", {"chat": "argument supplied: logprobs"}),
        (ALL - {"ids"}, {}, "opaque", {"chat": "lack token_ids and prompt_token_ids"}),
        (
            ALL,
            lies(GENERATE, change=others),
            "completions",
            {"tokens": "[121, 69, 83, 44] at temp"},
        ),
        (
            ALL,
            lies(RENDER, change=lambda answer: answer["token_ids"].append(7)),
            "completions",
            {"tokens": "renders other ids"},
        ),
        (ALL, DERENDERS_OTHERWISE, "completions", {"tokens": "a different message"}),
        (
            ALL,
            lies(GENERATE, COMPLETIONS, change=other_prompt),
            "chat",
            {"tokens": "not echo", "completions": "not echo"},
        ),
        (ALL - {"tools"}, {}, "tokens", {"tools": "--tool-call-parser"}),
        (ALL - {"dev"}, {}, "tokens", {"pausable": "VLLM_SERVER_DEV_MODE=1"}),
        (ALL, {"text": ""}, "tokens", {}),  # it only ends its turn
        # Of two tokens that are equally likely either may be sampled.
        (ALL, {"words": Bytes(3.0, *LOGITS), **lies(GENERATE, change=tie)}, "tokens", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_best_mode_that_is_exact_and_why_no_better(
    can: frozenset[str], how: Json, mode: str, reasons: dict[str, str]
) -> None:
    found = await probed(fake(can, **how))
    assert found.mode == mode
    for name, words in reasons.items():
        assert words in found.reasons[name]
    better = ["tokens", "completions", "chat", "opaque"]
    assert set(better[: better.index(mode)]) <= found.reasons.keys()


async def test_what_its_answers_tell_of_logprobs_reasoning_and_adapters() -> None:
    assert (await probed(fake(words=Bytes(*LOGITS, processed=True)))).logprobs == "processed"
    assert (await probed(fake(ALL - {"top"}))).logprobs == "unknown"
    derendered = await probed(fake(reasons=True))
    assert derendered.reasoning_parser and derendered.has_parser
    seen = await probed(fake(ALL - {"scale_out"}, reasons=True, text="<think>a</think>"))
    assert (seen.reasoning_parser, seen.mode) == (True, "completions")
    cards = [
        {"id": "base", "root": "/models/base", "max_model_len": 64},
        {"id": "policy@3", "root": "/adapters/3", "parent": "base"},
    ]
    found = await probed(fake(cards=cards), model="policy@3")
    assert (found.root, found.max_model_len) == ("/models/base", 64)  # an adapter's are its base's


async def test_a_mode_that_is_wanted_is_used_or_refused_with_the_reason() -> None:
    chat = await probed(fake(), wanted="chat")
    assert chat.mode == "chat"
    assert chat.reasons["tokens"] == "Not tried: openai.mode is chat."
    assert (await probed(fake(), wanted="completions")).mode == "completions"
    assert (await probed(fake(), wanted="opaque")).mode == "opaque"
    with pytest.raises(ConfigError, match=r"openai.mode is tokens.*--enable-scale-out"):
        await probed(fake(ALL - {"scale_out"}), wanted="tokens")


async def test_an_engine_that_does_not_answer_or_not_us_is_an_error() -> None:
    async with connected(f"http://127.0.0.1:{free_port()}") as engine:
        with pytest.raises(EngineUnavailable):
            await probe(engine, model="tiny")
    async with fake_vllm(hung=True) as one, connected(one.url, timeout=0.2) as slow:
        with pytest.raises(
            EngineTimeout, match=r"engine at http://\S+ did not answer within [0-9.]+ s"
        ):
            await probe(slow, model="tiny")
    with pytest.raises(EngineRefused, match="Unauthorized"):
        await probed(fake(key="right"))
    missing = fake(faults=deque([(404, "The model `other` does not exist.")]))
    with pytest.raises(EngineRefused, match="`other` does not exist"):
        await probed(missing, model="other")


@pytest.mark.parametrize("rates", [{}, {"error_rate": 0.3, "truncate_rate": 0.5}])
async def test_the_simulated_engine_continues_ids_by_completions(rates: dict[str, float]) -> None:
    sim = sim_engine(**rates)
    async with (
        serving(sim_app(sim)) as url,
        OpenAIEngine(OpenAIConfig(base_url=url), pause_seconds=0.01) as client,
    ):
        for engine in (sim, client):
            found = await probe(engine, model="sim")
            assert (found.mode, found.logprobs, found.tools) == ("completions", "raw", True)
            assert found.server.startswith("envserver-sim")


@pytest.mark.thorough
async def test_the_command_shows_an_engine_and_what_would_be_better(tmp_path: Path) -> None:
    engine = fake(ALL - {"scale_out", "dev"})
    async with engine.listening():
        shown = await command(tmp_path, f"{engine.url.removeprefix('http://')}/v1")
    assert shown.returncode == 0, shown.stderr
    assert all(len(line) <= 100 for line in shown.stdout.splitlines())
    assert "\033" not in shown.stdout
    text = " ".join(shown.stdout.split())
    assert "mode completions: token ids in and out" in text
    assert "stitching no: /models/tiny is not a folder on this machine." in text
    better = text.partition("To improve this:")[2]
    assert "Mode tokens: /v1/chat/completions/render is refused (HTTP 403)" in better
    assert better.count("--enable-scale-out") == 1


@pytest.mark.thorough
async def test_the_command_tells_replicas_apart_and_those_that_are_down(tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    one, other = fake(), fake(ALL - {"ids"})
    async with one.listening(), other.listening(), serving(sim_app(sim_engine())) as sim:
        both = await command(tmp_path, f"{one.url},{other.url}")
        assert both.returncode == 0, both.stderr
        assert f"mode: tokens at {one.url}, opaque at {other.url}" in " ".join(both.stdout.split())
        with_dead = await command(tmp_path, one.url, sim, dead, "--json")
    assert with_dead.returncode == 1
    assert with_dead.stderr.count("\n") == 1 and dead in with_dead.stderr
    engine, simulated = json.loads(with_dead.stdout)["engines"]
    assert (engine["url"], engine["mode"], engine["stitching"]) == (one.url, "tokens", False)
    assert simulated["not_stitched"] is None


async def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """On a terminal of 100 columns."""
    return await asyncio.to_thread(envserver, "models", "probe", *words, folder=folder)


@pytest.mark.vllm
async def test_a_real_vllm_is_asked_by_tokens(vllm_server: VllmServer, tmp_path: Path) -> None:
    async with connected(vllm_server.base_url) as engine:
        found = await probe(engine, model=vllm_server.model)
    assert found.mode == "tokens"
    assert found.server.startswith("vllm 0.")
    assert found.root == str(vllm_server.model_folder)
    assert all([found.tools, found.has_parser, found.weight_versions, found.metrics])
    assert (found.logprobs, found.reasoning_parser, found.pausable) == ("raw", False, False)
    assert found.reasons.keys() == {"pausable"}
    shown = await command(tmp_path, vllm_server.base_url, "--json")
    (told,) = json.loads(shown.stdout)["engines"]
    assert told["not_stitched"] is None, shown.stdout
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_bytes(
        (vllm_server.model_folder / "tokenizer.json").read_bytes()
    )
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    shown = await command(tmp_path, vllm_server.base_url, "--tokens.tokenizer", str(other))
    assert "name a folder with that template by --tokens.tokenizer" in " ".join(
        shown.stdout.split()
    )
