"""Weights that change while calls are made: the version that is recorded; calls wait during an
update, and those at the engine finish, continue or are sent again."""

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import openai
import pytest
from envserver_records.records import VersionSpan
from support.cases import cases_of
from support.engine_stand_in import ids_of
from support.proxy_house import ASK, TOOL_CALLS, TOOLS, House, chat, house
from support.serving import attempt_spec
from support.waiting import settled, until

from envserver.proxy.attempts import ProxyAttempt
from envserver.proxy.endpoint import Capabilities
from envserver.tokens.builder import build
from envserver.tokens.flags import DEFAULT
from envserver.tokens.invariants import check

STREAMED = pytest.mark.parametrize("streamed", [False, True])


def named(home: House, name: str = "policy@{version}") -> tuple[ProxyAttempt, openai.AsyncOpenAI]:
    attempt = home.proxy.open(msgspec.structs.replace(attempt_spec(), model=name))
    return attempt, home.client(attempt.key)


def names_weights(home: House, *versions: Any) -> None:
    """The engine says of its answers, one after the other, that these sampled them; two names with
    a blank between them: the first token, and the others."""
    told = iter(versions)

    def name(answer: dict[str, Any]) -> None:
        choice, version = answer["choices"][0], next(told)
        names = version.split() if isinstance(version, str) else [version]
        edges = [*range(len(names)), len(choice["token_ids"])]
        choice["weight_versions"] = [
            {"version": name, "start": start, "end": end}
            for name, (start, end) in zip(names, pairwise(edges), strict=True)
        ]

    home.spoil(name)


# Which version is recorded


@pytest.mark.parametrize("name", ["policy@{version}", "v{version}.2"])
async def test_a_version_in_the_model_name_is_asked_for_recorded(home: House, name: str) -> None:
    attempt, client = named(home, name)
    await chat(client)
    home.proxy.publish_version(3)
    await chat(client, streamed=True)
    asked = [sent["model"] for sent in home.fake.requests]
    assert asked == [name.replace("{version}", version) for version in ("0", "3")]
    told = [(call.versions[0].version, call.model, call.flags) for call in attempt.calls]
    assert told == [(0, name, []), (3, name, [])]


@pytest.mark.parametrize(
    ("version", "told"),
    [(7, 7), (7, "step-7"), *((3, x) for x in ("default", "20261120093000", True))],
)
async def test_a_version_that_the_engine_tells_counts_where_it_is_one(
    home: House, version: int, told: Any
) -> None:
    names_weights(home, told)
    home.proxy.publish_version(3)
    attempt, client = home.open()
    await chat(client)
    assert attempt.calls[0].versions == [VersionSpan(version, 0, 8)]


async def test_an_engine_that_serves_another_version_than_asked_for_is_flagged(home: House) -> None:
    home.fake.served = "policy@2"
    home.proxy.publish_version(3)
    attempt, client = named(home)
    await chat(client)
    assert attempt.calls[0].flags == ["other_model_served"]


async def test_what_was_sampled_before_the_first_version_is_of_none(home: House) -> None:
    """The first weights come while calls are at the engine, and go on with them."""
    change = "default version-0"
    names_weights(home, change, change, "version-0 default", change)
    attempt, client = home.open()
    for _ in range(3):
        await chat(client)
    home.proxy.publish_version(0)
    await chat(client)
    size = len(attempt.calls[0].completion_ids)
    assert attempt.calls[0].versions == [VersionSpan(-1, 0, 1), VersionSpan(0, 1, size)]
    flags = [call.flags for call in attempt.calls]
    assert flags == [["mixed_versions"]] * 2 + [["weights_lost"]] * 2
    assert DEFAULT.of("weights_lost") == "drop"


# Versions that went, or do not come


