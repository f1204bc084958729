"""HTTP requests to the replicas of an engine, and what their answers and failures mean.

The HTTP client's errors leave this module as `RetryableError`. TCP keep-alive detects a peer whose
machine has vanished, however long an answer may take.

A client that may register an engine makes the server send prompts there. So cloud services
(link-local addresses and the like) are never engines, this machine is one only if no other client
can register, and only hosts that the settings allow get the engines' key. Names are resolved for
each connection, and each address is checked then.
"""

from __future__ import annotations

import asyncio
import difflib
import ipaddress
import secrets
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
import orjson
import structlog
from envserver_records.errors import (
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineUnavailable,
    InputError,
)
from envserver_records.http_errors import TRUST_HINT, without_page

from ..telemetry.tracing import current
from .http_client import (
    HttpError,
    HttpPool,
    NoConnection,
    NotHttp,
    NotTrusted,
    Response,
    header,
    origin_of,
)
from .replicas import Replica

_log = structlog.get_logger()
_SERVICES: Final = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "fd00:ec2::254"))
)
"""Metadata services of clouds that are not at link-local addresses."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class EngineAddresses:
    """The hosts at which engines may be registered.

    Args:
        allow: see `EnginesConfig.allow`.
        trusted: addresses of engines in the settings; their hosts are not checked at their ports.
        this_machine: whether loopback addresses may be engines that `allow` does not name.
    """

    def __init__(
        self, allow: Sequence[str], trusted: Collection[str] = (), *, this_machine: bool = True
    ) -> None:
        self._names: list[str] = []
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for host in allow:
            try:
                self._networks.append(ipaddress.ip_network(host, strict=False))
            except ValueError:
                self._names.append(host.lower())
        self._trusted = {_place(url) for url in trusted}
        self._this_machine = this_machine

    def trust(self, url: str) -> None:
        """Adds an address that the owner of this process names outside its settings."""
        self._trusted.add(_place(url))

    def gets_key(self, url: str) -> bool:
        """Whether the settings name the host of `url`, so that it may have the key."""
        return not self.is_checked(*_place(url))

    async def check(self, url: str) -> None:
        """Raises InputError if there may be no engine at this address."""
        host, port = _place(url)
        if not self.is_checked(host, port):
            return
        # The addresses of a name may be in an allowed network.
        if (self._names or self._networks) and _plain(host) is not None:
            raise _refused(host)
        try:
            entries = await _addresses_of(host, port)
        except (OSError, UnicodeError):
            raise InputError(f"There is no host {host[:100]!r}.", place="url") from None
        if not all(self.may_be(str(entry[4][0])) for entry in entries):
            raise _refused(host)

    async def resolve(self, host: str, port: int) -> list[Any]:
        """For connections: leaves out addresses that may not be engines."""
        entries = await _addresses_of(host, port)
        if not self.is_checked(host, port):
            return entries
        allowed = [entry for entry in entries if self.may_be(str(entry[4][0]))]
        if not allowed:
            raise OSError(None, "its address may not be that of an engine")
        return allowed

    def may_be(self, address: str) -> bool:
        """Whether a host that the settings do not name may have this address."""
        known = _plain(address)
        if known is None:
            return False
        if self._names or self._networks:
            return any(known in network for network in self._networks)
        if known.is_loopback:
            return self._this_machine
        is_service = known.is_link_local or known in _SERVICES
        return not (is_service or known.is_multicast or known.is_unspecified or known.is_reserved)

    def is_checked(self, host: str, port: int) -> bool:
        """Whether addresses of `host` are checked: the settings do not name it."""
        return not ((host, port) in self._trusted or self._names_host(host))

    def _names_host(self, host: str) -> bool:
        host = host.lower().removesuffix(".")
        known = _plain(host)
        if known is not None:
            return any(known in network for network in self._networks)
        return any(
            host.endswith(name[1:]) if name.startswith("*.") else host == name
            for name in self._names
        )


async def _addresses_of(host: str, port: int) -> list[Any]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _plain(address: str) -> Address | None:
    """The address, as IPv4 if it is mapped to IPv6; None if it is not an address."""
    try:
        known: Address = ipaddress.ip_address(address)
    except ValueError:
        return None
    mapped = known.ipv4_mapped if isinstance(known, ipaddress.IPv6Address) else None
    return mapped or known


def _refused(host: str) -> InputError:
    return InputError(
        f"No engine may be registered at {host[:100]!r}.",
        hint="--engines.allow lists the hosts at which engines may be registered.",
        place="url",
    )


MAX_NESTING = 100
_MOST_WRITTEN = 254
"""Levels that `orjson.dumps` writes; it raises for more (orjson's README)."""


def nests_too_deeply(value: Any, data: bytes | None = None) -> bool:
    """Whether `value`, parsed (from `data`, if that is given) by orjson, nests deeper than
    MAX_NESTING.

    Writing it inside enough lists to leave MAX_NESTING levels is faster than walking through it:
    answers with logprobs have a hundred objects.
    """
    if data is not None and data.count(b"[") + data.count(b"{") <= MAX_NESTING:
        return False
    for _ in range(_MOST_WRITTEN - MAX_NESTING):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False


MAX_REFUSAL_BYTES = 64 * 1024
_MAX_WORDS = 600
_MAX_NAMES = 10
_LEAST_SECRET = 4
"""Characters of a key that is hidden in messages; a shorter one is a placeholder."""
_MAX_NAME_CHARACTERS = 120
_KEY = "Set the key: OPENAI_API_KEY, or ENVSERVER_OPENAI__API_KEY, or openai.api_key in a file."
_HINTS = {
    401: _KEY,
    403: _KEY,
    404: "Check openai.base_url and openai.model_name.",
}


class Decoder:
    """`key` is removed from all messages."""

    def __init__(self, key: str) -> None:
        self._key = key

    def decode(self, data: bytes, form: type | None = None, echo: bytes = b"") -> dict[str, Any]:
        """Decodes `data` as a JSON object that is not an error.

        JSON is strict, with finite numbers: an engine that writes NaN for a logprob has computed
        nothing to train on.

        `form` is a TypedDict of the fields that are read, with `error` and `object`. If the data
        has this form, other fields are skipped, at half the cost; else all are decoded. Integers of
        over 64 bits do not fit it. `echo` (see `EngineRequest`) is compared instead of read.
        """
        short = _without_echo(data, echo)
        try:
            answer = None if form is None else _of_form(short, form)
            if answer is None:
                answer = orjson.loads(short)
                if nests_too_deeply(answer, short):
                    text = f"The engine's answer nests deeper than {MAX_NESTING} levels."
                    raise EngineGarbage(text)
        except orjson.JSONDecodeError:
            words = self.words(data[:MAX_REFUSAL_BYTES])
            raise EngineGarbage(f"The engine's answer is not JSON: {words}") from None
        if not isinstance(answer, dict):
            raise EngineGarbage("The engine's answer is not a JSON object.")
        error = answer.get("error")
        if error or answer.get("object") == "error":
            facts = error if isinstance(error, dict) else answer
            status = facts.get("code")
            if isinstance(status, int) and is_refusal(status):
                raise self.refused(status, data)
            raise EngineError(f"The engine failed: {self.words(data)}")
        return answer

    def refused(self, status: int, data: bytes) -> EngineRefused:
        message = f"The engine refused the request (HTTP {status}): {self.words(data)}"
        return EngineRefused(message, hint=_HINTS.get(status, ""), status=status)

    def failed(self, status: int, data: bytes) -> EngineError:
        kind = EngineError if status == 500 else EngineUnavailable
        return kind(f"The engine failed (HTTP {status}): {self.words(data)}", status=status)

    def words(self, data: bytes) -> str:
        """The engine's error message, shortened and without its key."""
        text = self._without_key(_error_message(data))
        if (brief := without_page(text)) != text:
            _log.debug("engine.page", page=text)
        return _shortened(brief, _MAX_WORDS)

    def models_hint(self, wanted: str, answer: dict[str, Any]) -> str:
        """Lists the models in an answer to `/v1/models`, names near `wanted` first; "" if it lists
        none, or `wanted` itself."""
        names = [self._without_key(name) for name in model_names(answer)]
        if not names or wanted in names:
            return ""
        near = difflib.SequenceMatcher(b=wanted.lower())

        def distance(name: str) -> float:
            near.set_seq1(name.lower()[:_MAX_NAME_CHARACTERS])
            return -near.ratio()

        nearest = sorted(names, key=distance)[:_MAX_NAMES]
        listed = ", ".join(_shortened(name, _MAX_NAME_CHARACTERS) for name in nearest)
        others = f" and {len(names) - len(nearest)} more" if len(names) > len(nearest) else ""
        return f"The engine has {listed}{others}: set openai.model_name."

    def _without_key(self, text: str) -> str:
        is_secret = len(self._key) >= _LEAST_SECRET  # "x" would be found in many words
        return text.replace(self._key, "***") if is_secret else text


@lru_cache(maxsize=16)
def _decoder_of(form: type) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(form)


ECHOED = f"echoed {secrets.token_hex(16)}"
"""In the place of prompt ids that are as expected; no engine can know it."""
_ECHO = b'"prompt_token_ids":'


def _without_echo(data: bytes, echo: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while echo and (found := data.find(_ECHO, at)) >= 0:
        begin = found + len(_ECHO)
        parts.append(data[at:begin])
        at = begin
        if data.startswith(echo, begin):
            parts.append(b'"%b"' % ECHOED.encode())
            at += len(echo)
    return b"".join([*parts, data[at:]]) if parts else data


def _of_form(data: bytes, form: type) -> dict[str, Any] | None:
    """The fields of `form` in `data`; None if it has another form."""
    try:
        found: dict[str, Any] = _decoder_of(form).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found


def is_refusal(status: int) -> bool:
    """Whether the request is at fault, so that every replica would refuse it."""
    return 400 <= status < 500 and status not in (408, 429)


def retry_after(headers: Mapping[str, str]) -> float:
    """The seconds of a Retry-After header (a number or a date); 0 without a usable one."""
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value[:9])
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def first_model(answer: dict[str, Any]) -> str:
    names = model_names(answer)
    if not names:
        raise EngineGarbage("The engine lists no model.", hint="Set openai.model_name.")
    return names[0]


def model_names(answer: dict[str, Any]) -> list[str]:
    """The models' names in an answer to `/v1/models`, without malformed entries."""
    models = answer.get("data")
    entries = models if isinstance(models, list) else []
    ids = [entry.get("id") for entry in entries if isinstance(entry, dict)]
    return [name for name in ids if isinstance(name, str)]


def _shortened(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[:characters] + "…"


def _error_message(data: bytes) -> str:
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.decode(errors="replace").strip() or "(no words)"
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or error
        body = error
    return body if isinstance(body, str) else data.decode()


Fault = Literal["refused", "failed", "busy"]
"""refused: no connection; failed: a bad answer or a broken connection; busy: the engine asks to
wait."""

_PEER_SECONDS = 60
"""A peer that acknowledges nothing for so long counts as gone."""
_MAX_ANSWER_BYTES = 512 * 1024 * 1024


class RetryableError(Exception):
    """The request failed with `error`, and a retry may succeed.

    Args:
        fault: what the failure says about the replica.
        wait_seconds: how long the replica asks to wait.
        other_replica: retry only on another replica.
    """

    def __init__(
        self,
        error: EngineError,
        fault: Fault = "failed",
        *,
        wait_seconds: float = 0.0,
        other_replica: bool = False,
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.fault: Fault = fault
        self.wait_seconds = wait_seconds
        self.other_replica = other_replica


class Connections:
    """The connections to all replicas; `key` is sent to those that may have it."""

    def __init__(self, key: str, decoder: Decoder, addresses: EngineAddresses) -> None:
        self._headers = b"content-type: application/json\r\n"
        authorization = header("authorization", f"Bearer {key}") if key else b""
        self._headers_with_key = self._headers + authorization
        self._addresses = addresses
        self._decoder = decoder
        self._pool: HttpPool | None = None

    async def __aenter__(self) -> Connections:
        self._pool = HttpPool(self._addresses.resolve, watchful_socket)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def open(
        self, replica: Replica, method: str, path: str, payload: bytes | None = None
    ) -> Exchange:
        """Opens the answer to one request, whatever its status; use with `async with`."""
        if self._pool is None:
            raise EngineUnavailable("The engine's connections are closed.")
        headers = self._headers_with_key if replica.gets_key else self._headers
        if traceparent := current().traceparent:
            headers += header("traceparent", traceparent)
        return Exchange(self._pool, replica, (method, path, headers, payload))

    async def check(self, replica: Replica, response: Response) -> None:
        """Raises unless the status of `response` is 2xx."""
        status = response.status
        if 200 <= status < 300:
            return
        if 300 <= status < 400:
            where = self._decoder.words(response.headers.get("location", "").encode())
            raise EngineUnavailable(
                f"The engine's address {replica.url} redirects (HTTP {status}) to {where}.",
                hint="Set openai.base_url to the engine's own address: no redirect is followed.",
                status=status,
                base_url=replica.url,
            )
        data = await whole(response, MAX_REFUSAL_BYTES, cut=True)
        if is_refusal(status):
            raise self._decoder.refused(status, data)
        seconds = retry_after(response.headers)
        # An engine that names a time or a rate limit is working.
        busy = status in (408, 429) or seconds > 0
        if seconds:
            replica.busy(seconds)
        error = self._decoder.failed(status, data)
        raise RetryableError(error, "busy" if busy else "failed", wait_seconds=seconds)


class Exchange:
    def __init__(
        self, pool: HttpPool, replica: Replica, request: tuple[str, str, bytes, bytes | None]
    ) -> None:
        self._pool = pool
        self._replica = replica
        self._request = request
        self._response: Response

    async def __aenter__(self) -> Response:
        try:
            self._response = await self._pool.send(origin_of(self._replica.url), *self._request)
        except HttpError as error:
            raise _retryable(self._replica, error) from None
        return self._response

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._response.release()
        if isinstance(error, HttpError):
            raise _retryable(self._replica, error) from None


async def whole(
    response: Response, max_bytes: int = _MAX_ANSWER_BYTES, *, cut: bool = False
) -> bytes:
    """The body; one of over `max_bytes` raises EngineGarbage, or with `cut` ends about there."""
    parts: list[bytes] = []
    size = 0
    while part := await response.read():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            if cut:
                break
            raise EngineGarbage(f"The engine's answer is over {max_bytes} bytes.")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _retryable(replica: Replica, error: HttpError) -> RetryableError:
    at = f"The engine at {replica.url}"
    if isinstance(error, NoConnection):
        message = f"{at} cannot be reached: {error}."
        hint = TRUST_HINT if isinstance(error, NotTrusted) else ""
        return RetryableError(
            EngineUnavailable(message, hint=hint, base_url=replica.url), "refused"
        )
    if isinstance(error, NotHttp):
        message = f"{at} does not speak HTTP: {error}."
        return RetryableError(EngineGarbage(message, base_url=replica.url), other_replica=True)
    message = f"{at} closed the connection before its answer."
    return RetryableError(EngineGarbage(message, base_url=replica.url))


@contextmanager
def read_by(deadline: float, response: Response, replica: Replica) -> Iterator[None]:
    """For reads of the body: TimeoutError from the loop's time `deadline` on, else RetryableError.

    One timer serves a whole stream, which may have thousands of reads.
    """
    timer = asyncio.get_running_loop().call_at(deadline, response.fail, TimeoutError())
    try:
        yield
    except HttpError as error:
        raise _retryable(replica, error) from None
    finally:
        timer.cancel()


def watchful_socket(address: tuple[Any, ...]) -> socket.socket:
    """Returns a socket for `address` (of getaddrinfo) that notices when its peer is gone.

    A machine that lost power, or a router that dropped an idle connection, sends nothing; but a
    valid answer may also take minutes of silence.
    """
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _PEER_SECONDS // 2,
        "TCP_KEEPINTVL": _PEER_SECONDS // 6,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": _PEER_SECONDS * 1000,
    }
    for name, value in options.items():
        # Not every system has all of them.
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseParser:
    """Parses server-sent events from chunks, cut anywhere.

    Follows the HTML standard: lines end in LF, CRLF or CR; several `data` lines are joined by LF;
    comments and other fields are ignored. A line or event over `max_event_bytes` is EngineGarbage.
    """

    def __init__(self, max_event_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._at_start = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that `chunk` completes."""
        # A line that has no end yet is put together only once: it may come in thousands of chunks.
        undecided = self._at_start or (bool(self._rest) and self._rest[-1].endswith(b"\r"))
        self._keep(chunk)
        if not undecided and b"\n" not in chunk and b"\r" not in chunk:
            self._check_size()
            return []
        text = b"".join(self._rest)
        if self._at_start:
            if len(text) < 3 and _BYTE_ORDER_MARK.startswith(text):
                return []
            self._at_start = False
            text = text.removeprefix(_BYTE_ORDER_MARK)
        # A CR at the very end may be the first half of a CRLF: it waits for the next chunk.
        held = b"\r" if text.endswith(b"\r") else b""
        if b"\r" in text:
            text = text.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._rest, self._rest_bytes = [], 0
        self._keep(rest + held)
        events = [event for line in lines if (event := self._line(line)) is not None]
        self._check_size()
        return events

    def close(self) -> list[bytes]:
        """Returns the last event if the stream ended without the empty line after it."""
        rest = b"".join(self._rest).rstrip(b"\r")
        return [event for line in (rest, b"") if (event := self._line(line)) is not None]

    def _keep(self, rest: bytes) -> None:
        if rest:
            self._rest.append(rest)
            self._rest_bytes += len(rest)

    def _check_size(self) -> None:
        if self._rest_bytes + self._data_bytes > self._max_event_bytes:
            raise EngineGarbage(f"The engine sent an event of over {self._max_event_bytes} bytes.")

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            if not self._data:
                return None
            event = b"\n".join(self._data)
            self._data, self._data_bytes = [], 0
            return event
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value)
        return None
