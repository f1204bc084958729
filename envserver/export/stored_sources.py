"""Opens the places of stored groups: files, folders, standard input, a store, a server.

Groups come undecoded (`RawGroup`), so that a reader can skip a bad one.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import gzip
import io
import sys
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec
import orjson
import structlog
from envserver_records.errors import ConflictError, InputError, NotFoundError
from envserver_records.http_errors import authorization
from envserver_records.records import Group, unpack
from envserver_records.servers import ServersClient
from envserver_records.wire import GROUP_MSGPACK, NATIVE, WireGroup
from envserver_records.zstd import zstd

from ..store.lookups import StoreReader, open_reader
from ..store.packed import DamagedBody, decode
from ..store.rows import GroupRow
from .jsonl import group_line


@dataclass(frozen=True)
class RawGroup:
    """An undecoded group; `decoded` raises InputError where it is not JSON."""

    place: str
    decoded: Callable[[], Any]


log = structlog.get_logger()

OnBytes = Callable[[int], None]

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""Suffixes of the files that are read in a folder."""
_BUFFER = 1 << 20


def files_of(source: str) -> list[Path]:
    """Returns the JSONL files of groups that a path, a folder or a glob names, sorted."""
    path = Path(source)
    if path.is_file() or path.is_fifo():
        return [path]
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.name.endswith(ENDINGS)]
        found = [file for file in found if not file.name.startswith(".") and not _about_tasks(file)]
    else:
        found = [Path(place) for place in sorted(glob.glob(source, recursive=True))]  # noqa: PTH207
    files = [path for path in found if path.is_file() and ".failures.jsonl" not in path.name]
    if not files:
        what = "no .jsonl file in it" if path.is_dir() else "no such file, folder or store"
        raise NotFoundError(f"{source}: there is {what}.")
    return files


def _about_tasks(path: Path) -> bool:
    name = path.name
    return name.startswith("tasks") and path.with_name(f"groups{name[5:]}").exists()


@contextlib.contextmanager
def opened(path: Path, on_bytes: OnBytes | None = None) -> Iterator[IO[bytes]]:
    try:
        counted = None if on_bytes is None else io.BufferedReader(_Counted(path, on_bytes), _BUFFER)
        file: Any = path.open("rb") if counted is None else counted
    except OSError as error:
        raise NotFoundError(f"{path} cannot be opened: {error.strerror}.") from error
    with file:
        if path.name.endswith(".gz"):
            file = gzip.GzipFile(fileobj=file)
        elif path.name.endswith(".zst"):
            file = zstd.ZstdFile(file)
        try:
            yield file
        except (EOFError, zlib.error, zstd.ZstdError, gzip.BadGzipFile) as error:
            raise InputError(f"{path} is damaged or cut off: {error}.", place=str(path)) from error


class _Counted(io.FileIO):
    def __init__(self, path: Path, on_bytes: OnBytes) -> None:
        super().__init__(path, "rb")
        self._on_bytes = on_bytes

    def readinto(self, buffer: Any) -> int | None:
        number = super().readinto(buffer)
        self._on_bytes(number or 0)
        return number


T = TypeVar("T")


def records(path: Path, kind: type[T], what: str, *, may_be_torn: bool = False) -> Iterator[T]:
    """Yields the lines of a file, each decoded as `kind`; an error names the place of one that is
    not `what`, unless it is the unfinished last one of a file that `may_be_torn`."""
    decoder = msgspec.json.Decoder(kind)
    with contextlib.ExitStack() as stack:
        try:
            lines = stack.enter_context(opened(path))
        except NotFoundError as error:
            reason = getattr(error.__cause__, "strerror", "")
            raise InputError(f"{path} cannot be read: {reason}.", place=str(path)) from error
        for number, line in enumerate(lines, 1):
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                if may_be_torn and not line.endswith(b"\n"):
                    return  # its writer was killed, or is at it
                raise InputError(
                    f"{path}, line {number} is not {what}: {error}.", place=f"line {number}"
                ) from error