@STREAMED
async def test_a_version_that_went_is_asked_for_as_it_is_now(home: House, streamed: bool) -> None:
    """As when the call waited so long for room that its adapter was unloaded meanwhile."""
    home.proxy.publish_version(1)
    home.fake.faults.extend([404, 404])
    attempt, client = named(home)
    asking = asyncio.create_task(chat(client, streamed))
    await until(lambda: home.fake.requests)
    home.proxy.publish_version(6)
    await asking
    assert [sent["model"] for sent in home.fake.requests][::2] == ["policy@1", "policy@6"]
    (call,) = attempt.calls
    assert call.versions == [VersionSpan(6, 0, len(call.completion_ids))]
    assert call.flags == []


async def test_a_missing_version_is_its_fault(home: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envserver.proxy.endpoint.PATIENCE_SECONDS", 1.0)
    home.proxy.publish_version(1)
    home.fake.faults.extend([404] * 20)
    attempt, client = named(home)
    with pytest.raises(openai.APIError):
        await chat(client)
    assert attempt.engine_failure is not None
    assert attempt.engine_failure.kind == "engine_unavailable"
    assert "no model 'policy@1'" in attempt.engine_failure.message
    assert len(home.fake.requests) > 1


async def test_other_refusals_are_final(home: House) -> None:
    for (attempt, client), fault in ((named(home), (400, "too long")), (home.open(), 404)):
        home.fake.faults.append(fault)
        with pytest.raises(openai.APIError):
            await chat(client)
        assert attempt.engine_failure is not None
        assert attempt.engine_failure.kind == "engine_refused"
    assert len(home.fake.requests) == 2


# Pauses


async def paused_within_a_call(
    home: House, in_flight: Any, streamed: bool = False
) -> tuple[Any, asyncio.Task[Any], Any]:
    """An attempt, its call that is at the engine, and the pause that has begun, if any."""
    home.proxy.publish_version(1)
    home.fake.held = asyncio.Event()
    attempt, client = home.open()
    asking = asyncio.create_task(chat(client, streamed))
    await until(lambda: home.fake.requests)
    pausing = in_flight and asyncio.create_task(home.proxy.gate.pause(in_flight, 60.0))
    await settled()
    return attempt, asking, pausing


async def test_drain_waits_for_calls_at_the_engine_and_says_if_they_do_not_end(home: House) -> None:
    attempt, asking, pausing = await paused_within_a_call(home, "drain")
    assert not await home.proxy.gate.pause("drain", 0.05)
    assert not pausing.done()
    home.fake.held.set()  # type: ignore[union-attr]
    assert await pausing
    await asking
    assert attempt.calls[0].versions[0].version == 1


@STREAMED
@pytest.mark.parametrize("in_flight", ["keep", None])
async def test_a_call_that_goes_on_with_new_weights_is_marked(
    home: House, streamed: bool, in_flight: str | None
) -> None:
    if not streamed:
        names_weights(home, "default")  # which is no number
    attempt, asking, pausing = await paused_within_a_call(home, in_flight, streamed)
    assert pausing is None or await pausing
    home.proxy.publish_version(2)
    home.proxy.gate.resume()
    home.fake.held.set()  # type: ignore[union-attr]
    await asking
    (call,) = attempt.calls
    assert call.flags == ["mixed_versions"]
    assert call.versions == [VersionSpan(1, 0, len(call.completion_ids))]


async def test_each_token_has_the_version_that_sampled_it(home: House) -> None:
    """The call is frozen in each update; the second weights sample nothing of it."""
    names_weights(home, "step-1 step-3 step-4")
    attempt, asking, pausing = await paused_within_a_call(home, "keep")
    for version in (2, 3, 4):
        assert await (pausing if version == 2 else home.proxy.gate.pause("keep", 60.0))
        home.proxy.publish_version(version)
        home.proxy.gate.resume()
    home.fake.held.set()  # type: ignore[union-attr]
    await asking
    (call,) = attempt.calls
    size = len(call.completion_ids)
    assert call.versions == [VersionSpan(1, 0, 1), VersionSpan(3, 1, 2), VersionSpan(4, 2, size)]
    assert call.flags == ["mixed_versions"]
    (row,) = build(attempt.calls)
    check(attempt.calls, [row])
    assert row.versions[len(call.prompt_ids) :].tolist() == [1, 3, *[4] * (size - 2)]


async def test_abort_asks_them_again_after_the_pause(home: House) -> None:
    attempt, asking, pausing = await paused_within_a_call(home, "abort")
    assert await pausing
    await until(lambda: home.fake.aborted == 1)
    home.fake.held.set()  # type: ignore[union-attr]
    home.proxy.publish_version(2)
    home.proxy.gate.resume()
    await asking
    (call,) = attempt.calls
    assert (call.versions[0].version, call.flags) == (2, [])
    assert len(home.fake.requests) == 2


async def test_an_end_that_was_held_back_is_not_told_when_the_stream_is_asked_for_again(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, chunks = asyncio.Event(), home.fake.chunks

    def ends_only(body: Any) -> Any:
        *_, last, usage = chunks(body)
        if not first.is_set():  # it ends at once: only its usage is missing when it is aborted
            first.set()
            yield last
            yield usage | {"choices": []}
        yield from chunks(body)

    monkeypatch.setattr(home.fake, "chunks", ends_only)
    home.fake.held = asyncio.Event()
    attempt, client = home.open()
    finishes = []

    async def ask() -> None:
        stream = await client.chat.completions.create(model="any", messages=ASK, stream=True)
        finishes.extend([chunk.choices[0].finish_reason async for chunk in stream])

    asking = asyncio.create_task(ask())
    await until(lambda: home.fake.requests)
    await settled()
    assert await home.proxy.gate.pause("abort", 60.0)
    home.fake.held.set()
    home.proxy.gate.resume()
    await asking
    assert finishes[-1] == "stop"
    assert finishes.count("stop") == 1
    assert len(home.fake.requests) == 2
    assert [call.completion_ids.tolist() for call in attempt.calls] == [ids_of("Hëllo.")]


async def test_abort_breaks_off_a_stream_that_has_begun(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, client = home.open()
    stream = await client.chat.completions.create(model="any", messages=ASK, stream=True)
    with pytest.raises(openai.APIError, match="paused"):
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                await home.proxy.gate.pause("abort", 60.0)
    (call,) = attempt.calls
    assert call.finish_reason == "error"
    assert attempt.engine_failure is not None
    assert attempt.engine_failure.kind == "engine_unavailable"


async def test_many_pauses_lose_and_double_nothing(home: House) -> None:
    home.fake.text = None
    attempt, _ = home.open(max_turns=1000)

    async def agent(number: int) -> None:
        for turn in range(5):
            messages = [{"role": "user", "content": f"{number}-{turn}"}]
            await home.post(attempt.key, "v1/chat/completions", {"messages": messages})

    async def trainer() -> None:
        for version, how in enumerate(["drain", "keep", "abort"] * 4, start=2):
            await home.proxy.gate.pause(how, 60.0)
            home.proxy.publish_version(version)
            home.proxy.gate.resume()
            await asyncio.sleep(0.01)

    await asyncio.gather(trainer(), *(agent(number) for number in range(16)))
    answers = [call.message["content"] for call in attempt.calls]
    assert sorted(answers) == sorted(f"re: {n}-{t}" for n in range(16) for t in range(5))


# A client's retry gets the answer that was sampled; other equal requests are new samples

RETRY = {"x-stainless-retry-count": "1"}
CODEX = {"user-agent": "codex_exec/0.169.0 (Debian 12.0.0; x86_64) unknown (codex_exec; 0.169.0)"}
CLAUDE = {"user-agent": "claude-cli/2.1.197 (external, sdk-cli)", "x-stainless-retry-count": "0"}
PATH = "v1/chat/completions"
BODY = {"model": "any", "messages": ASK}
OTHER = {**BODY, "seed": 1}


async def test_a_marked_retry_gets_the_same_answer_and_takes_no_turn(home: House) -> None:
    attempt, _ = home.open(max_turns=1)
    _, first = await home.post(attempt.key, PATH, BODY)
    assert await home.post(attempt.key, PATH, BODY, **RETRY) == (200, first)
    (call,) = attempt.calls
    assert (call.replayed, call.flags) == (True, ["client_retry_replayed"])
    assert len(home.fake.requests) == 1


async def test_what_is_no_retry_is_a_new_sample(home: House) -> None:
    attempt, _ = home.open(agents=["main", "other"])
    await asyncio.gather(*(home.post(attempt.key, PATH, BODY) for _ in range(4)))
    await home.post(attempt.key, PATH, OTHER, **RETRY)  # it says something else
    await home.post(attempt.key, f"a/other/{PATH}", BODY, **RETRY)
    assert len(attempt.calls) == len(home.fake.requests) == 6
    keyed, _ = home.open()
    for key in ("first", "second"):  # a key that is new names a new request also in a retry
        headers = {"idempotency-key": key, **RETRY}
        assert (await home.post(keyed.key, PATH, BODY, **headers))[0] == 200
    await home.post(keyed.key, PATH, BODY, **RETRY)
    assert len(keyed.calls) == 3
    assert not any(call.replayed for call in [*attempt.calls, *keyed.calls])


async def test_an_idempotency_key_names_one_answer(home: House) -> None:
    attempt, _ = home.open()
    key = {"idempotency-key": "step-1"}
    answers = await asyncio.gather(*(home.post(attempt.key, PATH, BODY, **key) for _ in range(8)))
    assert len({str(answer) for answer in answers}) == 1
    assert len(attempt.calls) == 1
    status, refusal = await home.post(attempt.key, PATH, OTHER, **key)
    assert (status, refusal["error"]["code"]) == (409, "conflict")


@pytest.mark.parametrize("mark", [RETRY, {}])
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_a_client_lost_is_recorded_and_given_to_its_retry(
    home: House, streamed: bool, mark: dict[str, str]
) -> None:
    home.fake.held = asyncio.Event()
    home.fake.tool_calls = TOOL_CALLS
    attempt, _ = home.open()
    body = {**BODY, "tools": TOOLS, "stream": streamed}
    lost = home.asks(attempt.key, PATH, body)
    await until(lambda: home.fake.requests)
    await home.lose(lost)

    async def text() -> str:
        url = f"{home.url}/r/{attempt.key}/{PATH}"
        async with home.http.post(url, json=body, headers=mark) as answer:
            return await answer.text()

    retry = asyncio.create_task(text())
    await home.has_read(2)
    home.fake.held.set()
    assert TOOL_CALLS[1]["function"]["arguments"].replace('"', '\\"') in await retry
    (call,) = attempt.calls
    assert (call.delivered, call.flags) == ("full", ["client_retry_replayed"])
    assert len(home.fake.requests) == 1


@pytest.mark.parametrize("program", [CODEX, CLAUDE])
async def test_what_a_coding_program_asks_again_after_its_answer_is_one_sample(
    home: House, program: dict[str, str]
) -> None:
    attempt, _ = home.open(max_turns=3)
    answers = [await home.post(attempt.key, PATH, BODY, **program) for _ in range(30)]
    assert len({str(answer) for answer in answers}) == 1
    (call,) = attempt.calls
    assert call.flags == ["client_retry_replayed"]
    # It has gone on since.
    await home.post(attempt.key, PATH, OTHER, **program)
    await home.post(attempt.key, PATH, BODY, **program)
    assert len(attempt.calls) == 3


CHAT, RESPONSES, MESSAGES = "v1/chat/completions", "v1/responses", "v1/messages"
BODIES = cases_of(__file__, "requests.toml")["with_tools"]
PROGRAMS = {
    "claude-cli/2.1.197 (external, sdk-cli)": MESSAGES,
    CODEX["user-agent"]: RESPONSES,
    "opencode/1.18.33 ai-sdk/provider-utils/4.0.40": CHAT,
    "QwenCode/0.20.0 (linux; x64)": CHAT,
}
MALFORMED = [{**TOOL_CALLS[0], "function": {"name": "add", "arguments": '{"a": '}}]
UNUSABLE: dict[str, dict[str, Any]] = {
    "empty": {"text": ""},
    "blank": {"text": " \n"},
    "reasoning only": {"text": "", "reasoning": "So be it."},
    "cut": {"finish": "length"},
    "broken off": {"finish": "abort"},
    "malformed": {"text": "", "tool_calls": MALFORMED},
    "a call that is no object": {
        "tool_calls": [{**TOOL_CALLS[0], "function": {"name": "add", "arguments": "4"}}]
    },
    "refused": {"faults": [400]},
    "no answer": {"faults": [500] * 2},
    "half an answer": {"faults": ["half"] * 2},
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_program_recovers_from_an_answer_that_it_cannot_use(
    home: House, program: str, streamed: bool
) -> None:
    path = PROGRAMS[program]
    body = BODIES[path] | {"model": "any", "stream": streamed}

    async def asked(key: str) -> str:
        url, headers = f"{home.url}/r/{key}/{path}", {"user-agent": program}
        async with home.http.post(url, json=body, headers=headers) as answer:
            return await answer.text()

    for name, how in UNUSABLE.items():
        attempt, _ = home.open()
        home.fake.faults.extend(how.get("faults", ()))
        with pytest.MonkeyPatch.context() as patch:
            for field in how.keys() - {"faults"}:
                patch.setattr(home.fake, field, how[field])
            await asked(attempt.key)
        assert not home.fake.faults, name
        answers = [await asked(attempt.key) for _ in range(3)]
        assert all("Hëllo." in answer for answer in answers), name
        assert sum("client_retry_replayed" in call.flags for call in attempt.calls) == 1, name
        assert len(attempt.calls) == (1 if "faults" in how else 2), name


async def test_what_helpers_of_a_program_ask_at_once_are_own_samples(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, _ = home.open()
    asking = [home.asks(attempt.key, PATH, BODY, **CODEX) for _ in range(2)]
    await until(lambda: len(home.fake.requests) == 2)
    home.fake.held.set()
    await asyncio.gather(*asking)
    assert len(attempt.calls) == 2


async def test_a_request_that_failed_is_made_anew_by_its_retry(home: House) -> None:
    home.fake.faults.extend([500] * 6)
    attempt, _ = home.open(max_turns=1)
    statuses = [(await home.post(attempt.key, PATH, BODY, **CODEX))[0] for _ in range(5)]
    assert statuses == [502, 502, 502, 200, 200]
    assert (len(attempt.calls), attempt.calls[0].replayed) == (1, True)


async def test_of_equal_requests_a_retry_gets_the_answer_that_was_lost(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, _ = home.open()
    asking = [home.asks(attempt.key, PATH, BODY) for _ in range(3)]
    await until(lambda: len(home.fake.requests) == 3)
    await home.lose(asking[1])
    home.fake.held.set()
    await asyncio.gather(asking[0], asking[2])
    await until(lambda: len(attempt.calls) == 3)
    assert sorted(call.delivered for call in attempt.calls) == ["full", "full", "none"]
    await home.post(attempt.key, PATH, BODY, **RETRY)
    assert [call.delivered for call in attempt.calls] == ["full"] * 3
    assert sum(call.replayed for call in attempt.calls) == 1


async def test_what_a_request_got_is_delivered_though_its_twin_is_gone(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, _ = home.open()
    first, second = (
        home.asks(attempt.key, PATH, BODY, **{"idempotency-key": "hedged"}) for _ in range(2)
    )
    await until(lambda: home.fake.requests)
    await home.has_read(2)
    await home.lose(first)
    home.fake.held.set()
    assert (await second)[0] == 200
    (call,) = attempt.calls
    assert (call.delivered, call.flags) == ("full", ["client_retry_replayed"])


async def test_a_retry_that_waits_does_not_ask_for_an_attempt_that_has_ended() -> None:
    async def find() -> Capabilities:
        await asyncio.Event().wait()
        raise AssertionError

    async with house(find=find) as home:
        attempt, _ = home.open()
        once = home.asks(attempt.key, PATH, BODY)
        await home.has_read(1)
        again = home.asks(attempt.key, PATH, BODY, **RETRY)
        await home.has_read(2)
        home.proxy.seal(attempt)
        assert [(await once)[0], (await again)[0]] == [409, 409]
        assert home.fake.requests == []
