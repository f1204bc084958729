"""How things stand, and whether the process and its store answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ... import __version__
from ...store import Store
from ..atropos.service import AtroposService
from .answers import json_answer
from .policy import PolicyVersion


def add_status_routes(
    router: APIRouter,
    store: Store,
    atropos: AtroposService,
    policy: PolicyVersion,
    status: Callable[[], dict[str, Any]] | None,
) -> None:
    @router.get("/v1/status")
    async def get_status() -> Response:
        """How things stand: groups by state, the Atropos wire, what the server itself reports."""
        return json_answer(
            {
                "version": __version__,
                "policy_version": policy.version,
                "groups": await store.counts(),
                "atropos": atropos.snapshot(),
                "server": status() if status is not None else {},
            }
        )

    @router.get("/healthz", tags=["health"])
    async def healthz() -> Response:
        """The process answers."""
        return json_answer({"status": "ok"})

    @router.get("/readyz", tags=["health"])
    async def readyz() -> Response:
        """The store answers too."""
        await store.get_value("policy_version")
        return json_answer({"status": "ok"})
