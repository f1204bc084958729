"""The judge in a scorer process: each call is one connection to the server's socket.

A frame is four bytes of length and JSON. A connection that the scorer closes, or that ends with its
process, ends the call.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from envserver_records.errors import ConfigError, Failure, JudgeError
from envserver_records.tasks import Message

from ..judge_interface import TRIES, JudgeReply

T = TypeVar("T")

MOST_BYTES = 64 << 20
"""Maximum size of one frame."""
LENGTH_BYTES = 4


class JudgeAddress(msgspec.Struct, frozen=True):
    """Where a scorer finds the judge: the socket's path, and a key that names the scorer."""

    path: str
    key: str


class JudgeRequest(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    messages: list[Message]
    attempt: int = 0
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)


class JudgeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The server's answer: `reply` or `failure`."""

    reply: JudgeReply | None = None
    failure: Failure | None = None


_answer = msgspec.json.Decoder(JudgeAnswer)


class ScorerJudge:
    """The Judge of a scorer process; without an address there is none."""

    def __init__(self, address: JudgeAddress | None) -> None:
        self._address = address
        self.failure: JudgeError | None = None
        """The last failure: a score that was made in spite of it must not count."""

    async def chat(
        self, messages: list[Message], *, attempt: int = 0, **sampling: Any
    ) -> JudgeReply:
        address, frame = self._framed(messages, attempt, sampling)
        try:
            reader, writer = await asyncio.open_unix_connection(address.path, limit=1 << 16)
            try:
                writer.write(frame)
                await writer.drain()
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
                body = await reader.readexactly(length)
            finally:
                writer.close()
        except (OSError, EOFError) as error:
            raise self._failed(_gone(error)) from error
        return self._reply(body)

    def chat_blocking(
        self, messages: list[Message], *, attempt: int = 0, **sampling: Any
    ) -> JudgeReply:
        address, frame = self._framed(messages, attempt, sampling)
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(address.path)
                connection.sendall(frame)
                with connection.makefile("rb") as stream:
                    length = int.from_bytes(_exactly(stream.read, LENGTH_BYTES))
                    body = _exactly(stream.read, length)
        except (OSError, EOFError) as error:
            raise self._failed(_gone(error)) from error
        return self._reply(body)

    async def ask(
        self,
        messages: list[Message],
        read: Callable[[str], T],
        *,
        tries: int = TRIES,
        **sampling: Any,
    ) -> T:
        reason = ""
        for attempt in range(tries):
            reply = await self.chat(messages, attempt=attempt, **sampling)
            try:
                return read(reply.content)
            except ValueError as error:
                reason = str(error)
        raise self._failed(_unreadable(tries, reason))

    def ask_blocking(
        self,
        messages: list[Message],
        read: Callable[[str], T],
        *,
        tries: int = TRIES,
        **sampling: Any,
    ) -> T:
        reason = ""
        for attempt in range(tries):
            reply = self.chat_blocking(messages, attempt=attempt, **sampling)
            try:
                return read(reply.content)
            except ValueError as error:
                reason = str(error)
        raise self._failed(_unreadable(tries, reason))

    def _framed(
        self, messages: list[Message], attempt: int, sampling: dict[str, Any]
    ) -> tuple[JudgeAddress, bytes]:
        if self._address is None:
            raise ConfigError(
                "This score needs a judge, and none is set.",
                hint="--judge.base_url names its engine (an OpenAI-compatible server).",
            )
        body = msgspec.json.encode(
            JudgeRequest(
                key=self._address.key, messages=messages, attempt=attempt, sampling=sampling
            )
        )
        if len(body) > MOST_BYTES:
            raise self._failed(
                JudgeError(f"A request to the judge has {len(body)} bytes, over {MOST_BYTES}.")
            )
        return self._address, framed(body)

    def _reply(self, body: bytes) -> JudgeReply:
        answer = _answer.decode(body)
        if answer.reply is not None:
            return answer.reply
        failure = answer.failure
        if failure is None or failure.kind != JudgeError.kind:
            message = failure.message if failure else "The server gave no answer."
            raise ConfigError(message, hint=failure.hint if failure else "")
        raise self._failed(JudgeError(failure.message, hint=failure.hint, **failure.detail))

    def _failed(self, error: JudgeError) -> JudgeError:
        self.failure = error
        return error


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES) + body


def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
    data = read(count)
    if len(data) < count:
        raise EOFError("the connection ended")
    return data


def _gone(error: Exception) -> JudgeError:
    return JudgeError(f"The server's judge cannot be reached: {error or type(error).__name__}.")


def _unreadable(tries: int, reason: str) -> JudgeError:
    return JudgeError(
        f"The judge gave no readable answer in {tries} tries. The last problem: {reason[:300]}",
        hint="Another model, or a higher judge.max_tokens, may follow the format.",
    )
