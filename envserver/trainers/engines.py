"""Engines that are registered while the server runs (POST /v1/engines).

A registration, a version, a drain and a pause are on disk before they are answered; only some
heartbeats are written, so that many engines do not write all the time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson
from envserver_records.errors import ConfigError, ConflictError, InputError
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from ..http.answers import json_answer, route
from ..http.requests import read_body
from ..models.replicas import Registration, Replica
from ..proxy.gate import InFlight
from ..runners.messages import EngineList, ToldEngine
from ..settings.section import Described, check_url
from ..store import Store
from .bodies import VERSION_LIMIT

if TYPE_CHECKING:
    from ..models.fleet import Fleet


_KEY: Final = "engines"
_WRITTEN_SHARE: Final = 0.5
"""Share of its ttl by which the end of a registration moves before that is written."""


class EngineBook:
    """The stored registrations of `fleet`; call `load` first."""

    def __init__(self, fleet: Fleet, store: Store) -> None:
        self.fleet = fleet
        self._store = store
        self._written: list[Registration] = []

    async def load(self) -> None:
        stored = await self._store.get_value(_KEY)
        self._written = msgspec.convert(stored or [], list[Registration])
        self.fleet.restore(self._written)

    async def save(self) -> None:
        now = self.fleet.registrations()
        if len(now) != len(self._written) or any(map(_differs, self._written, now)):
            await self._store.set_value(_KEY, msgspec.to_builtins(now))
            self._written = now

    async def tell_version(self, named: Sequence[str], version: int) -> None:
        """Notes that the engines with these ids or addresses serve `version`."""
        for replica in [self.fleet.named(name) for name in named]:
            self.fleet.tell_version(replica, version)
        await self.save()


def _differs(written: Registration, now: Registration) -> bool:
    if written.expires_at is None or now.expires_at is None or now.ttl_seconds is None:
        return written != now
    moved = now.expires_at - written.expires_at
    same_end = msgspec.structs.replace(now, expires_at=written.expires_at)
    return same_end != written or moved > _WRITTEN_SHARE * now.ttl_seconds


_PLACE: Final = "/v1/engines"
_LONGEST_TTL_SECONDS: Final = 30 * 24 * 3600.0
_LONGEST_WAIT_SECONDS: Final = 60.0


class _Body(Described):
    model_config = ConfigDict(extra="forbid")


class EngineRegistration(_Body):
    url: str = Field(min_length=1, max_length=2048)
    """Its address, with or without `/v1`: http://gpu7:8000."""
    model: str | None = Field(default=None, max_length=512)
    """Name of the model that it serves, which must be the server's; unset: the check finds out."""
    ttl_seconds: float | None = Field(default=None, ge=1, le=_LONGEST_TTL_SECONDS)
    """Seconds after which the registration ends unless it is repeated; unset: it does not end."""
    version: int | None = Field(default=None, ge=0, le=VERSION_LIMIT, strict=True)
    """The policy version that it serves. An engine that reports none has each version that is
    published, if it was registered before the first one."""
    wait_seconds: float = Field(default=10.0, ge=0, le=_LONGEST_WAIT_SECONDS)
    """Maximum wait for the check of a new engine."""


class EngineVersion(_Body):
    version: int = Field(ge=0, le=VERSION_LIMIT, strict=True)
    """The policy version that it serves from now on; it may be lower than before."""


class EnginePause(_Body):
    in_flight: InFlight = "drain"
    """How a pause treats running calls: drain (they finish), keep (they continue), abort
    (another engine gets them; streams that have begun finish)."""
    timeout_seconds: float = Field(default=60.0, gt=0, le=3600.0)
    """Maximum wait for them; then the response has `"idle": false`, and it stays paused."""


class EngineResume(_Body):
    version: int | None = Field(default=None, ge=0, le=VERSION_LIMIT, strict=True)
    """The policy version that it serves now; unset: unchanged."""


class EngineAnswer(Described):
    engine: dict[str, Any]
    """The row of `GET /v1/engines`: `id`, `standing`, `reason`, ..."""


class EnginePausedAnswer(EngineAnswer):
    idle: bool
    """Whether none of this server's calls is there (always true with keep)."""


Rows = Callable[[], list[dict[str, Any]]]
"""Returns the rows of `GET /v1/engines`."""


