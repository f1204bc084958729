"""Pictures in prompts: where their tokens are, what continues what, what trainers get."""

import base64
import copy
import hashlib
import io
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from envserver_records.errors import EngineGarbage, InputError, TokensError
from envserver_records.experts import RoutedExperts, experts_from, table_from_text, table_to_text
from envserver_records.images import ImageSpan
from envserver_records.records import Call, Sequence, pack
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.engine_clients import Asking
from support.engine_stand_in import ScaleOut
from support.extent import examples
from support.forests import call as call_of
from support.forests import calm, forests, talk
from support.templates import TEMPLATES, vocabulary
from support.trajectories import trajectory

from envserver.export.stored import group_of
from envserver.models.probe import ProbeResult
from envserver.proxy.engine_client import client_for
from envserver.rollouts.replaying import calls_in, kept_calls
from envserver.running.delivered import read_line
from envserver.tokens.builder import build, find_parents, first_unknown, read_experts
from envserver.tokens.chat_format import ChatFormat
from envserver.tokens.history import History, PromptPlan
from envserver.tokens.images import digest_of, folded, placed, url_from
from envserver.tokens.invariants import check
from envserver.tokens.trace import pack_calls

Json = dict[str, Any]
TEMPLATE = TEMPLATES["vision"].replace("IMAGE", "<|image|>")
RED, BLUE = (b"\x89PNG\r\n\x1a\n" + colour for colour in (b"red", b"blue"))
TOKEN, TOKENS = 7, 3


def seeing() -> ChatFormat:
    words = vocabulary(["<|im_start|>", "<|im_end|>", "<|image|>"])
    stop, image = words.special_id("<|im_end|>"), words.special_id("<|image|>")
    assert stop is not None and image is not None
    stops = frozenset([stop])
    return ChatFormat(words, {"default": TEMPLATE}, stops, image_token=image, banned=(image,))


def picture(data: bytes) -> Json:
    return {"type": "image_url", "image_url": {"url": url_from(data)}}


def asked(*parts: bytes | str) -> Json:
    content = [
        picture(part) if isinstance(part, bytes) else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


class Eyes(ScaleOut):
    """An engine that makes `TOKENS` tokens of a picture, and refuses prompts that already have."""

    def __init__(self, form: ChatFormat, *texts: str) -> None:
        super().__init__(form, *texts)
        self._form = form

    def _expanded(self, ids: list[int], images: int) -> Json:
        token = self._form.image_token
        assert ids.count(token) == images, "an expanded prompt would be expanded once more"
        out: list[int] = []
        ranges = []
        for id in ids:
            if id == token:
                ranges.append({"offset": len(out), "length": TOKENS})
            out += [id] * (TOKENS if id == token else 1)
        return {"ids": out, "mm_placeholders": {"image": ranges}}

    def render(self, body: Json) -> Json:
        rendered = super().render(body)
        images = sum(part["type"] == "image_url" for part in _parts(body["messages"]))
        made = self._expanded(rendered["token_ids"], images)
        grid = [["int64", [3], msgspec.msgpack.Ext(3, np.array([1, 2, 6], np.int64).tobytes())]]
        item = msgspec.msgpack.encode({"image_grid_thw": {"data": grid[0], "field": None}})
        told = {"image": [base64.b64encode(item).decode()] * images}
        features = {"mm_placeholders": made["mm_placeholders"], "mm_metadata": told}
        return {**rendered, "token_ids": made["ids"], "features": features}

    def generate(self, body: Json) -> Json:
        assert "features" not in body
        made = self._expanded(body["token_ids"], len(body.get("content_parts") or ()))
        answer = super().generate(body)
        answer["prompt_token_ids"] = made["ids"]
        return {**answer, "mm_placeholders": made["mm_placeholders"]}


def _parts(messages: list[Json]) -> list[Json]:
    return [part for one in messages if isinstance(one["content"], list) for part in one["content"]]


def test_a_picture_is_one_token_when_sent_and_many_when_seen() -> None:
    seen = [1, TOKEN, TOKEN, TOKEN, 2, TOKEN, TOKEN, 3]
    assert folded(seen, [(1, 3), (5, 2)], TOKEN) == [1, TOKEN, 2, TOKEN, 3]
    assert placed([1, TOKEN, 2, TOKEN, 3], seen, TOKEN) == [(1, 3), (5, 2)]
    assert placed([1, TOKEN, 4, TOKEN, 3], seen, TOKEN) is None
    # A processor that writes what may also stand between two pictures: not certain.
    assert placed([TOKEN, 2, TOKEN], [5, TOKEN, 2, TOKEN, 5, 2, TOKEN], TOKEN) is None


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 6), max_size=3), st.integers(1, 5)), max_size=4))
def test_what_is_found_folds_back(pieces: list[tuple[list[int], int]]) -> None:
    sent = [id for text, _ in pieces for id in [*text, TOKEN]]
    seen = [id for text, size in pieces for id in [*text, *[TOKEN] * size]]
    found = placed(sent, seen, TOKEN)
    assert found is None or folded(seen, found, TOKEN) == sent
    if all(text for text, _ in pieces):
        assert [size for _, size in found or []] == [size for _, size in pieces]


