"""The domains by name: tau2-bench's, with its data, and our own, whose data are shipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from envserver import InputError

from .airline import AIRLINE
from .loading import data_folder, load_domain
from .mock import MOCK
from .retail import RETAIL
from .telecom.domain import TELECOM, TELECOM_WORKFLOW
from .world import Domain, DomainKind

KINDS: dict[str, DomainKind] = {
    kind.name: kind for kind in (MOCK, RETAIL, AIRLINE, TELECOM, TELECOM_WORKFLOW)
}

OWN: dict[str, DomainKind] = {
    name: replace(kind, name=name, folder=name, policy_parts=())
    for name, kind in (
        ("mini_retail", RETAIL),
        ("mini_airline", AIRLINE),
        ("mini_telecom", TELECOM),
        ("mini_mock", MOCK),
    )
}
"""Our own: the same tools over invented data in tau/data/NAME, with different rules.

What the tools have built in holds here too: an airline's day (2024-05-15), its airports, 50 dollars
for a bag. Prices of the shop are multiples of a quarter dollar, so that sums of them are exact in
whatever order they are made. Besides tau2-bench's fields each task has a `user_script`, for a
customer without a model: rules of which the first match is followed, each `{"if": pattern in the
assistant's last text (case-insensitive) or "always", "calls": [{"name", "arguments"}] of the
customer's own tools (optional), "say": the customer's text after them, in which {result} is
replaced by the last call's result}`.
"""

SHIPPED = Path(__file__).parents[1] / "data"


def find_domain(name: str, data: Path | None, *, with_tasks: bool = True) -> Domain:
    """Loads the domain `name` of either kind.

    Args:
        data: the folder of tau2-bench's data; unset: those of the package inspect_evals.
        with_tasks: with tasks and splits; conversations do not need them.
    """
    if name in OWN:
        return load_domain(OWN[name], SHIPPED / name, with_tasks=with_tasks)
    return tau2_domain(name, data, with_tasks=with_tasks)


def tau2_domain(name: str, data: Path | None, *, with_tasks: bool = True) -> Domain:
    """Loads tau2-bench's domain `name` with its data.

    Args as in `find_domain`.
    """
    if name not in KINDS:
        known = ", ".join([*OWN, *KINDS])
        raise InputError(f"There is no domain {name!r}.", hint=f"There are {known}.")
    kind = KINDS[name]
    folder = data_folder(kind.folder or kind.name, data)
    return load_domain(kind, folder, with_tasks=with_tasks)
