"""The native routes under /v1 (runs, leases, groups, policy versions, status), and health.

What holds: creating a run is idempotent by its name; a lease is delivered once; acknowledging
twice is allowed; the policy version never decreases. Errors are problem details (RFC 9457).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from ...settings.server import ServerConfig
from ...store import GroupStore
from ...telemetry.alarms import AlarmBook
from ..atropos.service import AtroposService
from ..leasing import GroupEncoder
from ..recording import Recorder
from .groups import add_group_routes, add_rollout_routes, add_task_routes
from .leases import SetAside, add_lease_routes
from .policy import HeldOutEvaluations, PolicyVersion, add_evaluation_routes, add_policy_routes
from .runs import FilterWarnings, add_run_routes
from .session import Logins, add_session_routes
from .status import (
    add_alarm_routes,
    add_estimate_routes,
    add_series_routes,
    add_source_routes,
    add_status_routes,
)
from .streams import Streams
from .waiting import Leasing

if TYPE_CHECKING:
    from ...rollouts.ordered import Orders


def native_routes(
    store: GroupStore,
    atropos: AtroposService,
    policy: PolicyVersion,
    *,
    settings: ServerConfig,
    joined: Callable[[], dict[str, int]],
    present: Callable[[], set[str]],
    filters: FilterWarnings,
    status: Callable[[], dict[str, Any]] | None,
    orders: Orders | None,
    recorder: Recorder | None,
    logins: Logins | None,
    alarms: AlarmBook | None,
    set_aside: SetAside,
    evaluations: HeldOutEvaluations | None,
) -> APIRouter:
    """Returns all native routes.

    Args:
        present: returns the names of all environments.
        orders: None if the server has no environment that can make rollouts on demand.
        recorder, alarms: None if the server counts nothing.
        logins: None if no access tokens are required.
        evaluations: None if the server makes no rollouts.
        set_aside: called with groups that a trainer cannot use, and its reason.
    """
    router = APIRouter(tags=["native"])
    encoder = GroupEncoder(store)
    streams = Streams()
    leasing = Leasing(
        store,
        policy,
        settings.lease_seconds,
        atropos.store_changed,
        settings.max_open_leases,
    )
    add_run_routes(router, store, atropos, streams, filters)
    add_lease_routes(router, store, atropos, leasing, encoder, streams, filters, set_aside)
    add_rollout_routes(router, store)  # before that of groups, whose ids may have slashes
    add_group_routes(router, store, encoder)
    add_task_routes(router, store)
    add_estimate_routes(router, store)
    add_policy_routes(router, policy)
    add_status_routes(router, store, atropos, policy, joined, status)
    add_session_routes(router, logins)
    add_source_routes(
        router,
        present,
        makes_rollouts=orders is not None,
        evaluated=lambda: evaluations is not None and bool(evaluations.listed()),
    )
    if evaluations is not None:
        add_evaluation_routes(router, evaluations)
    if recorder is not None:
        add_series_routes(router, recorder)
    if alarms is not None:
        add_alarm_routes(router, alarms)
    if orders is not None:
        from .on_demand import add_on_demand_routes

        add_on_demand_routes(router, orders, store, encoder)
    return router
