"""HTTP routes of the Atropos protocol, at the root; `atropos_service` implements the operations.

Trainers that support leases send `X-Envserver-Ack: lease` with `GET /batch`, get
`X-Envserver-Lease` in the response and acknowledge with `POST /ack {"lease_id": ...}`; a batch that
is not acknowledged in time is delivered again. A `null` batch has its reason in
`X-Envserver-Reason`. Clients that may retry a post send an `Idempotency-Key`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ..http.answers import MEANINGS
from ..http.requests import Refused, Unreadable, read_body, request_body
from ..http.transfer import GZIPPED, Endpoint
from .atropos_posts import (
    EnvironmentIdentifier,
    EnvironmentRegistration,
    LeaseIdentifier,
    PostedGroup,
    Registration,
    ScoredData,
    encoded,
    read_group,
    read_groups,
)
from .atropos_service import AtroposService

_MOST_READ_AT_ONCE: Final = 128 * 1024
"""Posts with more bytes than this are parsed and encoded in a thread."""
_READERS: Final = 2
"""Number of such threads; more would slow each other down."""


_NO_EXAMPLE: Final = (
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "generation_params",
    "inference_logprobs",
    "messages",
    "images",
)


def atropos_routes(service: AtroposService, posts: Mapping[str, Endpoint]) -> APIRouter:
    router = APIRouter(tags=["atropos"])
    _add_trainer_routes(router, service)
    _add_environment_routes(router, service)
    _add_group_routes(router, service, posts)
    return router


def _add_trainer_routes(router: APIRouter, service: AtroposService) -> None:
    @router.get("/")
    async def root() -> Response:
        """Identifies the protocol to its clients."""
        return _json({"message": "AtroposLib API"})

    @router.post("/register", openapi_extra=request_body(Registration))
    async def register(request: Request) -> Response:
        """Registers the trainer; environments may register from then on."""
        number = await service.register(await read_body(request, Registration))
        # 128 bits: more than orjson can write.
        return _encoded(json.dumps({"uuid": number}).encode())

    @router.get("/info")
    async def info() -> Response:
        """Returns the trainer's batch size and maximum number of tokens, -1 before it registers."""
        state = service.state
        return _json({"batch_size": state.batch_size, "max_token_len": state.max_token_len})

    @router.get("/wandb_info")
    async def wandb_info() -> Response:
        """Returns the trainer's W&B group and project."""
        return _json({"group": service.state.wandb_group, "project": service.state.wandb_project})

    @router.get("/status")
    async def status() -> Response:
        """Returns the trainer's step, and how many groups wait."""
        queue_size = await service.queue_size()
        return _json({"current_step": service.state.step, "queue_size": queue_size})

    @router.get("/batch", responses=_errors(507))
    async def batch(request: Request) -> Response:
        """Returns a batch of groups, or null if too few wait. With an `Idempotency-Key`, repeating
        the request returns the same batch, as long as the server keeps its groups."""
        if not service.state.registered:
            return _not_registered()
        leased = request.headers.get("x-envserver-ack", "").strip().lower() == "lease"
        found = await service.batch(leased=leased, key=_key(request))
        if found.groups is None:
            return _json({"batch": None}, _because(found.reason))
        headers = {"x-envserver-lease": found.lease_id} if found.lease_id else {}
        return _encoded(b'{"batch":[' + b",".join(found.groups) + b"]}", headers)

    @router.post("/ack", openapi_extra=request_body(LeaseIdentifier), responses=_errors(404, 409))
    async def ack(request: Request) -> Response:
        """Acknowledges a batch that was leased with `X-Envserver-Ack: lease`."""
        await service.acknowledge((await read_body(request, LeaseIdentifier)).lease_id)
        return _json({"status": "success"})

    @router.get("/reset_data", response_class=PlainTextResponse)
    async def reset_data() -> Response:
        """Forgets the trainer, the environments and the groups that wait for this trainer only.

        Groups for which shared runs of `/v1/runs` wait, too, stay."""
        await service.reset()
        return PlainTextResponse("Reset successful")


