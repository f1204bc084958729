"""Converts answers of /inference/v1/generate to chat answers and chunks. Pure.

Unlike chat, the endpoint lists at least the sampled token among the alternatives, and its streams
begin with the first token instead of a chunk for the role.
"""

from __future__ import annotations

import base64
import binascii
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict

import msgspec
import numpy as np
import orjson
from envserver_records.errors import EngineGarbage
from envserver_records.records import Message, Tokens

from ...tokens.images import Range, folded, folds_to
from .base import (
    ChatAnswer,
    ChatBody,
    answer_fields,
    chat_id,
    check_ended,
    check_prompt,
    choices_of,
    chunk_head,
    index_of,
    require,
    role_chunk,
    same_ids,
    top_logprobs,
)

Grid = tuple[int, ...]
_NAME = "image_grid_thw"
_MOST_GRIDS = 4096
_INTEGERS = ("int32", "int64")


class Grids:
    """The grids of the images that were rendered last, by their SHA-256."""

    def __init__(self) -> None:
        self._grids: OrderedDict[str, Grid] = OrderedDict()

    def lack(self, digests: Sequence[str]) -> bool:
        return any(digest not in self._grids for digest in digests)

    def learn(self, digests: Sequence[str], rendered: ChatAnswer) -> None:
        facts = _items(rendered.get("features"), len(digests))
        for digest, item in zip(digests, facts, strict=True):
            self._grids[digest] = _grid(item)
        while len(self._grids) > _MOST_GRIDS:
            self._grids.popitem(last=False)

    def of(self, digests: Sequence[str]) -> list[Grid]:
        """Returns the grid of each image; () if it is unknown."""
        return [self._grids.get(digest, ()) for digest in digests]


def _items(features: Any, count: int) -> list[Any]:
    """Returns vLLM's serialised facts for each image: without pixels, if it gives those."""
    for name in ("mm_metadata", "kwargs_data"):
        feature = features.get(name) if isinstance(features, dict) else None
        items = feature.get("image") if isinstance(feature, dict) else None
        if isinstance(items, list) and len(items) == count and all(items):
            return items
    return [None] * count


def _grid(item: Any) -> Grid:
    """Reads the grid from an item: base64 of MessagePack, {name: {"data": (dtype, shape, bytes)}}.

    An engine of another version may write it otherwise; trainers compute it from the image then.
    """
    if not isinstance(item, str):
        return ()
    try:
        kind, _, raw = msgspec.msgpack.decode(base64.b64decode(item))[_NAME]["data"]
        if kind not in _INTEGERS:
            return ()
        return tuple(np.frombuffer(raw.data, kind).tolist())
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error, msgspec.DecodeError):
        return ()


IMAGES = "prompt_images"
"""Field of an answer: offset, length and grid of each image in its prompt. No agent gets it."""
_WHERE = "The engine's generated answer"
_CHUNK = "A chunk of the engine's generated stream"


