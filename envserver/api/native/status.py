"""GET /v1/status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from ... import __version__
from ...store import DamagedGroup, GroupStore
from ..atropos.service import AtroposService
from .answers import answers, json_answer
from .models import StatusAnswer
from .policy import PolicyVersion

_DAMAGED_SHOWN: Final = 20


def add_status_routes(
    router: APIRouter,
    store: GroupStore,
    atropos: AtroposService,
    policy: PolicyVersion,
    joined: Callable[[], dict[str, int]],
    status: Callable[[], dict[str, Any]] | None,
) -> None:
    async def damaged() -> list[DamagedGroup]:
        # The count is kept in memory; query the store only if it is not zero.
        return await store.damaged(_DAMAGED_SHOWN) if "damaged" in await store.counters() else []

    @router.get("/v1/status", responses=answers(StatusAnswer, what="The server's status."))
    async def get_status() -> Response:
        """Returns groups by state, what waits for each open run, the state of the Atropos
        protocol, and the server's counters.
        """
        return json_answer(
            {
                "version": __version__,
                "policy_version": policy.version,
                "groups": await store.counts(),
                "runs": {
                    name: msgspec.structs.asdict(backlog)
                    for name, backlog in (await store.backlogs()).items()
                },
                "damaged": [msgspec.structs.asdict(one) for one in await damaged()],
                "atropos": atropos.snapshot(),
                "joined": joined(),
                "server": status() if status is not None else {},
            }
        )
