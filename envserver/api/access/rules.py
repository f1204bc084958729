"""The roles of each route: one table with every route of the server.

For a route that is not in the table, everyone but an admin gets 404. `/healthz` needs no token.
The proxy's paths (`/r/{key}/...`: attempts and guests) are not part of this application: each
contains its own key, and the proxy listens on loopback only.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from starlette.routing import compile_path

from ...settings.server import Role

Roles = frozenset[Role]

NOBODY_ELSE: Final[Roles] = frozenset()
TRAINER: Final[Roles] = frozenset({"trainer"})
ENVIRONMENT: Final[Roles] = frozenset({"environment"})
READERS: Final[Roles] = frozenset({"reader", "trainer"})
EVERYBODY: Final[Roles] = frozenset({"reader", "trainer", "environment"})
READABLE: Final[Roles] = READERS | {"admin"}
"""Roles that may do what a reader may."""


class Rule(NamedTuple):
    """Roles that may call `method` at `path` (the route's template), in addition to admin.

    Args:
        roles: None if no token is needed.
        is_stream: whether the response is endless; a token may have only a few of those at a time.
        is_change: whether a GET changes something; all other methods do.
    """

    method: str
    path: str
    roles: Roles | None
    is_stream: bool = False
    is_change: bool = False


RULES: Final = (
    Rule("GET", "/healthz", None),
    Rule("GET", "/readyz", EVERYBODY),
    Rule("GET", "/metrics", READERS),
    Rule("GET", "/openapi.json", EVERYBODY),
    Rule("GET", "/v1/session", None),
    Rule("POST", "/v1/session", None),
    Rule("DELETE", "/v1/session", None),
    # Trainers
    Rule("POST", "/v1/runs", TRAINER),
    Rule("GET", "/v1/runs", READERS),
    Rule("GET", "/v1/runs/{run}", READERS),
    Rule("POST", "/v1/runs/{run}/close", TRAINER),
    Rule("GET", "/v1/runs/{run}/checkpoints", READERS),
    Rule("GET", "/v1/runs/{run}/leases", READERS),
    Rule("POST", "/v1/runs/{run}/lease", TRAINER),
    Rule("GET", "/v1/runs/{run}/stream", TRAINER, is_stream=True, is_change=True),
    Rule("POST", "/v1/runs/{run}/ack", TRAINER),
    Rule("POST", "/v1/runs/{run}/nack", TRAINER),
    Rule("POST", "/v1/runs/{run}/extend", TRAINER),
    Rule("POST", "/v1/rollouts", TRAINER),
    Rule("GET", "/v1/tasks", TRAINER),
    Rule("POST", "/v1/policy-version", TRAINER),
    Rule("GET", "/v1/policy-version", EVERYBODY),
    Rule("POST", "/v1/policy/pause", TRAINER),
    Rule("POST", "/v1/policy/resume", TRAINER),
    Rule("GET", "/v1/policy", EVERYBODY),
    Rule("POST", "/v1/evaluations", TRAINER),
    Rule("GET", "/v1/evaluations", READERS),
    Rule("POST", "/v1/engines", TRAINER),
    Rule("POST", "/v1/engines/{engine_id}/version", TRAINER),
    Rule("POST", "/v1/engines/{engine_id}/drain", TRAINER),
    Rule("POST", "/v1/engines/{engine_id}/pause", TRAINER),
    Rule("POST", "/v1/engines/{engine_id}/resume", TRAINER),
    Rule("DELETE", "/v1/engines/{engine_id}", TRAINER),
    # Operators and tools
    Rule("GET", "/v1/status", READERS),
    Rule("GET", "/v1/series", READERS),
    Rule("GET", "/v1/source", READERS),
    Rule("GET", "/v1/alarms", READERS),
    Rule("GET", "/v1/events", READERS, is_stream=True),
    Rule("GET", "/v1/failures", READERS),
    Rule("GET", "/v1/engines", READERS),
    Rule("GET", "/v1/rollouts/running", READERS),
    Rule("GET", "/v1/groups", READERS),
    Rule("GET", "/v1/groups/{group_id:path}/rollouts", READERS),
    Rule("GET", "/v1/rewards", READERS),
    Rule("GET", "/v1/groups/{group_id:path}/rollouts/{number}", READERS),
    Rule("GET", "/v1/groups/{group_id:path}/rollouts/{number}/images/{image}", READERS),
    Rule("GET", "/v1/groups/{group_id:path}/rollouts/{number}/tokens", READERS),
    Rule("GET", "/v1/groups/{group_id:path}", READERS),
    Rule("GET", "/v1/tasks/estimates", EVERYBODY),
    Rule("GET", "/v1/tasks/seen", READERS),
    # Runners
    Rule("POST", "/v1/environments", ENVIRONMENT),
    Rule("GET", "/v1/environments", EVERYBODY),
    Rule("POST", "/v1/environments/{env_id}/heartbeat", ENVIRONMENT),
    Rule("POST", "/v1/environments/{env_id}/groups", ENVIRONMENT),
    Rule("POST", "/v1/environments/{env_id}/known", ENVIRONMENT),
    Rule("POST", "/v1/environments/{env_id}/scored", ENVIRONMENT),
    Rule("DELETE", "/v1/environments/{env_id}", ENVIRONMENT),
    Rule("POST", "/v1/environments/{env_id}/drain", NOBODY_ELSE),
    # Atropos protocol
    Rule("GET", "/", EVERYBODY),
    Rule("POST", "/register", TRAINER),
    Rule("GET", "/info", EVERYBODY),
    Rule("GET", "/wandb_info", EVERYBODY),
    Rule("GET", "/status", EVERYBODY),
    Rule("GET", "/batch", TRAINER, is_change=True),
    Rule("POST", "/ack", TRAINER),
    Rule("GET", "/reset_data", TRAINER, is_change=True),
    Rule("GET", "/latest_example", READERS),
    Rule("POST", "/register-env", ENVIRONMENT),
    Rule("POST", "/disconnect-env", ENVIRONMENT),
    Rule("GET", "/status-env", ENVIRONMENT, is_change=True),
    Rule("POST", "/scored_data", ENVIRONMENT),
    Rule("POST", "/scored_data_list", ENVIRONMENT),
    # OpenEnv: an application for each environment
    Rule("GET", "/openenv/{env}/openapi.json", EVERYBODY),
    Rule("GET", "/openenv/{env}/health", EVERYBODY),
    Rule("GET", "/openenv/{env}/metadata", EVERYBODY),
    Rule("GET", "/openenv/{env}/schema", EVERYBODY),
    Rule("GET", "/openenv/{env}/state", TRAINER),
    Rule("POST", "/openenv/{env}/reset", TRAINER),
    Rule("POST", "/openenv/{env}/step", TRAINER),
    Rule("POST", "/openenv/{env}/mcp", TRAINER),
    Rule("GET", "/openenv/{env}/ws", TRAINER),
)


def rules_of(path: str) -> dict[str, Rule]:
    """Returns the rules for a request's path, by method; empty if the path does not exist."""
    found = _EXACT.get(path)
    if found is not None:
        return found
    return next((rules for form, rules in _FORMS if form.match(path)), {})


def _by_path() -> dict[str, dict[str, Rule]]:
    found: dict[str, dict[str, Rule]] = {}
    for rule in RULES:
        found.setdefault(rule.path, {})[rule.method] = rule
    return found


_BY_PATH: Final = _by_path()
_EXACT: Final = {path: rules for path, rules in _BY_PATH.items() if "{" not in path}
_FORMS: Final[list[tuple[re.Pattern[str], dict[str, Rule]]]] = [
    (compile_path(path)[0], rules) for path, rules in _BY_PATH.items() if "{" in path
]
