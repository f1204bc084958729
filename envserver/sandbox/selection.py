"""Selects the sandbox backend: the first one that works, and never silently.

`auto` tries bubblewrap (where it is installed), namespaces, then Landlock, and takes the first of
which every check holds; one that is weaker than those before is taken with a warning that names
what it does not hold. Docker and unsafe-local are only taken by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from envserver_records.errors import ConfigError

from . import bubblewrap, landlock
from .probe import WEAKNESSES, ProbeReport, unavailable
from .remedies import LANDLOCK_ENOUGH

ORDER = ("bubblewrap", "namespace", "landlock")

_log = structlog.get_logger("envserver.sandbox")


def candidates(backend: str) -> tuple[str, ...]:
    """Returns the backends to try for a setting, in order."""
    return ORDER if backend == "auto" else (backend,)


def missing(backend: str, *, by_name: bool) -> ProbeReport | None:
    """The report on a backend of which it is plain, before anything is started, that it cannot be.

    Args:
        by_name: a person chose it, weaknesses and all.
    """
    if backend == "bubblewrap" and bubblewrap.installed() is None:
        return unavailable(backend, "bwrap is not installed")
    if backend == "landlock":
        version = landlock.abi()
        if version == 0:
            return unavailable(backend, "this kernel has no Landlock")
        if version < LANDLOCK_ENOUGH and not by_name:
            return unavailable(backend, f"Landlock version {version} cannot hold signals back")
    return None


def announce(report: ProbeReport, failed: Sequence[ProbeReport]) -> None:
    """Logs the chosen backend; warns if it is weak or if a better one failed."""
    tried = {each.backend: each.failure for each in failed}
    if report.backend in WEAKNESSES:
        does_not_hold = ", ".join(WEAKNESSES[report.backend])
        _log.warning(
            "sandbox_backend_is_weak",
            backend=report.backend,
            does_not_hold=does_not_hold,
            failed=tried,
        )
        return
    broken = {backend: why for backend, why in tried.items() if why != "bwrap is not installed"}
    if broken:
        _log.warning("sandbox_backend_does_not_work", failed=broken, taken=report.backend)
    _log.info("sandbox_backend", backend=report.backend)


def nothing_works(failed: Sequence[ProbeReport]) -> ConfigError:
    """The refusal: every backend that was tried, why it failed, and what to do."""
    reasons = "; ".join(f"{report.backend}: {report.failure}" for report in failed)
    steps = list(dict.fromkeys(step for report in failed for step in report.remedies))
    if all(report.backend != "docker" for report in failed):
        steps.append("Or use containers: --sandbox.backend docker.")
    return ConfigError(
        f"This machine cannot sandbox model-written programs. {reasons}.",
        hint=" ".join(steps) + " `envserver doctor` shows every check.",
    )
