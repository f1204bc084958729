"""The sources of `envserver verify`: a JSONL file, or a running server.

Both yield one `Delivery` per group, in the order in which the groups were written. Groups of a
server are only read, neither leased nor consumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote

import httpx
import msgspec
from envserver_records.errors import ConflictError, InputError, NotFoundError
from envserver_records.servers import AsyncServersClient
from envserver_records.urls import authorization
from envserver_records.wire import GROUP_MSGPACK, WireGroup

from .delivered import Delivery, LineChain, newest_version, read_body, read_line

_PAGE: Final = 256
_SECONDS: Final = 60.0
_NOT_DELIVERED: Final = ("buffered", "dropped")


class Source(Protocol):
    """Groups to be verified."""

    @property
    def size(self) -> int | None:
        """Size in bytes, if known."""

    async def newest_version(self) -> int:
        """Returns the policy version that the engine most likely serves now; -1 if unknown."""

    def deliveries(self) -> AsyncIterator[Delivery]:
        """Yields one delivery per group."""


class FileSource:
    """A JSONL file.

    Args:
        digests: check the chain of its lines.

    Raises:
        NotFoundError: the file does not exist.
    """

    def __init__(self, path: Path, *, digests: bool = True) -> None:
        if not path.is_file():
            raise NotFoundError(f"There is no file {str(path)!r}.")
        self.size = path.stat().st_size
        self._path = path
        self._digests = digests

    async def newest_version(self) -> int:
        """Returns the highest version that sampled a token of the file."""
        return await asyncio.to_thread(self._newest_version)

    def _newest_version(self) -> int:
        with self._path.open("rb") as lines:
            return max(map(newest_version, lines), default=-1)

    async def deliveries(self) -> AsyncIterator[Delivery]:
        """See Source. Skips empty lines."""
        with self._path.open("rb") as lines:
            number = end = 0
            chain = LineChain()
            while data := await asyncio.to_thread(lines.readline):
                number += 1
                end += len(data)
                if data.strip():
                    delivery = await asyncio.to_thread(read_line, data, number)
                    delivery.end = end
                    if self._digests:
                        await asyncio.to_thread(chain.check, data, number, delivery)
                    yield delivery


class ServerSource:
    """A running server; an async context manager that owns its connections."""

    size = None

    def __init__(self, url: str) -> None:
        self._url = url
        # httpx fails on zstd in several frames
        headers = {"accept-encoding": "identity", **authorization()}
        self._http = AsyncServersClient(url, timeout=_SECONDS, headers=headers)

    async def __aenter__(self) -> ServerSource:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def newest_version(self) -> int:
        """Returns the version published last; without one, the highest version of the groups."""
        published = int((await self._get("/v1/policy-version")).json()["version"])
        if published >= 0:
            return published
        return max([int(group["policy_version"]) async for group in self._groups()], default=-1)

    async def deliveries(self) -> AsyncIterator[Delivery]:
        """See Source. Leaves out groups that wait for others and groups that were dropped."""
        async for group in self._groups():
            if group["state"] in _NOT_DELIVERED:
                continue
            path = f"/v1/groups/{quote(group['group_id'], safe='')}"
            answer = await self._get(path, accept=GROUP_MSGPACK)
            try:
                whole = msgspec.msgpack.decode(answer.content, type=WireGroup)
            except msgspec.DecodeError as error:
                raise InputError(f"{self._url} sent no group: {error}.", place=path) from error
            yield await asyncio.to_thread(
                read_body, whole.group_id, whole.format, whole.policy_version, whole.body
            )

    async def _groups(self) -> AsyncIterator[dict[str, Any]]:
        after: int | None = 0
        while after is not None:
            page = (await self._get(f"/v1/groups?after={after}&limit={_PAGE}")).json()
            for group in page["groups"]:
                yield group
            after = page["next"]

    async def _get(self, path: str, accept: str = "application/json") -> httpx.Response:
        try:
            answer = await self._http.get(path, headers={"accept": accept})
        except httpx.TransportError as error:
            raise NotFoundError(
                f"No server answers at {self._url}: {error or type(error).__name__}."
            ) from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise NotFoundError(
                f"{self._url} has no {path}.", hint="Is it an envserver of this version?"
            )
        if not answer.is_success:
            raise ConflictError(
                f"{self._url} answered {path} with HTTP {answer.status_code}: {answer.text[:300]}",
                hint="ENVSERVER_TOKEN holds the token." if answer.status_code in (401, 403) else "",
            )
        return answer
