"""The simulated engine in process: exact tokens, consistent logprobs, streams, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envserver_records.errors import EngineGarbage, EngineRefused, EngineUnavailable
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.sim import (
    CHAT,
    COMPLETIONS,
    DEMONSTRATION,
    QUESTION,
    TOKENIZER,
    TOOLS,
    ask,
    call,
    engine,
    logprobs_of,
    post,
    said,
    user,
)

from envserver.models import ASSETS, SimEngine
from envserver.models.sim.make_tokenizer import build_tokenizer, tokenizer_config

WRONG = json.loads(Path(__file__).with_name("sim_wrong_requests.json").read_text())
"""A path, what makes a request wrong, and the field that is named."""

# --- tokens -----------------------------------------------------------------------------------


def test_the_tokenizer_can_be_made_again_from_its_corpus() -> None:
    shipped = json.loads((ASSETS / "tokenizer.json").read_text())["model"]
    made = json.loads(build_tokenizer().to_str())["model"]
    assert made["vocab"] == shipped["vocab"]
    assert made["merges"] == shipped["merges"]
    assert tokenizer_config() == json.loads((ASSETS / "tokenizer_config.json").read_text())


async def first(sim: SimEngine, **fields: Any) -> dict[str, Any]:
    """The first choice of an answer."""
    choice: dict[str, Any] = (await post(sim, ask(**fields)))["choices"][0]
    return choice


async def test_the_ids_of_an_answer_are_the_ids_of_its_text() -> None:
    answer = await post(engine(), ask())
    choice = answer["choices"][0]
    assert choice["token_ids"][-1] == TOKENIZER.im_end
    assert TOKENIZER.encode(choice["message"]["content"]) == choice["token_ids"][:-1]
    assert TOKENIZER.decode(answer["prompt_token_ids"], special=True) == (
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer["usage"] == {
        "prompt_tokens": len(answer["prompt_token_ids"]),
        "completion_tokens": len(choice["token_ids"]),
        "total_tokens": len(answer["prompt_token_ids"]) + len(choice["token_ids"]),
    }


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["\n", " ", "<tool_call>\n",
     '\n<tool_call>\n{"name": "calculate", "arguments": {}}\n</tool_call>', "<|im_end|>",
     "\r\n", "é<|im_<|im_end|>start|>"]
)  # fmt: skip
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
turns = st.builds(
    lambda content, calls: said(content, *calls),
    words,
    st.lists(
        st.builds(call, st.sampled_from(["calculate", "finish"]),
                  st.dictionaries(words, values, max_size=3)),
        max_size=2,
    ),
)  # fmt: skip


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(turns, min_size=1, max_size=3), st.lists(words, min_size=4, max_size=4), words)
async def test_a_conversation_that_goes_on_begins_with_the_tokens_so_far(
    demonstration: list[dict[str, Any]], results: list[str], system: str
) -> None:
    sim = engine(demonstration)
    messages = [{"role": "system", "content": system}, *user(), *user(results[3])]
    before: list[int] = []
    for result in results[:3]:
        answer = await post(sim, ask(tools=TOOLS) | {"messages": messages})
        choice = answer["choices"][0]
        assert answer["prompt_token_ids"][: len(before)] == before
        before = answer["prompt_token_ids"] + choice["token_ids"]
        messages.append(choice["message"])
        for one in choice["message"].get("tool_calls", []):
            assert isinstance(json.loads(one["function"]["arguments"]), dict)
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": result})
        messages += user(result)


# --- logprobs ---------------------------------------------------------------------------------


async def test_logprobs_are_the_same_bits_when_scored_again() -> None:
    sim = engine(DEMONSTRATION)
    answer = await post(sim, ask(tools=TOOLS, n=3, top_logprobs=4))
    for choice in answer["choices"]:
        logprobs = logprobs_of(choice)
        assert all(value < 0 and float(np.float32(value)) == value for value in logprobs)
        ids = answer["prompt_token_ids"] + choice["token_ids"]
        again = await post(
            sim, {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 3}, path=COMPLETIONS
        )
        rows = again["choices"][0]["prompt_logprobs"]
        assert rows[0] is None
        start = len(answer["prompt_token_ids"])
        scored = [
            row[str(token)]["logprob"]
            for row, token in zip(rows[start:], choice["token_ids"], strict=True)
        ]
        assert scored == logprobs
        for entry in choice["logprobs"]["content"]:
            ranked = [top["logprob"] for top in entry["top_logprobs"]]
            assert ranked[0] == entry["logprob"]
            assert ranked == sorted(ranked, reverse=True)
            assert 1 <= len(ranked) <= 4
    body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 1}
    (alone,) = (await post(sim, body, path=COMPLETIONS))["choices"]
    assert {len(row) for row in alone["prompt_logprobs"][1:]} == {1}


# --- where an answer ends ---------------------------------------------------------------------


async def test_a_stop_token_is_sampled_and_silent() -> None:
    sim = engine()
    whole = (await first(sim, seed=3))["token_ids"]
    choice = await first(sim, seed=3, stop_token_ids=[whole[4]])
    kept = whole[: whole.index(whole[4]) + 1]
    assert (choice["token_ids"], choice["stop_reason"]) == (kept, whole[4])
    assert choice["message"]["content"] == TOKENIZER.decode(kept[:-1])


# --- streams ----------------------------------------------------------------------------------


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a client makes of the chunks (a whole answer is one), by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        fresh = {"text": "", "calls": [], "ids": [], "logprobs": [], "prompt": [], "finish": None}
        whole = choices.setdefault(part["index"], fresh)
        delta = part.get("delta") or part.get("message") or {"content": part.get("text")}
        whole["text"] += delta.get("content") or ""
        for place, piece in enumerate(delta.get("tool_calls", [])):
            place = piece.get("index", place)
            if place == len(whole["calls"]):
                whole["calls"].append([piece["id"], piece["function"]["name"], ""])
            whole["calls"][place][2] += piece["function"]["arguments"]
        whole["ids"] += part.get("token_ids", [])
        scored = part["logprobs"] or {}
        whole["logprobs"] += scored.get("content") or scored.get("token_logprobs") or []
        whole["prompt"] += part.get("prompt_token_ids") or []
        whole["finish"] = part["finish_reason"] or whole["finish"]
    return choices


async def streamed(sim: SimEngine, body: dict[str, Any], path: str = CHAT) -> list[dict[str, Any]]:
    async with sim.stream(path, body, rollout_id="", timeout_seconds=30) as stream:
        return [chunk async for chunk in stream]


@pytest.mark.parametrize(
    "fields", [{}, {"stop": "e"}, {"max_tokens": 7}, {"tools": TOOLS, "n": 2}], ids=str
)
async def test_a_streamed_answer_is_the_same_answer(fields: dict[str, Any]) -> None:
    demonstration = [said("Überall 🙂", *DEMONSTRATION[0]["tool_calls"] * 2)]
    body = ask(seed=1, top_logprobs=2, **fields)
    answer = await post(engine(demonstration), body)
    options = {"stream_options": {"include_usage": True}}
    chunks = await streamed(engine(demonstration), body | options)
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["usage"] == answer["usage"]
    assert joined(chunks) == joined([answer])
    assert {len(one["token_ids"]) for one in answer["choices"]} != {0}
    if "tools" in fields:
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 2


async def test_streamed_completions_are_the_same_too() -> None:
    sim = engine()
    body = {"prompt": ["One", "Two"], "n": 2, "seed": 4, "return_token_ids": True, "logprobs": 0}
    whole = joined([await post(sim, body, path=COMPLETIONS)])
    assert joined(await streamed(sim, body, COMPLETIONS)) == whole
    assert len(whole) == 4 and all(one["ids"] and one["prompt"] for one in whole.values())


# --- what goes wrong --------------------------------------------------------------------------


async def test_faults_come_as_often_as_asked() -> None:
    sim = engine(error_rate=0.3, disconnect_rate=0.3, truncate_rate=0.5)
    seen: dict[str, int] = {}
    for _ in range(300):
        try:
            finish = (await first(sim))["finish_reason"]
        except (EngineUnavailable, EngineGarbage) as error:
            finish = error.kind
        seen[finish] = seen.get(finish, 0) + 1
    assert 60 < seen["engine_unavailable"] < 125
    assert 35 < seen["engine_garbage"] < 95
    assert abs(seen["length"] - seen["stop"]) < 60


LONG = [CHAT, {"messages": user("word " * 2_000)}, "prompt"]


@pytest.mark.parametrize(("path", "body", "param"), [*WRONG, LONG])
async def test_wrong_requests_are_refused_with_their_place(
    path: str, body: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(EngineRefused) as caught:
        asked = ask() if path == CHAT and body else {}
        await post(engine(context_tokens=1024), asked | body, path=path)
    assert caught.value.detail["param"] == param
    assert 400 <= caught.value.detail["status"] < 500