_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""No other integers can be written as JSON again."""
_Number = _Int | float | None


class _Score(msgspec.Struct, gc=False):
    logprob: float | None


class _Scores(TypedDict):
    content: list[_Score] | None


class _Choice(TypedDict, total=False):
    index: _Id
    text: str
    token_ids: list[_Id]
    logprobs: _Scores | None
    finish_reason: str | None
    stop_reason: _Int | str | None
    weight_versions: Any
    routed_experts: Any


class BareGenerated(TypedDict, total=False):
    """A whole answer without texts and alternatives of tokens, which most agents do not want."""

    request_id: str | None
    created: _Number
    model: str | None
    choices: list[_Choice]
    usage: dict[str, _Number | dict[str, _Number]]
    prompt_token_ids: Any
    prompt_logprobs: None
    mm_placeholders: Any
    error: Any
    object: Any


class BareGeneratedChunk(TypedDict, total=False):
    """A chunk of a stream; the first has the prompt."""

    request_id: str | None
    choices: list[_Choice]
    usage: dict[str, _Number | dict[str, _Number]] | None
    prompt_token_ids: Any
    mm_placeholders: Any
    error: Any
    object: Any


class SentPrompt(NamedTuple):
    """The ids of a prompt as they were sent, with one `image_token` for each image.

    `grids`: of its images; `json`: the ids as they were written.
    """

    ids: Tokens | list[int]
    image_token: int | None = None
    grids: Sequence[Grid] = ()
    json: bytes = b""

    @property
    def echo(self) -> bytes:
        """What an engine repeats: where there are images, not the ids that it was sent."""
        return b"" if self.grids else self.json

    def check(self, answer: ChatAnswer, where: str) -> list[Range]:
        if not self.grids or self.image_token is None:
            check_prompt(answer, self.ids, where)
            return []
        seen: list[int] = require(answer, "prompt_token_ids", list, where)
        ranges = image_ranges(answer, where)
        if (
            len(ranges) != len(self.grids)
            or not folds_to(seen, ranges, self.image_token)
            or not same_ids(folded(seen, ranges, self.image_token), self.ids)
        ):
            raise EngineGarbage(f"{where} echoes a different prompt than was sent.")
        return ranges

    def placed(self, ranges: Sequence[Range]) -> ChatAnswer:
        """Returns the field of an answer that says where the images are, if any."""
        images = [[*place, grid] for place, grid in zip(ranges, self.grids, strict=True)]
        return {IMAGES: images} if images else {}


def image_ranges(holder: ChatAnswer, where: str) -> list[Range]:
    places = require(require(holder, "mm_placeholders", dict, where), "image", list, where)
    return [
        (require(place, "offset", int, where), require(place, "length", int, where))
        for place in places
    ]


def count_of(body: ChatBody) -> int:
    count = body.get("n")
    return count if isinstance(count, int) else 1


class GeneratedAnswer:
    """A checked whole answer to a request for text that echoes its prompt."""

    def __init__(
        self, answer: ChatAnswer, body: ChatBody, sent: SentPrompt, *, is_bare: bool = False
    ) -> None:
        self._is_bare = is_bare
        self._images = sent.placed(sent.check(answer, _WHERE))
        self.prompt_ids: Tokens | list[int] = answer["prompt_token_ids"]
        self.prompt_json: Any = self.prompt_ids
        """`prompt_ids` to be sent again."""
        if self.prompt_ids is sent.ids and sent.json:
            self.prompt_json = orjson.Fragment(sent.json)
        self._answer = answer
        self._body = body
        self.choices = choices_of(answer, count_of(body), _WHERE)
        for choice in self.choices:
            require(choice, "token_ids", list, _WHERE)
            require(choice, "text", str, _WHERE)

    def with_messages(self, messages: Sequence[Message]) -> ChatAnswer:
        return {
            "id": _id(self._answer),
            "object": "chat.completion",
            "created": self._answer.get("created") or 0,
            "model": self._answer.get("model") or self._body.get("model"),
            "choices": [
                {
                    "index": choice["index"],
                    "message": message,
                    **_facts(choice, self._body, _WHERE, self._is_bare),
                }
                for choice, message in zip(self.choices, messages, strict=True)
            ],
            "usage": require(self._answer, "usage", dict, _WHERE),
            "prompt_token_ids": self.prompt_ids,
            **self._images,
            "prompt_logprobs": self._answer.get("prompt_logprobs"),
        }


async def chunks_of(
    stream: AsyncIterator[ChatAnswer],
    body: ChatBody,
    sent: SentPrompt,
    created: int,
    *,
    is_bare: bool = False,
) -> AsyncIterator[ChatAnswer]:
    count = count_of(body)
    head: dict[str, Any] = {}
    unfinished = set(range(count))
    async for chunk in stream:
        if not head:
            first = sent.placed(sent.check(chunk, _CHUNK))
            first["prompt_token_ids"] = chunk["prompt_token_ids"]
            head = chunk_head(_id(chunk), created, body.get("model"))
            for index in range(count):
                yield {**role_chunk(head, index), **(first if index == 0 else {})}
        for choice in require(chunk, "choices", list, _CHUNK):
            index = index_of(choice, count, _CHUNK)
            text = require(choice, "text", str, _CHUNK)
            require(choice, "token_ids", list, _CHUNK)
            delta = {"content": text} if text else {}
            facts = _facts(choice, body, _CHUNK, is_bare)
            if facts["finish_reason"]:
                unfinished.discard(index)
            yield {**head, "choices": [{"index": index, "delta": delta, **facts}]}
        if not chunk["choices"]:
            yield {**head, "choices": [], "usage": require(chunk, "usage", dict, _CHUNK)}
    check_ended(unfinished)


def _id(answer: ChatAnswer) -> str:
    return chat_id(answer, "request_id", "generate-tokens-")


def _facts(choice: dict[str, Any], body: ChatBody, where: str, is_bare: bool) -> dict[str, Any]:
    logprobs = _logprobs(choice, body, where, is_bare) if body.get("logprobs") else None
    facts = answer_fields(choice, choice["token_ids"], logprobs)
    if choice.get("weight_versions") is not None:
        facts["weight_versions"] = require(choice, "weight_versions", list, where)
    return facts


def _logprobs(
    choice: dict[str, Any], body: ChatBody, where: str, is_bare: bool
) -> dict[str, Any] | None:
    if not choice["token_ids"] and choice.get("logprobs") is None:
        return None
    logprobs: dict[str, Any] = require(choice, "logprobs", dict, where)
    content, wanted = require(logprobs, "content", list, where), top_logprobs(body)
    try:
        # What has another form, or came from an engine that knows no forms, is there as a whole.
        if is_bare and not (content and isinstance(content[0], dict)):
            return {"token_logprobs": [entry.logprob for entry in content]}
        for entry in content if wanted >= 0 else ():
            entry["top_logprobs"] = entry["top_logprobs"][:wanted]
    except (TypeError, KeyError, AttributeError):
        raise EngineGarbage(f"{where} holds a token without its logprobs.") from None
    return logprobs
