"""The domains by name: tau2-bench's, with its data, and our own, whose data are shipped."""

from __future__ import annotations

from pathlib import Path

from envserver import InputError

from .airline import AIRLINE
from .loading import data_folder, load_domain
from .mini_airline import MINI_AIRLINE
from .mini_mock import MINI_MOCK
from .mini_retail import MINI_RETAIL
from .mini_telecom import MINI_TELECOM
from .mock import MOCK
from .retail import RETAIL
from .telecom.domain import TELECOM, TELECOM_WORKFLOW
from .world import Domain, DomainKind

KINDS: dict[str, DomainKind] = {
    kind.name: kind for kind in (MOCK, RETAIL, AIRLINE, TELECOM, TELECOM_WORKFLOW)
}


OWN: dict[str, DomainKind] = {
    kind.name: kind for kind in (MINI_RETAIL, MINI_AIRLINE, MINI_TELECOM, MINI_MOCK)
}
"""Our own; their files are in tau/data/NAME."""

SHIPPED = Path(__file__).parents[1] / "data"


def find_domain(name: str, data: Path | None, *, with_tasks: bool = True) -> Domain:
    """Loads the domain `name` of either kind.

    Args:
        data: the folder of tau2-bench's data; unset: those of the package inspect_evals.
        with_tasks: with tasks and splits; conversations do not need them.

    Raises:
        InputError: there is no such domain.
        NotFoundError, ConfigError: its data are missing, or cannot be read.
    """
    if name in OWN:
        return load_domain(OWN[name], SHIPPED / name, with_tasks=with_tasks)
    return tau2_domain(name, data, with_tasks=with_tasks)


def tau2_domain(name: str, data: Path | None, *, with_tasks: bool = True) -> Domain:
    """Loads tau2-bench's domain `name` with its data.

    Args as in `find_domain`.

    Raises:
        InputError: there is no such domain.
        NotFoundError, ConfigError: its data are missing, or cannot be read.
    """
    if name not in KINDS:
        known = ", ".join([*OWN, *KINDS])
        raise InputError(f"There is no domain {name!r}.", hint=f"There are {known}.")
    kind = KINDS[name]
    folder = data_folder(kind.folder or kind.name, data)
    return load_domain(kind, folder, with_tasks=with_tasks)
