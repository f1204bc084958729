"""How things stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ... import __version__
from ...store import Store
from ..atropos.service import AtroposService
from .answers import answers, json_answer
from .models import StatusAnswer
from .policy import PolicyVersion


def add_status_routes(
    router: APIRouter,
    store: Store,
    atropos: AtroposService,
    policy: PolicyVersion,
    joined: Callable[[], dict[str, int]],
    status: Callable[[], dict[str, Any]] | None,
) -> None:
    @router.get("/v1/status", responses=answers(StatusAnswer, what="How things stand."))
    async def get_status() -> Response:
        """How things stand: groups by state, the Atropos wire, what the server itself reports."""
        return json_answer(
            {
                "version": __version__,
                "policy_version": policy.version,
                "groups": await store.counts(),
                "atropos": atropos.snapshot(),
                "joined": joined(),
                "server": status() if status is not None else {},
            }
        )
