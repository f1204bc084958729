"""A relay for HTTP that loses or repeats the next requests when it is told to, and remembers which
groups producers were told are accepted.
"""

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import aiohttp
import orjson
from aiohttp import web
from support.beside import beside
from support.relay import Forwarder

from envserver.runners.messages import GROUP_LIST_MSGPACK

from .digests import digest_of_post, id_and_digest_of_group, ids_and_digests_of_groups

Trouble = Literal["lose the request", "lose the answer", "send it twice"]
TROUBLES: Final[tuple[Trouble, ...]] = ("lose the request", "lose the answer", "send it twice")
POSTS: Final = ""
"""In the place of an id, for posts, which have none of their own."""
_HOP: Final = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


class Told:
    """What producers sent and were told, by all relays together.

    `posted` has the digest of each post whose sender was answered 200, `joined` the ids of groups
    whose joiner was, `sent` the digests of all bodies that came under an id: a joiner that is
    killed may make a group anew that the server has. `seen` counts requests by their trouble.
    """

    def __init__(self) -> None:
        self.posted: set[str] = set()
        self.joined: set[str] = set()
        self.sent: dict[str, set[str]] = defaultdict(set)
        self.seen: Counter[str] = Counter()


class FaultyRelay(Forwarder):
    longest_seconds = 120.0

    def __init__(self, server_url: str, told: Told) -> None:
        super().__init__(server_url, force_close=True)
        self._told = told
        self._troubles: deque[Trouble] = deque()

    def trouble(self, kind: Trouble, requests: int = 1) -> None:
        """The next `requests` requests meet it, whosever they are."""
        self._troubles.extend([kind] * requests)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        trouble = self._troubles.popleft() if self._troubles else None
        if trouble is not None:
            self._told.seen[trouble] += 1
        if trouble == "lose the request":
            return _hang_up(request)
        if request.path.endswith("/stream"):
            return await self._stream(request)
        groups = self._groups_of(request, body)
        try:
            if trouble == "send it twice":
                await self._ask(request, body)
            status, headers, answer = await self._ask(request, body)
        except (aiohttp.ClientError, TimeoutError):
            return _hang_up(request)  # the server is away: so it looks to the client, too
        if trouble == "lose the answer":
            return _hang_up(request)
        if status == 200 and groups:
            refused = {one["index"] for one in _refused(answer)}
            self._told.joined.update(g for i, g in enumerate(groups) if i not in refused)
        if status == 200 and request.path == "/scored_data":
            self._told.posted.add(digest_of_post(body))
        return web.Response(status=status, headers=headers, body=answer)

    async def _ask(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        async with self._http.request(
            request.method,
            self._server_url + request.path_qs,
            data=body,
            headers=_passed(request.headers),
        ) as answer:
            return answer.status, _passed(answer.headers), await answer.read()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Passes an endless answer on, until one side breaks it off, or for two minutes."""
        try:
            async with self._http.get(
                self._server_url + request.path_qs, headers=_passed(request.headers)
            ) as answer:
                passed = web.StreamResponse(status=answer.status, headers=_passed(answer.headers))
                await passed.prepare(request)
                async for part in answer.content.iter_any():
                    await passed.write(part)
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return _hang_up(request)
        return passed

    def _groups_of(self, request: web.Request, body: bytes) -> list[str]:
        path = request.path
        if path == "/scored_data":
            self._told.sent[POSTS].add(digest_of_post(body))
        if not (path.startswith("/v1/environments/") and path.endswith("/groups")):
            return []
        is_list = request.content_type == GROUP_LIST_MSGPACK
        found = ids_and_digests_of_groups(body) if is_list else [id_and_digest_of_group(body)]
        for group_id, digest in found:
            self._told.sent[group_id].add(digest)
        return [group_id for group_id, _ in found]


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP}


def _refused(answer: bytes) -> list[dict[str, Any]]:
    refused: list[dict[str, Any]] = orjson.loads(answer).get("refused") or []
    return refused


def _hang_up(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)


@contextlib.contextmanager
def faulty_relay(server_url: str, told: Told) -> Iterator[FaultyRelay]:
    """A relay before `server_url`, in a thread of its own."""
    made = FaultyRelay(server_url, told)
    with beside(made.serve):
        yield made