def _add_environment_routes(router: APIRouter, service: AtroposService) -> None:
    @router.post("/register-env", openapi_extra=request_body(EnvironmentRegistration))
    async def register_env(request: Request) -> Response:
        """Registers an environment, once a trainer is registered."""
        wanted = await read_body(request, EnvironmentRegistration)
        env_id = await service.register_environment(wanted)
        if env_id is None:
            return _json({"status": "wait for trainer to start"})
        state = service.state
        return _json(
            {
                "status": "success",
                "env_id": env_id,
                "wandb_name": state.environments[env_id].real_name,
                "checkpoint_dir": state.checkpoint_dir,
                "starting_step": state.step,
                "checkpoint_interval": state.save_checkpoint_interval,
                "num_steps": state.num_steps,
            }
        )

    @router.post("/disconnect-env", openapi_extra=request_body(EnvironmentIdentifier))
    async def disconnect_env(request: Request) -> Response:
        """Deregisters an environment."""
        identifier = await read_body(request, EnvironmentIdentifier)
        if await service.disconnect(identifier.env_id):
            return _json({"status": "success"})
        return _json({"status": "failure", "error": "list index out of range"})

    @router.get(
        "/status-env",
        openapi_extra=request_body(EnvironmentIdentifier),
        responses=_errors(404),
    )
    async def status_env(request: Request) -> Response:
        """Returns the step, how many groups wait, and an environment's share of the batches."""
        identifier = await read_body(request, EnvironmentIdentifier)
        return _json(await service.environment_status(identifier.env_id))


def atropos_posts(service: AtroposService) -> dict[str, Endpoint]:
    threads = ThreadPoolExecutor(_READERS, "posts")

    async def scored_data(request: Request) -> Response:
        """Stores one group."""
        groups = await _groups(request, service, threads)
        buffered = (await service.post(groups, _key(request)))[0]
        if buffered is None:
            return _json({"status": "received"})
        return _json({"status": "buffered", "buffer_size": buffered})

    async def scored_data_list(request: Request) -> Response:
        """Stores several groups."""
        groups = await _groups(request, service, threads, listed=True)
        answers = await service.post(groups, _key(request))
        buffered = [answer for answer in answers if answer is not None]
        answer: dict[str, Any] = {"status": "received", "groups_processed": len(groups)}
        if buffered:
            answer |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
        return _json(answer)

    return {"/scored_data": scored_data, "/scored_data_list": scored_data_list}


def _add_group_routes(
    router: APIRouter, service: AtroposService, posts: Mapping[str, Endpoint]
) -> None:
    for path, endpoint in posts.items():
        body = request_body(ScoredData, listed=path == "/scored_data_list")
        router.post(path, openapi_extra=body)(endpoint)

    @router.get("/latest_example")
    async def latest_example() -> Response:
        """Returns the group that was posted last."""
        latest = await service.latest()
        return _json({key: [] for key in _NO_EXAMPLE}) if latest is None else _encoded(latest)


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": MEANINGS[status]} for status in statuses}


async def _groups(
    request: Request,
    service: AtroposService,
    threads: ThreadPoolExecutor,
    *,
    listed: bool = False,
) -> list[PostedGroup]:
    raw = await request.body()
    gzipped = request.scope.get(GZIPPED)

    def ready() -> list[PostedGroup]:
        return encoded(read_groups(raw) if listed else [read_group(raw, gzipped)])

    try:
        if len(raw) <= _MOST_READ_AT_ONCE:
            return ready()
        return await asyncio.get_running_loop().run_in_executor(threads, ready)
    except Refused as error:
        service.count_refusal(error.errors[0]["type"])
        raise
    except Unreadable as error:
        service.count_refusal(error.kind)
        raise


def _key(request: Request) -> str | None:
    return request.headers.get("idempotency-key") or None


def _not_registered() -> Response:
    answer = {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }
    return _json(answer, _because("no trainer is registered"))


def _because(reason: str) -> dict[str, str]:
    return {"x-envserver-reason": reason.encode("ascii", "replace").decode()}


def _json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return _encoded(orjson.dumps(value), headers)


def _encoded(body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, headers=headers, media_type="application/json")
