"""Opens the places of stored groups: files, folders, standard input, a store, a server.

In: one source as text. Out: `RawGroup`s, each an undecoded group and its place; the reader decodes
them, so that it can skip a bad one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx
import msgspec
import orjson
from envserver_records.errors import ConflictError, InputError, NotFoundError
from envserver_records.records import Group, unpack
from envserver_records.servers import ServersClient
from envserver_records.urls import authorization
from envserver_records.wire import GROUP_MSGPACK, WireGroup

from ..store.compression import DamagedBody, decode
from ..store.reading import StoreReader, open_reader
from ..store.rows import GroupRow
from .jsonl import group_line
from .stored_files import OnBytes, RawGroup, file_groups, files_of, lines_of

SERVERS = ("http://", "https://")
DATABASES = ("postgresql://", "postgres://", "sqlite://")
_SQLITE = b"SQLite format 3\0"


def open_source(source: str, on_bytes: OnBytes | None = None) -> Iterator[RawGroup]:
    """Yields the groups of one source.

    Args:
        on_bytes: called now and then with the number of further bytes read.
    """
    if source.startswith(SERVERS):
        return of_server(source)
    if source.startswith(DATABASES) or is_sqlite(Path(source)):
        return of_database(source)
    if source == "-":
        return lines_of(sys.stdin.buffer, "standard input")
    return (raw for path in files_of(source) for raw in file_groups(path, on_bytes))


def size_of(sources: Sequence[str]) -> int | None:
    """Returns the bytes of all `sources` on disk; None where one has no size."""
    if any(one == "-" or one.startswith((*SERVERS, *DATABASES)) for one in sources):
        return None
    if any(is_sqlite(Path(one)) for one in sources):
        return None
    return sum(path.stat().st_size for one in sources for path in files_of(one))


def is_sqlite(path: Path) -> bool:
    """Returns whether `path` is a database of SQLite."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def line_of(body: bytes, format: str, env: str, group_id: str, place: str) -> dict[str, Any]:
    """Returns the JSON of a group.

    Args:
        format: "group" (ours) or "atropos" (posted by another program).
    """
    try:
        if format == "group":
            group = unpack(body, Group)
            data = group_line(
                group, include_messages=True, score_range="unit", include_actions=True
            )
            return dict(orjson.loads(data))
        if format == "atropos":
            return {**orjson.loads(body), "env_id": env, "group_id": group_id}
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise InputError(f"{place} cannot be read: {error}.", place=place) from error
    raise InputError(f"{place} has the unknown format {format!r}.", place=place)


_PAGE: Final = 256
_SECONDS: Final = 60.0
_NOT_DELIVERED: Final = ("buffered", "dropped")


def of_server(url: str) -> Iterator[RawGroup]:
    """Yields delivered and waiting groups; sends the token of ENVSERVER_TOKEN."""
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


_ROWS: Final = 64
_Found = tuple[GroupRow, bytes | Exception, str]
"""A group, its body or why it cannot be read, and the name of the store."""


def of_database(where: str) -> Iterator[RawGroup]:
    """Yields the groups that the store at `where` (path or URL) still keeps, oldest first."""
    reading = _reading(where)
    # In a separate thread: the caller may be in an event loop.
    with ThreadPoolExecutor(1) as thread:
        loop = asyncio.new_event_loop()

        def step() -> _Found | None:
            return loop.run_until_complete(anext(reading, None))

        try:
            while (found := thread.submit(step).result()) is not None:
                yield _raw_of_row(*found)
        finally:
            thread.submit(loop.run_until_complete, reading.aclose()).result()
            thread.submit(loop.close).result()


def _raw_of_row(row: GroupRow, body: bytes | Exception, name: str) -> RawGroup:
    place = f"group {row.group_id} of {name}"

    def decoded() -> Any:
        if isinstance(body, Exception):
            raise InputError(f"{place} is damaged: {body}.", place=place) from body
        return line_of(body, row.format, row.env, row.group_id, place)

    return RawGroup(place, decoded)


async def _reading(where: str) -> AsyncGenerator[_Found, None]:
    async with open_reader(where) as reader:
        after = 0
        while rows := await reader.arrived_after(after, _ROWS):
            for row in rows:
                if row.state not in _NOT_DELIVERED and (found := await _body(reader, row)):
                    yield row, found[0], reader.name
            after = rows[-1].seq


async def _body(reader: StoreReader, row: GroupRow) -> list[bytes | Exception]:
    """Returns the body; none where it was removed meanwhile."""
    try:
        ((encoding, stored),) = await reader.stored_bodies([row.group_id])
    except NotFoundError:
        return []
    try:
        return [decode(encoding, stored)]
    except DamagedBody as error:
        return [error]
