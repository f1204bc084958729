"""Reads request bodies and sends answers over ASGI, without a framework.

A body is read once, with a limit on its compressed and its inflated size, and parsed once.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Literal

import orjson
from envserver_records.errors import EnvserverError, InputError, LimitReached, TooLargeError
from envserver_records.http_errors import CONTEXT_IS_FULL

from ..models.connections import MAX_NESTING, nests_too_deeply
from .bounds import Hold

_SEQ_LEN = (
    r"max\w*[ _]seq(?:uence)?[ _]?len(?:gth)?|exceed\w*(?: the)? seq(?:uence)?[ _]?len(?:gth)?"
)
_FULL = re.compile(
    r"context[ _](?:length|size|window|limit)|max_model_len|maximum model length"
    r"|prompt is too long|maximum prompt length|input is too long|input token count"
    rf"|inputs\W+must have less than|inputs\W+tokens \+ \W?max_new_tokens|{_SEQ_LEN}",
    re.I,
)
_SUM = re.compile(r"(\d+) \+ (\d+) > (\d+)")
"""Prompt, answer and most: Anthropic's words."""
_MOST = re.compile(
    r"(?:context[ _](?:length|size|window|limit)|model length|maximum prompt length"
    rf"|\d(?: tokens)? >|must be <=|less than|tokens allowed|{_SEQ_LEN})[^\d]{{0,12}}(\d++)(?! >)",
    re.I,
)
_PROMPT = re.compile(
    r"\((\d+) in the messages|(\d+) (?:input tokens|tokens from the input)"
    r"|(?:input|request) \((\d+) tokens|\(length (\d+)\)|resulted in (\d+) tokens"
    r"|prompt (?:has|of) (\d+)|(\d+)(?: tokens)? > \d|Given: (\d+)|contains (\d+) tokens"
    r"|(?:token count|tokens) \((\d+)\)|(?:prompt|input) length (\d+)",
    re.I,
)
_ANSWER = re.compile(
    r"(\d+) (?:in the completion|output tokens|'max_tokens'|tokens for the completion|behind)", re.I
)
_KNOWN = "This model's maximum context length is"
"""How OpenAI's message begins: clients look for it."""


def context_limit(message: str) -> LimitReached | None:
    """Returns the limit that an engine's refusal `message` is about; None: another reason.

    The engine may be vLLM, SGLang, llama.cpp, TGI, OpenAI or another provider; agents' clients
    recognise the result and shorten their conversation. `detail` has the numbers that the message
    says.
    """
    if not _FULL.search(message):
        return None
    together = _SUM.search(message)
    prompt, answer, most = (
        map(int, together.groups())
        if together
        else (_number(pattern, message) for pattern in (_PROMPT, _ANSWER, _MOST))
    )
    found = {"prompt_tokens": prompt, "answer_tokens": answer, "context_tokens": most}
    numbers = {name: number for name, number in found.items() if number is not None}
    error = LimitReached(_as_clients_know_it(message, numbers), limit="context")
    error.detail |= numbers
    return error


def is_context_limit(error: EnvserverError) -> bool:
    return isinstance(error, LimitReached) and error.detail.get("limit") == "context"