def made(index: int, prompt: list[int], answer: list[int], *images: tuple[str, int]) -> Call:
    spans = [ImageSpan(name, offset, 2) for name, offset in images]
    return call_of(index, prompt, answer, images=spans)


@pytest.mark.parametrize(("second", "rows"), [("red", 1), ("blue", 2)])
def test_the_same_ids_with_another_picture_are_never_joined(second: str, rows: int) -> None:
    first = made(0, [1, TOKEN, TOKEN, 2], [3], ("red", 1))
    built = build([first, made(1, [1, TOKEN, TOKEN, 2, 3, 4], [5], (second, 1))])
    assert len(built) == rows
    assert sorted({row.images[0].sha256 for row in built}) == sorted({"red", second})


def test_a_picture_outside_its_prompt_is_refused_and_a_text_that_spells_it_is_none() -> None:
    with pytest.raises(TokensError, match="Invariant 11"):
        build([made(0, [1, 2], [3], ("red", 1))])
    form = seeing()
    plan = planned(History(form, edits=("exact",), think="template"), asked(RED, "and <|image|>?"))
    assert plan.text is not None and plan.images
    ids = form.encode(plan.text)
    assert placed(ids, [*ids, 1], form.image_token or 0) is None


def planned(history: History, *messages: Json) -> PromptPlan:
    return history.plan(list(messages), [], kwargs={}, model="m", agent=None)


async def test_a_conversation_with_pictures_goes_on_from_its_tokens() -> None:
    form = seeing()
    eyes = Eyes(form, "A cat.")
    client = Asking(eyes, client_for(ProbeResult(mode="tokens", model="tiny"), form))
    history = History(form, edits=("exact",), think="template")
    messages: list[Json] = []
    for turn, shown in enumerate([(RED,), (BLUE, RED), ()]):
        messages = [*messages, asked(*shown, f"Question {turn}")]
        plan = planned(history, *messages)
        body = {"model": "m", "messages": messages, "logprobs": True, "return_token_ids": True}
        answer = await client.whole(body, plan, rollout_id="r", timeout_seconds=9)
        (choice,) = answer["choices"]
        names = [hashlib.sha256(data).hexdigest() for data in (RED, BLUE, RED)]
        images = [
            ImageSpan(name, offset, length, tuple(grid))
            for name, (offset, length, grid) in zip(names, answer["prompt_images"], strict=False)
        ]
        call = made(turn, answer["prompt_token_ids"], choice["token_ids"])
        call.images, call.messages, call.message = images, messages, choice["message"]
        assert (plan.parent, plan.images) == (turn - 1 if turn else None, names[: len(images)])
        history.add(call, plan)
        assert call.flags == []
        messages = [*messages, choice["message"]]
    assert [image.grid for image in call.images] == [(1, 2, 6)] * 3
    # The last turn showed nothing new: nothing was rendered for it.
    assert eyes.paths == ["render", "generate", "render", "generate", "generate"]
    changed = copy.deepcopy(messages)
    changed[0]["content"][0] = picture(BLUE)
    plan = planned(history, *changed, asked("So?"))
    assert plan.parent is None