def engine_routes(book: EngineBook, rows: Rows) -> APIRouter:
    router = APIRouter(tags=["engines"])
    fleet = book.fleet

    def shown(replica: Replica, status: int = 200, **more: Any) -> Response:
        row = next((listed for listed in rows() if listed["id"] == replica.id), {"id": replica.id})
        return json_answer({"engine": row, **more}, status)

    @router.post(
        _PLACE,
        **route(EngineAnswer, 409, status=201, body=EngineRegistration, what="It was registered."),
    )
    async def register(request: Request) -> Response:
        """Registers an engine (201), or takes this as the heartbeat of one that is known (200). A
        new engine gets calls once it was found to be like the others: same model, template,
        tokenizer, and way of being called; one that differs is refused (409). One that does not
        answer yet is checked again and again."""
        wanted = await read_body(request, EngineRegistration)
        url = await _checked_url(fleet, wanted.url)
        await _check_model(fleet, wanted.model)
        replica, is_new = fleet.register(
            url, version=wanted.version, ttl_seconds=wanted.ttl_seconds
        )
        if not is_new:
            await book.save()
            return shown(replica)
        await fleet.checked(replica, wanted.wait_seconds)
        if replica.is_refused and not replica.admitted and replica in fleet.replicas:
            fleet.remove(replica)
            raise ConflictError(f"This engine is not used: {replica.refusal}", engine_id=replica.id)
        await book.save()
        return shown(replica, 201)

    @router.post(
        _PLACE + "/{engine_id}/version",
        **route(EngineAnswer, 404, body=EngineVersion, what="The engine."),
    )
    async def tell_version(engine_id: str, request: Request) -> Response:
        """Tells which policy version an engine serves. From then on its version is its own: what is
        published for all engines no longer changes it."""
        replica = fleet.named(engine_id)
        fleet.tell_version(replica, (await read_body(request, EngineVersion)).version)
        await book.save()
        return shown(replica)

    @router.post(_PLACE + "/{engine_id}/drain", **route(EngineAnswer, 404, what="The engine."))
    async def drain(engine_id: str) -> Response:
        """Gives an engine no new rollouts; it keeps those that it has until they end (`standing`:
        drained)."""
        replica = fleet.named(engine_id)
        fleet.drain(replica)
        await book.save()
        return shown(replica)

    @router.post(
        _PLACE + "/{engine_id}/pause",
        **route(EnginePausedAnswer, 404, body=EnginePause, what="It is paused."),
    )
    async def pause(engine_id: str, request: Request) -> Response:
        """Sends an engine no more calls, as while its weights change; the others get them. Runners
        on other machines hear of it with their next news."""
        replica = fleet.named(engine_id)
        how = await read_body(request, EnginePause)
        idle = await fleet.pause(replica, how.in_flight, how.timeout_seconds)
        await book.save()
        return shown(replica, idle=idle)

    @router.post(
        _PLACE + "/{engine_id}/resume",
        **route(EngineAnswer, 404, body=EngineResume, what="It is used again."),
    )
    async def resume(engine_id: str, request: Request) -> Response:
        """Ends a pause or a drain; with `version`, reports its version first."""
        replica = fleet.named(engine_id)
        wanted = await read_body(request, EngineResume)
        if wanted.version is not None:
            fleet.tell_version(replica, wanted.version)
        fleet.resume(replica)
        await book.save()
        return shown(replica)

    @router.delete(
        _PLACE + "/{engine_id}", **route(None, 404, 409, status=204, what="It was removed.")
    )
    async def remove(engine_id: str) -> Response:
        """Removes a registered engine: it gets no more calls, and answers those that it has. An
        engine of the settings stays (409)."""
        fleet.remove(fleet.named(engine_id))
        await book.save()
        return Response(status_code=204)

    return router


async def _checked_url(fleet: Fleet, url: str) -> str:
    try:
        check_url(url)
        known = fleet.at(url)
    except ConfigError as error:
        raise InputError(f"url: {error.message}", hint=error.hint, place="url") from None
    except ValueError as error:
        raise InputError(f"url: {error}", place="url") from None
    if known is None:
        await fleet.addresses.check(url)
    return url


async def _check_model(fleet: Fleet, model: str | None) -> None:
    if model is not None and model != (served := await fleet.model_name()):
        raise ConflictError(
            f"This server's engines serve {served!r}, not {model[:100]!r}.", model=served
        )


def engine_list(fleet: Fleet) -> EngineList:
    engines = [
        ToldEngine.model_validate(replica, from_attributes=True)
        for replica in sorted(fleet.shared(), key=lambda replica: replica.url)
    ]
    encoded = orjson.dumps([engine.model_dump() for engine in engines])
    return EngineList(id=hashlib.blake2b(encoded, digest_size=8).hexdigest(), engines=engines)