def _number(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return int(found[found.lastindex or 0]) if found else None


def _as_clients_know_it(message: str, numbers: dict[str, int]) -> str:
    if _KNOWN.lower() in message.lower():
        return message
    prompt, most = numbers.get("prompt_tokens"), numbers.get("context_tokens")
    if prompt is None or most is None:
        return f"{_KNOWN} exceeded: {message}"
    answer = numbers.get("answer_tokens")
    if answer is not None and prompt <= most:
        requested = (
            f"you requested {prompt + answer} tokens ({prompt} in the messages, {answer} in the"
        )
        return f"{_KNOWN} {most} tokens. However, {requested} completion)."
    return f"{_KNOWN} {most} tokens. However, your messages resulted in {prompt} tokens."


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_MAX_COMMAS = 2_000_000
"""Bounds the number of values: one of three bytes takes 300 nanoseconds and 70 bytes to parse."""
_INFLATE_ON_LOOP_BYTES = 64 * 1024
"""Larger compressed bodies are inflated in a thread."""
_MAX_RATIO = 1032
"""Gzip makes nothing smaller than by this factor."""
HOLD = "envserver.hold"
"""Name in a scope of the Hold that counts the bytes of its request."""


class ClientGone(Exception): ...


_HEADERS = "envserver.headers"
"""Name in a scope of its headers by name; of equal names the first."""


def header(scope: Scope, name: bytes) -> str:
    headers: dict[bytes, bytes] | None = scope.get(_HEADERS)
    if headers is None:
        headers = scope[_HEADERS] = dict(reversed(scope["headers"]))
    return bytes(headers.get(name, b"")).decode("latin-1")


def header_number(text: str) -> int:
    """Returns the whole number in a header, or 0; a huge one becomes too large a number.

    Python refuses to read thousands of digits, and llhttp lets as many zeros through.
    """
    return int(text.lstrip("0")[:20] or 0) if text.isdecimal() else 0


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Reads the whole body, inflates it, and waits until the attempt may have it parsed."""
    hold: Hold = scope[HOLD]
    declared = header_number(header(scope, b"content-length"))
    if declared > max_bytes:
        raise _too_large(max_bytes)
    hold.cover(declared)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        hold.cover(size)
        parts.append(part)
        if not message.get("more_body", False):
            break
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    encoding = header(scope, b"content-encoding").strip().lower()
    if encoding in ("", "identity"):
        await hold.may_read()
        return body
    if encoding not in ("gzip", "x-gzip"):
        raise InputError(f"Bodies may be compressed with gzip, not with {encoding[:40]!r}.")
    hold.cover(size + min(max_bytes, size * _MAX_RATIO))
    if size > _INFLATE_ON_LOOP_BYTES:
        inflated = await asyncio.to_thread(inflate, body, max_bytes)
    else:
        inflated = inflate(body, max_bytes)
    hold.shrink(len(inflated))
    await hold.may_read()
    return inflated


def inflate(body: bytes, max_bytes: int) -> bytes:
    """Inflates gzip data of one or more members."""
    parts: list[bytes] = []
    left = max_bytes
    while body:
        member = zlib.decompressobj(wbits=31)
        try:
            part = member.decompress(body, left + 1)
        except zlib.error:
            raise InputError("The body is not gzip data, although its header says so.") from None
        left -= len(part)
        if left < 0:
            raise _too_large(max_bytes)
        if not member.eof:
            raise InputError("The gzip data of the body is cut off.")
        parts.append(part)
        body = member.unused_data
    return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    parsed = parse_unchecked(body)
    check_nesting(parsed, body)
    return parsed


def parse_unchecked(body: bytes) -> dict[str, Any]:
    """Returns the object in `body`, for `check_nesting`."""
    check_values(body)
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InputError(f"The body is not JSON: {error}.", place=f"byte {error.pos}") from None
    if not isinstance(parsed, dict):
        raise InputError("The body is not a JSON object.", place="$")
    return parsed


def check_nesting(parsed: dict[str, Any], body: bytes | None = None) -> None:
    """Raises TooLargeError if `parsed`, read from `body`, nests too deeply."""
    if nests_too_deeply(parsed, body):
        raise TooLargeError(f"The body nests deeper than {MAX_NESTING} levels.")


def check_values(body: bytes) -> None:
    """Raises TooLargeError if `body` may hold so many values that parsing it takes seconds."""
    if len(body) > _MAX_COMMAS and body.count(b",") > _MAX_COMMAS:
        raise TooLargeError(f"The body has too many values: over {_MAX_COMMAS} commas.")


def _too_large(max_bytes: int) -> TooLargeError:
    return TooLargeError(f"The body is over {max_bytes} bytes.")


async def send_json(
    send: Send, status: int, body: Any, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    await send_bytes(send, status, orjson.dumps(body), b"application/json", headers)


async def send_bytes(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    head = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_nothing(send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def start_events(send: Send) -> None:
    head = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": head})


async def send_events(send: Send, events: bytes) -> None:
    await send({"type": "http.response.body", "body": events, "more_body": True})


async def end_events(send: Send, events: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": events})


def event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error_body(error: EnvserverError, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "engine_error"
    known = CONTEXT_IS_FULL if is_context_limit(error) else error.kind
    facts = {
        "message": str(error),
        "type": kind,
        "param": error.detail.get("limit"),
        "code": code or known,
    }
    return {"error": facts}


def retrieve(future: asyncio.Future[Any]) -> None:
    """Marks the failure of a future as seen: nothing may be waiting for it."""
    if not future.cancelled():
        future.exception()


Reason = Literal["gone", "sealed", "time"]


class Interrupted(Exception):
    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


HANGUPS = "envserver.hangups"
"""Extension of a scope: the `Hangups` of its connection."""


class Hangups:
    """Reports when the client of one connection hangs up, without a task that waits for it."""

    def __init__(self) -> None:
        self._watching: set[Callable[[], None]] = set()
        self._gone = False

    def watch(self, on_gone: Callable[[], None]) -> None:
        if self._gone:
            asyncio.get_running_loop().call_soon(on_gone)
        else:
            self._watching.add(on_gone)

    def forget(self, on_gone: Callable[[], None]) -> None:
        self._watching.discard(on_gone)

    def gone(self) -> None:
        self._gone = True
        watching, self._watching = self._watching, set()
        for on_gone in watching:
            on_gone()


class Interrupts:
    """Cancels the enclosed block, which then raises `Interrupted`; use with `async with`.

    That is when the client hangs up ("gone"), after `seconds` ("time"), or when `interrupt` is
    called. `hangups`: those of the connection; None: `receive` reports them.
    """

    def __init__(
        self, receive: Receive, seconds: float | None, hangups: Hangups | None = None
    ) -> None:
        self._receive = receive
        self._hangups = hangups
        self._timeout = asyncio.timeout(seconds)
        self._watcher: asyncio.Task[None] | None = None
        self._reason: Reason | None = None
        self._open = False

    async def __aenter__(self) -> Interrupts:
        await self._timeout.__aenter__()
        self._open = True
        if self._hangups is not None:
            self._hangups.watch(self._gone)
        else:
            self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._open = False
        self.stop_watching()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise Interrupted(self._reason or "time") from None

    def interrupt(self, reason: Reason) -> None:
        """Ends the block now. The first reason given is kept."""
        if self._open and self._reason is None and not self._timeout.expired():
            self._reason = reason
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def stop_watching(self) -> None:
        """Call it before the end of the answer, which servers report as a hang-up."""
        if self._hangups is not None:
            self._hangups.forget(self._gone)
        # Its error would hold this object by its traceback, and both would be a cycle.
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._gone()

    def _gone(self) -> None:
        self.interrupt("gone")
