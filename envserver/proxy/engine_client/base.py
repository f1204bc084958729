"""The interface of engine clients, and what they share.

Bodies are in the format of OpenAI's chat API with vLLM's extra fields, and so are answers and
chunks: `prompt_token_ids` at the top; `token_ids`, `logprobs` and, if the engine reports them,
`weight_versions` and `routed_experts` in each choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from operator import itemgetter
from typing import Any, Protocol

import orjson
from envserver_records.errors import EngineGarbage, EngineTimeout
from envserver_records.records import Tokens

from ...models.connections import ECHOED
from ...models.engine import Engine, EngineRequest
from ...tokens.images import url_of

EXPERTS = "routed_experts"
"""vLLM's field of a choice: the experts of all its tokens but the last. No agent gets it."""
EXPERTS_START = "routed_experts_prompt_start"
"""vLLM's field of a request: the experts of so many first tokens are not asked for."""

ChatBody = dict[str, Any]
ChatAnswer = dict[str, Any]
Ids = Tokens | None
"""The ids of a planned prompt; None: the engine renders it."""


class EngineClient(Protocol):
    """Samples answers from an engine.

    What calls the engine raises only EngineError and its subclasses; EngineGarbage says what an
    answer lacks. All requests for one call go to the replica of `rollout_id`, and together they
    take at most `timeout_seconds`.
    """

    def can_continue(self, body: ChatBody) -> str | None:
        """Returns why a prompt of given ids cannot be combined with `body`, if so."""

    def streams(self, body: ChatBody, ids: Ids) -> bool:
        """Returns whether `stream` is possible and equals `whole`."""

    async def whole(
        self, session: EngineSession, body: ChatBody, ids: Ids, *, bare: bool = False
    ) -> ChatAnswer:
        """`bare`: tokens' texts and alternatives may be left out; their logprobs are read."""

    def stream(
        self, session: EngineSession, body: ChatBody, ids: Ids, *, bare: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[ChatAnswer]]:
        """Streams the answer as chunks. A stream that ends normally was complete."""