async def test_an_engine_that_puts_pictures_elsewhere_is_not_believed() -> None:
    def spoil(path: str, answer: Json) -> None:
        if path.endswith("generate"):
            answer["mm_placeholders"]["image"][0]["length"] -= 1

    form = seeing()
    eyes = Eyes(form, "A cat.")
    eyes.spoil = spoil
    client = Asking(eyes, client_for(ProbeResult(mode="tokens", model="tiny"), form))
    plan = planned(History(form, edits=(), think="template"), asked(RED))
    body = {"model": "m", "messages": [asked(RED)]}
    with pytest.raises(EngineGarbage):
        await client.whole(body, plan, rollout_id="r", timeout_seconds=9)


NAME = hashlib.sha256(RED).hexdigest()


def span(**changes: Any) -> Json:
    return {"sha256": NAME, "offset": 1, "length": 2} | changes


LIES: list[Any] = [
    [[span(offset=3)]],
    [[span(offset=0), span()]],
    [[span(sha256="0" * 64)]],
    [[span(offset="1")]],
    [["red"]],
    {"0": []},
]


@pytest.mark.parametrize("images", LIES)
def test_images_that_lie_are_refused_with_their_line(images: Any) -> None:
    line = {
        "tokens": [[1, TOKEN, TOKEN, 2]],
        "masks": [[-100, -100, -100, 2]],
        "scores": [1.0],
        "inference_logprobs": [[1.0, 1.0, 1.0, -0.5]],
        "images": [[span(grid=[1, 2, 6])]],
        "envserver": {
            "group_id": "g",
            "env": "math",
            "task_id": "t",
            "images": {NAME: base64.b64encode(RED).decode()},
            "rollouts": [{"rollout_id": "r", "rows": [0], "reward": 1.0}],
        },
    }
    (row,) = group_of(line, "groups.jsonl:1").rollouts[0].rows
    assert row.images[0].grid == (1, 2, 6)
    told = read_line(msgspec.json.encode(line), 1)
    assert told.findings == [] and told.rows[0].images == row.images
    line["images"] = images
    with pytest.raises(InputError, match=r"groups\.jsonl:1.*image"):
        group_of(line, "groups.jsonl:1")
    (finding,) = read_line(msgspec.json.encode(line), 1).findings
    assert (finding.kind, finding.line, finding.row) == ("images", 1, 0)


def test_different_images_never_have_one_name() -> None:
    """Also such as are no base64, which an engine may read in its own way."""
    broken = ["AAA", "BBB", "<svg%3E", "<svg>!", "iVBORw0KGgo=", "iVBORw0KGg=="]
    assert len({digest_of(f"data:image/png;base64,{text}") for text in broken}) == len(broken)


# Routed experts of calls are joined as their tokens are, and what does not fit is an error

LAYERS, EACH = 2, 3


def size_of(call: Call) -> int:
    return len(call.prompt_ids) + len(call.completion_ids)


def told(call: Call, start: int = 0) -> RoutedExperts:
    """What an engine tells: the numbers of the call and of the token."""
    table = np.zeros((max(0, size_of(call) - 1 - start), LAYERS, EACH), np.uint8)
    table[..., 0] = call.index
    table[..., 1] = (start + np.arange(len(table)))[:, None]
    return experts_from(table, start)


def first_that_computed(calls: list[Call], row: Sequence) -> list[int]:
    """The number of the call that gives the experts of each token, as far as they are known."""
    path = [next(call for call in calls if call.index == index) for index in row.path]
    known = [call for call in path if call.experts is not None]
    size = max((size_of(call) - 1 for call in known), default=0)
    return [next(call.index for call in known if at < size_of(call) - 1) for at in range(size)]


