"""Calls the model at `run.base_url` from threads: one HTTP connection, typed errors."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
from envserver_records import http_errors
from envserver_records.tasks import Json

from envserver import EngineError, LimitReached, Message, Rollout

_TRIES = 2


class CutOff(Exception):
    """The model's turn was longer than it may be."""


@dataclass(frozen=True)
class Turn:
    """One answer of the model: its message as sampled, and its token counts."""

    message: Message
    tokens: tuple[int, int]

    @property
    def calls(self) -> list[Json]:
        return self.message.get("tool_calls") or []


class Endpoint:
    """Requests one turn after the other. `stop_at` is the `time.time()` after which none is sent;
    `extra`: additional fields of each request; `token_budget`: of all turns together."""

    def __init__(
        self,
        run: Rollout,
        *,
        stop: tuple[str, ...] = (),
        tools: list[Json] | None = None,
        token_budget: int | None = None,
        stop_at: float = float("inf"),
        extra: Json | None = None,
    ) -> None:
        self.model = run.model
        self._common: Json = {"model": run.model}
        if stop:
            self._common["stop"] = list(stop)
        if tools:
            self._common["tools"] = tools
        self.extra = extra or {}
        self._tokens_left = token_budget
        self._stop_at = stop_at
        self._connection = _Proxy(run.base_url, run.api_key)

    def turn(self, messages: list[Message], **fields: Any) -> Turn:
        body = {**self._common, "messages": messages, **self.extra, **fields}
        if self._tokens_left is not None:
            if self._tokens_left <= 0:
                raise _budget_is_spent()
            body["max_tokens"] = self._tokens_left
        answer = self._connection.ask(body, self._stop_at)
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        written = int(usage.get("completion_tokens") or 0)
        if self._tokens_left is not None:
            self._tokens_left -= written
        if choice.get("finish_reason") == "length":
            is_spent = self._tokens_left is not None and self._tokens_left <= 0
            raise _budget_is_spent() if is_spent else CutOff
        return Turn(_whole(choice), (int(usage.get("prompt_tokens") or 0), written))

    def close(self) -> None:
        self._connection.close()


class _Proxy:
    """A connection to the proxy. A broken request is repeated with the same key: the proxy returns
    the answer that it has."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._connection = Connection(f"{base_url}/chat/completions")
        self._key = api_key
        self._closed = False

    def ask(self, body: Json, stop_at: float) -> Json:
        data = json.dumps(body).encode()
        headers = {
            "authorization": f"Bearer {self._key}",
            "content-type": "application/json",
            "idempotency-key": uuid.uuid4().hex,
        }
        for tries_left in reversed(range(_TRIES)):
            seconds = min(stop_at - time.time(), 86_400.0)
            if seconds <= 0 or self._closed:
                raise _is_over()
            try:
                status, content = self._connection.post(data, headers, seconds)
                break
            except TimeoutError:
                self._connection.close()
                raise _is_over() from None
            except OSError as error:
                self._connection.close()
                if not tries_left:
                    raise EngineError(f"The model's endpoint cannot be reached: {error}") from error
        if status != 200:
            raise http_errors.MODEL.read(status, content)
        try:
            answer: Json = json.loads(content)
        except ValueError as error:
            raise EngineError(f"The model's endpoint did not answer with JSON: {error}") from error
        return answer

    def close(self) -> None:
        self._closed = True
        self._connection.close()


def _whole(choice: Json) -> Message:
    message: Message = choice["message"]
    stop = choice.get("stop_reason")
    if not isinstance(stop, str):
        return message
    return {**message, "content": f"{message.get('content') or ''}{stop}"}


def _budget_is_spent() -> LimitReached:
    return LimitReached("The token budget is used up.", limit="tokens")


def _is_over() -> LimitReached:
    return LimitReached("The time of this rollout is used up.", limit="time")


_RECEIVE_BYTES = 65536


class Connection:
    """Connects when needed. Belongs to one thread; `close`, by which a waiting request fails, may
    be called from any. llhttp reads the answers: http.client takes a fifth more CPU, as it reads a
    head as an e-mail's."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._socket: socket.socket | None = None

    def post(self, body: bytes, headers: Mapping[str, str], seconds: float) -> tuple[int, bytes]:
        if self._socket is None:
            self._socket = self._connected(seconds)
        connected = self._socket
        connected.settimeout(seconds)
        fields = {"host": self._url.netloc, "content-length": str(len(body)), **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        connected.sendall(f"POST {self._url.path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        answer = _Answer()
        while not answer.is_complete:
            answer.feed(connected.recv(_RECEIVE_BYTES))
        if not answer.keeps_connection:
            self.close()
        return answer.status, b"".join(answer.parts)

    def close(self) -> None:
        connected, self._socket = self._socket, None
        if connected is not None:
            with contextlib.suppress(OSError):  # the server has closed it
                connected.shutdown(socket.SHUT_RDWR)
            connected.close()

    def _connected(self, seconds: float) -> socket.socket:
        is_tls = self._url.scheme == "https"
        address = self._url.hostname or "", self._url.port or (443 if is_tls else 80)
        connected = socket.create_connection(address, seconds)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not is_tls:
            return connected
        return ssl.create_default_context().wrap_socket(connected, server_hostname=address[0])


class _Answer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.status = 0
        self.is_complete = self.keeps_connection = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Raises ConnectionError at the end of the connection and at bytes that are not HTTP."""
        if not data:
            raise ConnectionError("the connection was closed")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ConnectionError(f"not an HTTP answer: {type(error).__name__}") from error

    # httptools

    def on_body(self, data: bytes) -> None:
        if not self.is_complete:
            self.parts.append(data)

    def on_message_complete(self) -> None:
        status = int(self._parser.get_status_code())
        if self.is_complete or status < 200:  # unasked; the answer is still to come
            self.keeps_connection = False
            return
        self.status, self.is_complete = status, True
        # Only now: the parser is then ready for another answer, and has forgotten this one.
        self.keeps_connection = bool(self._parser.should_keep_alive())