def lines_of(file: IO[bytes], name: str) -> Iterator[RawGroup]:
    """Yields the groups of an open file; skips an unfinished last line with a warning."""
    for number, line in enumerate(file, 1):
        place = f"{name}, line {number}"
        if not line.endswith(b"\n") and not is_json(line):
            log.warning("stored.torn_line", place=place, size=len(line))
            return
        if line.strip():
            yield RawGroup(place, lambda line=line, place=place: decoded(line, place))  # type: ignore[misc]


def decoded(line: bytes, place: str) -> Any:
    """Returns the JSON value of a line; raises InputError with its place."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{place} is not JSON: {error}.", place=place) from error


def is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


SERVERS = ("http://", "https://")
DATABASES = ("postgresql://", "postgres://", "sqlite://")
_SQLITE = b"SQLite format 3\0"


def open_source(source: str, on_bytes: OnBytes | None = None) -> Iterator[RawGroup]:
    if source.startswith(SERVERS):
        return of_server(source)
    if source.startswith(DATABASES) or is_sqlite(Path(source)):
        return of_database(source)
    if source == "-":
        return lines_of(sys.stdin.buffer, "standard input")
    return _of_files(files_of(source), on_bytes)


def _of_files(paths: Sequence[Path], on_bytes: OnBytes | None) -> Iterator[RawGroup]:
    for path in paths:
        with opened(path, on_bytes) as file:
            yield from lines_of(file, str(path))


def size_of(sources: Sequence[str]) -> int | None:
    """Returns the bytes of all `sources` on disk; None where one has no size."""
    if any(source == "-" or source.startswith((*SERVERS, *DATABASES)) for source in sources):
        return None
    if any(is_sqlite(Path(source)) for source in sources):
        return None
    return sum(path.stat().st_size for source in sources for path in files_of(source))


def is_sqlite(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def line_of(body: bytes, format: str, env: str, group_id: str, place: str) -> dict[str, Any]:
    try:
        if format in NATIVE:
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


class GroupsServer:
    """The groups of a running server, which are only read; sends the token of ENVSERVER_TOKEN."""

    def __init__(self, url: str) -> None:
        self._url = url
        # Not zstd: a group is several frames of it, and httpx fails when one ends with a chunk.
        headers = {"accept-encoding": "gzip", **authorization()}
        self._http = ServersClient(url, timeout=_SECONDS, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def listed(self) -> Iterator[dict[str, Any]]:
        """Yields what is known of each group without its body."""
        after: int | None = 0
        while after is not None:
            page = self.get(f"/v1/groups?after={after}&limit={_PAGE}").json()
            yield from page["groups"]
            after = page["next"]

    def delivered(self) -> Iterator[str]:
        """Yields the ids of delivered and waiting groups."""
        for group in self.listed():
            if group["state"] not in _NOT_DELIVERED:
                yield str(group["group_id"])

    def place(self, group_id: str) -> str:
        return f"group {group_id} of {self._url}"

    def whole(self, group_id: str) -> WireGroup:
        answer = self.get(f"/v1/groups/{quote(group_id, safe='')}", GROUP_MSGPACK)
        try:
            return msgspec.msgpack.decode(answer.content, type=WireGroup)
        except msgspec.DecodeError as error:
            place = self.place(group_id)
            raise InputError(f"{place} is not a group: {error}.", place=place) from error

    def line(self, group_id: str) -> dict[str, Any]:
        whole, place = self.whole(group_id), self.place(group_id)
        return line_of(bytes(whole.body), whole.format, whole.env, group_id, place)

    def get(self, path: str, accept: str = "application/json") -> httpx.Response:
        url = self._url
        try:
            answer = self._http.get(path, headers={"accept": accept})
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


def of_server(url: str) -> Iterator[RawGroup]:
    """Yields delivered and waiting groups."""
    with GroupsServer(url) as server:
        for group_id in server.delivered():
            yield RawGroup(server.place(group_id), partial(server.line, group_id))


_ROWS: Final = 64
_Found = tuple[GroupRow, bytes | Exception, str]


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