class EngineSession:
    """The requests of one call: to one replica, within `timeout_seconds` from now on."""

    def __init__(self, engine: Engine, rollout_id: str, timeout_seconds: float) -> None:
        self._engine = engine
        self._rollout_id = rollout_id
        self._now = asyncio.get_running_loop().time
        self._deadline = self._now() + timeout_seconds

    async def post(
        self, path: str, body: ChatBody, form: type | None = None, echo: bytes = b""
    ) -> ChatAnswer:
        return await self._engine.post(self._request(path, body, form, echo))

    def stream(
        self, path: str, body: ChatBody, form: type | None = None, echo: bytes = b""
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        return self._engine.stream(self._request(path, body, form, echo))

    def _request(self, path: str, body: ChatBody, form: type | None, echo: bytes) -> EngineRequest:
        seconds = self._deadline - self._now()
        if seconds <= 0:
            raise EngineTimeout("The engine did not answer in time.")
        return EngineRequest(path, body, self._rollout_id, seconds, form, echo)


def has_tools(body: ChatBody) -> bool:
    return bool(body.get("tools") or body.get("functions"))


def is_strict(tool: dict[str, Any]) -> bool:
    """Returns whether the engine enforces the schema of `tool` on its arguments while sampling."""
    function = tool.get("function")
    return bool(isinstance(function, dict) and function.get("strict"))


def top_logprobs(body: ChatBody) -> int:
    """Returns the number of alternatives wanted for each token; -1 for all."""
    wanted = body.get("top_logprobs")
    return wanted if isinstance(wanted, int) else 0


def max_tokens(body: ChatBody) -> int | None:
    newer = body.get("max_completion_tokens")
    limit: int | None = body.get("max_tokens") if newer is None else newer
    return limit


def has_media(body: ChatBody) -> bool:
    """Returns whether a message holds an image, audio or anything else that is not text."""
    for message in body.get("messages") or []:
        content = message.get("content")
        if isinstance(content, list) and any(_is_media(part) for part in content):
            return True
    return False


def has_only_images(body: ChatBody) -> bool:
    contents = [message.get("content") for message in body.get("messages") or []]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(url_of(part) is not None for part in parts if _is_media(part))


def _is_media(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") not in ("text", "input_text", "refusal")


def require(holder: Any, name: str, kind: type, where: str) -> Any:
    """Returns `holder[name]`, which must be a `kind`; `where` names the holder in the error."""
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise EngineGarbage(f"{where} holds no {name}.")
    return value


def require_ids(holder: Any, name: str, where: str) -> list[int]:
    """Returns `holder[name]`, which must be a list of token ids: the engine gets them again."""
    ids: list[int] = require(holder, name, list, where)
    if (
        not set(map(type, ids)) <= {int}
        or not 0 <= min(ids, default=0) <= max(ids, default=0) < 2**31
    ):
        raise EngineGarbage(f"{where} holds {name} that are not ids.")
    return ids


def choices_of(answer: ChatAnswer, count: int, where: str) -> list[dict[str, Any]]:
    """Returns the choices of a whole answer, ordered by index."""
    choices = require(answer, "choices", list, where)
    indices = [require(choice, "index", int, f"A choice in {where.lower()}") for choice in choices]
    if sorted(indices) != list(range(count)):
        raise EngineGarbage(f"{where} holds choices {indices}, not {count} from 0 on.")
    return sorted(choices, key=itemgetter("index"))


def index_of(choice: Any, count: int, where: str) -> int:
    index: int = require(choice, "index", int, where)
    if not 0 <= index < count:
        raise EngineGarbage(f"{where} holds choice {index}, not one of {count} from 0 on.")
    return index


def check_prompt(answer: ChatAnswer, sent: Tokens | list[int], where: str) -> None:
    """Checks that the engine saw what it was sent, and puts `sent` itself in its place."""
    is_echo = answer.get("prompt_token_ids") == ECHOED
    if not is_echo and not same_ids(require(answer, "prompt_token_ids", list, where), sent):
        raise EngineGarbage(f"{where} echoes a different prompt than was sent.")
    answer["prompt_token_ids"] = sent


def same_ids(seen: list[Any], sent: Tokens | list[int]) -> bool:
    return seen == (sent if isinstance(sent, list) else sent.tolist())


def dumped(ids: Tokens | list[int]) -> bytes:
    """Returns ids as JSON."""
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)


def check_ended(unfinished: set[int]) -> None:
    if unfinished:
        raise EngineGarbage(f"The engine's stream ended before its choices {sorted(unfinished)}.")


def chat_id(answer: ChatAnswer, field: str, prefix: str) -> str:
    """Returns the id of a chat answer: `answer[field]` with its `prefix` replaced."""
    return "chatcmpl-" + str(answer.get(field) or "").removeprefix(prefix)


def role_chunk(head: dict[str, Any], index: int) -> ChatAnswer:
    delta = {"role": "assistant", "content": ""}
    return {**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}


def chunk_head(id: str, created: int, model: Any) -> dict[str, Any]:
    return {"id": id, "object": "chat.completion.chunk", "created": created, "model": model}


def answer_fields(
    choice: dict[str, Any], ids: list[Any], logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "finish_reason": choice.get("finish_reason"),
        "stop_reason": choice.get("stop_reason"),
        "logprobs": logprobs,
        "token_ids": ids,
        **({EXPERTS: choice[EXPERTS]} if choice.get(EXPERTS) is not None else {}),
    }


PATH = "/v1/chat/completions"


class ChatClient:
    """For engines without a better mode, and calls that only they render: `ids` is None."""

    def can_continue(self, body: ChatBody) -> str | None:
        return "engine_renders"

    def streams(self, body: ChatBody, ids: Ids) -> bool:
        """With tools, a parsed stream may differ from the whole answer."""
        return not has_tools(body)

    async def whole(
        self, session: EngineSession, body: ChatBody, ids: Ids, *, bare: bool = False
    ) -> ChatAnswer:
        return await session.post(PATH, not_streamed(body))

    @asynccontextmanager
    async def stream(
        self, session: EngineSession, body: ChatBody, ids: Ids, *, bare: bool = False
    ) -> AsyncIterator[AsyncIterator[ChatAnswer]]:
        async with session.stream(PATH, streamed(body)) as chunks:
            yield chunks


def not_streamed(body: ChatBody) -> ChatBody:
    return {name: body[name] for name in body if name not in ("stream", "stream_options")}


def streamed(body: ChatBody) -> ChatBody:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}
