"""tau2-bench's domains by name."""

from __future__ import annotations

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


def tau2_domain(name: str, data: Path | None) -> Domain:
    """tau2-bench's domain `name` with its data.

    Args:
        data: the folder of tau2-bench's data; unset: those of the package inspect_evals.

    Raises:
        InputError: there is no such domain.
        NotFoundError, ConfigError: its data are not there, or cannot be read.
    """
    if name not in KINDS:
        raise InputError(f"There is no domain {name!r}.", hint=f"There are {', '.join(KINDS)}.")
    kind = KINDS[name]
    return load_domain(kind, data_folder(kind.folder or kind.name, data))
