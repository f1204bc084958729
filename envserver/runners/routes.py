"""Routes of runners, under /v1/environments, used by `envserver join`.

POST   /v1/environments                   registers; returns an id, the session key, the seed
POST   /v1/environments/{id}/heartbeat    reports status; answered on news or after a timeout
POST   /v1/environments/{id}/groups       posts finished groups; durable on 200
POST   /v1/environments/{id}/known        asks which groups the server already has
POST   /v1/environments/{id}/scored       reports groups that were scored and dropped
DELETE /v1/environments/{id}              deregisters
POST   /v1/environments/{id}/drain        tells the runner to finish and leave (for operators)
GET    /v1/environments                   lists all runners (for operators)

The session key is sent in the header `x-environment-key`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from envserver_records.errors import UsageError
from fastapi import APIRouter, Query
from pydantic import BaseModel, StringConstraints
from starlette.requests import Request
from starlette.responses import Response

from ..http.answers import json_answer, route
from ..http.requests import key_of, read_body
from ..http.transfer import Endpoint
from .messages import (
    ENGINES,
    GROUP_LIST_MSGPACK,
    GROUP_MSGPACK,
    KEY_HEADER,
    NEXT_SECONDS,
    Accepted,
    GroupIds,
    Heartbeat,
    News,
    Registration,
    ScoredGroups,
    Welcome,
)
from .registry import RunnerRegistry

Addition = Annotated[str, StringConstraints(max_length=64)]
_MOST: Final = 2**31 - 1
_PLACE: Final = "/v1/environments"
_GROUP_BODY: Final = {
    "requestBody": {"required": True, "content": {GROUP_MSGPACK: {}, GROUP_LIST_MSGPACK: {}}}
}


class EnvironmentsAnswer(BaseModel):
    environments: list[dict[str, Any]]


class KnownAnswer(BaseModel):
    known: list[str]


class WrongMediaType(UsageError):
    kind, status = "wrong_media_type", 415


def runner_routes(environments: RunnerRegistry, most_bytes: int) -> APIRouter:
    router = APIRouter(tags=["environments"])

    @router.post(
        _PLACE, **route(Welcome, 409, status=201, body=Registration, what="The registration.")
    )
    async def register(
        request: Request,
        understands: Annotated[list[Addition] | None, Query(max_length=16)] = None,
    ) -> Response:
        """Registers a runner, or starts a new session for its name (201). If another process has
        the name and is still present: 409. `understands` names additions to the protocol that the
        runner knows: "next_seconds", how long its next heartbeats should wait; "engines", the
        server's engines. With an `Idempotency-Key`, repeating the request returns the same session
        key, so that a late copy ends no session.
        """
        wanted = await read_body(request, Registration)
        return _json(await environments.register(wanted, understands or (), key_of(request)), 201)

    @router.get(_PLACE, **route(EnvironmentsAnswer, what="All registrations."))
    async def show() -> Response:
        """Lists the registered runners and their status."""
        return _json({"environments": await environments.table.snapshot()})

    @router.post(
        _PLACE + "/{env_id}/heartbeat",
        **route(News, 404, body=Heartbeat, what="The runner's settings."),
    )
    async def heartbeat(env_id: str, request: Request) -> Response:
        """Reports a runner's status. Answers at once if there is news for it (a new policy
        version, a pause, a drain, or more capacity when it has used up its own); otherwise after
        `wait_seconds`.
        """
        return await _heard(environments, env_id, request)

    @router.post(
        _PLACE + "/{env_id}/groups",
        openapi_extra=_GROUP_BODY,
        **route(Accepted, 404, 409, 415, takes_body=True, what="Groups stored and groups refused."),
    )
    async def accept(
        env_id: str,
        request: Request,
        still_open: Annotated[int | None, Query(alias="open", ge=0, le=_MOST)] = None,
        begun: Annotated[int | None, Query(ge=0, le=_MOST)] = None,
    ) -> Response:
        """Stores one group, or several in one transaction; posting a group twice is allowed. A
        malformed single group is refused with 422 and the place of the error; among several, the
        response names the refused groups and the others are stored. `open` and `begun` are as in a
        heartbeat, not counting the posted groups.
        """
        return await _accepted(environments, most_bytes, env_id, request, still_open, begun)

    @router.post(
        _PLACE + "/{env_id}/known",
        **route(KnownAnswer, 404, body=GroupIds, what="The groups that are stored."),
    )
    async def known(env_id: str, request: Request) -> Response:
        """Returns which of these groups were ever stored here, delivered or not."""
        wanted = await read_body(request, GroupIds)
        found = await environments.known_groups(env_id, _key(request), wanted.group_ids)
        return _json({"known": sorted(found)})

    @router.post(
        _PLACE + "/{env_id}/scored",
        **route(None, 404, status=204, body=ScoredGroups, what="The counts were added."),
    )
    async def scored(env_id: str, request: Request) -> Response:
        """Reports groups that were scored and dropped for their rewards or their age: they count
        in the estimates of their tasks. Repeating is allowed.
        """
        environments.authenticate(env_id, _key(request))
        scored = await read_body(request, ScoredGroups)
        await environments.count_dropped(env_id, _key(request), scored.groups)
        return Response(status_code=204)

    @router.delete(
        _PLACE + "/{env_id}",
        **route(None, 404, 422, status=204, what="The registration was removed."),
    )
    async def goodbye(env_id: str, request: Request) -> Response:
        """Deregisters a runner until it registers again. Repeating is allowed."""
        await environments.goodbye(env_id, _key(request))
        return Response(status_code=204)

    @router.post(
        _PLACE + "/{env_id}/drain",
        **route(None, 404, 422, status=204, what="The runner was notified."),
    )
    async def drain(env_id: str) -> Response:
        """Tells a runner to begin no more groups and to leave once its open groups are posted."""
        environments.drain(env_id)
        return Response(status_code=204)

    return router


def runner_posts(environments: RunnerRegistry, most_bytes: int) -> dict[str, Endpoint]:
    """Returns, by path, endpoints for posts of groups that bypass FastAPI, for speed."""

    async def accept(request: Request) -> Response:
        still_open, begun = (
            None if text is None else int(text)
            for text in map(request.query_params.get, ("open", "begun"))
        )
        env_id = request.path_params["env_id"]
        return await _accepted(environments, most_bytes, env_id, request, still_open, begun)

    return {_PLACE + "/{env_id}/groups": accept}


def runner_beats(environments: RunnerRegistry) -> dict[str, Endpoint]:
    """Returns, by path, an endpoint for heartbeats that bypasses FastAPI, for speed."""

    async def heartbeat(request: Request) -> Response:
        return await _heard(environments, request.path_params["env_id"], request)

    return {_PLACE + "/{env_id}/heartbeat": heartbeat}


async def _heard(environments: RunnerRegistry, env_id: str, request: Request) -> Response:
    key = _key(request)
    environments.authenticate(env_id, key)
    beat = await read_body(request, Heartbeat)
    return _json(await environments.heartbeat(env_id, key, beat, request.receive))


async def _accepted(
    environments: RunnerRegistry,
    most_bytes: int,
    env_id: str,
    request: Request,
    still_open: int | None,
    begun: int | None,
) -> Response:
    key = _key(request)
    environments.authenticate(env_id, key)
    body = await request.body()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if media_type == GROUP_LIST_MSGPACK:
        several = environments.accept_batch
        return _json(await several(env_id, key, body, most_bytes, still_open, begun))
    if media_type != GROUP_MSGPACK:
        raise WrongMediaType(f"Groups must be {GROUP_MSGPACK} or {GROUP_LIST_MSGPACK}.")
    return _json(await environments.accept(env_id, key, body, still_open, begun))


def _key(request: Request) -> str:
    return request.headers.get(KEY_HEADER, "")


def _json(value: BaseModel | dict[str, Any], status: int = 200) -> Response:
    facts = value.model_dump() if isinstance(value, BaseModel) else value
    for addition in (NEXT_SECONDS, ENGINES):
        if facts.get(addition, 0) is None:
            del facts[addition]  # runners of older versions refuse it
    return json_answer(facts, status)