@settings(calm, max_examples=examples(80))
@given(forests(), st.data())
def test_each_token_has_the_experts_of_the_call_that_computed_it_first(
    calls: list[Call], data: st.DataObject
) -> None:
    """Whether a call tells all its tokens or only those that its parent lacks; some tell none."""
    exact = [call for call in calls if call.exact]
    asked: list[Call] = []
    for call, parent in zip(exact, find_parents(exact), strict=True):
        start = data.draw(st.sampled_from([0, first_unknown(asked[parent]) if parent >= 0 else 0]))
        silent = not size_of(call) or data.draw(st.integers(0, 5)) == 0
        asked.append(replace(call, experts=None if silent else told(call, start)))
    rows = build(asked)
    check(asked, rows)
    for row, plain in zip(rows, build(exact), strict=True):
        wanted = first_that_computed(asked, row)
        last = np.flatnonzero(row.mask)[-1]
        if len(wanted) < last or not any(call.experts for call in asked if call.index in row.path):
            assert row.experts is None
        else:
            assert row.experts is not None and row.experts.start == 0
            assert row.experts.table[:, 1, 0].tolist() == wanted
            assert row.experts.table[:, 0, 1].tolist() == [*range(len(wanted))]
            assert "experts_missing" not in row.flags
        assert pack(replace(row, experts=None, flags=plain.flags)) == pack(plain)


def test_a_row_says_that_experts_are_missing() -> None:
    first, second, third = talk()
    calls = [replace(first, experts=told(first)), second, replace(third, experts=told(third, 8))]
    (row,) = build(calls)
    assert row.experts is None and row.flags == ["experts_missing"]
    broken_off = replace(second, flags=["finish_abort"])
    (aborted,) = build([replace(first, experts=told(first)), broken_off])
    assert aborted.experts is not None  # none of the aborted answer is trained
    assert len(aborted.experts.table) == 2
    other = experts_from(np.zeros((size_of(second) - 1, LAYERS + 1, EACH), np.uint8))
    with pytest.raises(TokensError, match="shape"):  # another model's
        build([calls[0], replace(second, experts=other)])


GOOD = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
BAD = {
    "not base64": "!",
    "not an .npy file": base64.b64encode(b"hello").decode(),
    "cut off": table_to_text(GOOD)[:-8],
    "of numbers with fractions": table_to_text(GOOD.astype(np.float32)),  # type: ignore[arg-type]
    "negative": table_to_text(GOOD.astype(np.int32) - 1),  # type: ignore[arg-type]
    "of one token less": table_to_text(GOOD[:3]),
    "of one token more": table_to_text(np.concatenate([GOOD, GOOD[:1]])),
    "of very many experts": table_to_text(np.zeros((4, 2**16, 2), np.uint8)),
}


OF_VLLM = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDcsIDQs"
    "IDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoDAgAA"
    "AgMBBAMFAAAGAgEEBQYAAAIFAAIDAAAAAwABAwMAAAACAwQDAwUAAAMEAQIDAgAAAwABBg=="
)
"""By vLLM 0.32.0 on an H100: 7 tokens from token 100 on; 4 layers, the second without experts; 2 of
8 experts."""


def test_what_vllm_tells_is_read() -> None:
    table = read_experts(OF_VLLM, 108, 100).table
    assert (table.shape, table.dtype, table.max()) == ((7, 4, 2), np.uint8, 6)
    assert not table[:, 1].any()
    assert all((table[:, layer, 0] != table[:, layer, 1]).all() for layer in (0, 2, 3))


def test_an_engine_may_tell_all_or_what_was_asked_for_and_else_is_at_fault() -> None:
    for text in BAD.values():
        with pytest.raises(EngineGarbage, match="engine"):
            read_experts(text, 5, 0)
    assert read_experts(table_to_text(GOOD), 5, 3).start == 0
    assert read_experts(table_to_text(GOOD), 9, 4).start == 4
    signed = io.BytesIO()
    np.save(signed, GOOD.astype(np.int32) + 300)
    table = table_from_text(base64.b64encode(signed.getvalue()).decode())
    assert table.dtype == np.uint16 and np.array_equal(table, GOOD.astype(np.uint16) + 300)


def test_calls_kept_as_json_leave_them_out() -> None:
    calls = [replace(each, experts=told(each)) for each in talk()]
    kept = kept_calls(trajectory("r", calls=pack_calls(calls, find_parents(calls))))
    again = calls_in(json.loads(json.dumps(kept)))
    assert [call.experts for call in again] == [None, None, None]
    assert again[2].prompt_ids.tolist() == calls[2].prompt_ids.tolist()
