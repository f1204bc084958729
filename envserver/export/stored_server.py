"""Reads the groups of a running server without leasing or consuming them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

import httpx
import msgspec
from envserver_records.errors import ConflictError, InputError, NotFoundError
from envserver_records.servers import ServersClient
from envserver_records.urls import authorization
from envserver_records.wire import GROUP_MSGPACK, WireGroup

from .stored_bodies import line_of
from .stored_raw import RawGroup

_PAGE: Final = 256
_SECONDS: Final = 60.0
_NOT_DELIVERED: Final = ("buffered", "dropped")


def of_server(url: str) -> Iterator[RawGroup]:
    """Yields delivered and waiting groups; sends the token of ENVSERVER_TOKEN.

    Raises:
        NotFoundError: no server answers, or it is another kind of server.
        ConflictError: it refuses.
    """
    # httpx fails on zstd in several frames
    headers = {"accept-encoding": "identity", **authorization()}
    with ServersClient(url, timeout=_SECONDS, headers=headers) as http:
        after: int | None = 0
        while after is not None:
            page = _get(http, url, f"/v1/groups?after={after}&limit={_PAGE}").json()
            for group in page["groups"]:
                if group["state"] not in _NOT_DELIVERED:
                    yield _raw(http, url, str(group["group_id"]))
            after = page["next"]


def _raw(http: httpx.Client, url: str, group_id: str) -> RawGroup:
    place = f"group {group_id} of {url}"

    def decoded() -> Any:
        answer = _get(http, url, f"/v1/groups/{quote(group_id, safe='')}", GROUP_MSGPACK)
        try:
            whole = msgspec.msgpack.decode(answer.content, type=WireGroup)
        except msgspec.DecodeError as error:
            raise InputError(f"{place} is not a group: {error}.", place=place) from error
        return line_of(bytes(whole.body), whole.format, whole.env, group_id, place)

    return RawGroup(place, decoded)


def _get(
    http: httpx.Client, url: str, path: str, accept: str = "application/json"
) -> httpx.Response:
    try:
        # Not zstd: a group is several frames of it, and httpx fails when one ends with a chunk.
        answer = http.get(path, headers={"accept": accept, "accept-encoding": "gzip"})
    except httpx.TransportError as error:
        why = error or type(error).__name__
        raise NotFoundError(f"No server answers at {url}: {why}.") from error
    if answer.status_code == httpx.codes.NOT_FOUND:
        hint = "Is it an envserver of this version?"
        raise NotFoundError(f"{url} has no {path}.", hint=hint)
    if not answer.is_success:
        raise ConflictError(
            f"{url} answered {path} with HTTP {answer.status_code}: {answer.text[:300]}",
            hint="ENVSERVER_TOKEN holds the token." if answer.status_code in (401, 403) else "",
        )
    return answer
