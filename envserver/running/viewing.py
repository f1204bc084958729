"""The work of `envserver view`: the page over files, folders, a store or a remote server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from envserver_records.errors import ConflictError, InputError, NotFoundError, UsageError

from ..viewing.index import index_path
from ..viewing.indexing_process import Indexing, indexing
from ..viewing.scanning import Documents, FileScan
from ..viewing.sources import Viewed, store_at, viewed

if TYPE_CHECKING:
    import httpx
    from fastapi import FastAPI

_PARTS: Final = {
    "store": ["groups", "tasks"],
    "file": ["groups", "tasks"],
    "folder": ["groups", "tasks"],
    "evaluation": ["evaluations", "groups", "tasks"],
    "comparison": ["evaluations", "comparison", "groups", "tasks"],
}


class Viewing(NamedTuple):
    title: str
    url: str


@asynccontextmanager
async def viewing(
    places: Sequence[str], *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Viewing]:
    looked_at = viewed(places)
    if looked_at.is_on_disk:
        files = looked_at.files()  # raises what is wrong with them
        if looked_at.kind == "file":
            first = next(FileScan(Path(files[0].path)).found(Documents()), None)
            if isinstance(first, InputError):
                raise first
    async with AsyncExitStack() as stack:
        over = {"server": _over_server, "store": _over_store}.get(looked_at.kind, _over_files)
        app = await over(stack, looked_at)
        from ..http.server import serve_api

        server = await serve_api(app, host, port)
        stack.push_async_callback(server.close, at_once=True)
        yield Viewing(looked_at.title, server.url)


async def _over_files(stack: AsyncExitStack, looked_at: Viewed) -> FastAPI:
    found = await stack.enter_async_context(indexing(looked_at, index_path(looked_at.places)))
    # Imported while the other process makes the index.
    from ..trainers.live_events import Feed
    from ..viewing.app import create_viewer
    from ..viewing.evaluations import Evaluations
    from ..viewing.index import open_index
    from ..viewing.indexing_process import follow_index
    from ..viewing.sources import FailureFiles
    from .stopping import beside

    await found.first()
    groups = await stack.enter_async_context(open_index(found.index))
    feed = Feed()
    failures = FailureFiles(looked_at)
    await failures.read_new()
    await stack.enter_async_context(beside("view-index", follow_index(feed, groups, found)))
    await stack.enter_async_context(beside("view-failures", failures.follow(feed)))
    has_results = looked_at.kind in ("evaluation", "comparison")
    evaluations = Evaluations(looked_at, groups) if has_results else None

    def source() -> dict[str, Any]:
        return _source(looked_at, found, has_failures=failures.are_there)

    return create_viewer(groups, feed, source, evaluations, failures.log)


async def _over_store(stack: AsyncExitStack, looked_at: Viewed) -> FastAPI:
    from ..store.lookups import open_reader
    from ..trainers.live_events import Feed
    from ..viewing.app import create_viewer
    from ..viewing.indexing_process import follow_store, last_number
    from .stopping import beside

    groups = await stack.enter_async_context(open_reader(store_at(looked_at.places[0])))
    feed = Feed()
    feed.seq = await last_number(groups)
    await stack.enter_async_context(beside("view-store", follow_store(feed, groups)))
    return create_viewer(groups, feed, lambda: _source(looked_at, None))


async def _over_server(stack: AsyncExitStack, looked_at: Viewed) -> FastAPI:
    import httpx

    from ..viewing.app import client_of, create_relay

    url = looked_at.places[0]
    try:
        http = client_of(url)
        answer = await (await stack.enter_async_context(http)).get("v1/source")
    except (httpx.TransportError, httpx.InvalidURL) as error:
        why = error or type(error).__name__
        raise NotFoundError(f"No server answers at {looked_at.title}: {why}.") from error
    if answer.status_code in (401, 403):
        raise ConflictError(
            f"{looked_at.title} requires an access token.",
            hint="Set ENVSERVER_TOKEN to one that may read.",
        )
    if not answer.is_success:
        raise UsageError(
            f"{looked_at.title} has no page to show: HTTP {answer.status_code}.",
            hint="Is it an envserver of this version?",
        )
    if not _is_source(answer):
        raise UsageError(f"{looked_at.title} is not an envserver.", hint="Is the address right?")
    return create_relay(looked_at.title, http)


def _is_source(answer: httpx.Response) -> bool:
    try:
        value = answer.json()
    except ValueError:
        return False
    return isinstance(value, dict) and "parts" in value


def _source(
    looked_at: Viewed, found: Indexing | None, *, has_failures: bool = False
) -> dict[str, Any]:
    progress = None if found is None else found.progress
    can_be_named = looked_at.kind in ("file", "store") and "://" not in looked_at.places[0]
    return {
        "kind": looked_at.kind,
        "title": looked_at.title,
        "live": True,
        "parts": [*_PARTS[looked_at.kind], *(("failures",) if has_failures else ())],
        "replay_source": looked_at.places[0] if can_be_named else None,
        "reading": None
        if progress is None
        else {
            "groups": progress.groups,
            "bytes": progress.bytes,
            "total_bytes": progress.total_bytes,
            "done": progress.done,
            "error": progress.error,
        },
        "problems": None
        if progress is None
        else {"count": progress.problems, "first": progress.first_problems},
    }
