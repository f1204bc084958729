"""Which wall stands around the sandboxes of this server: the first that holds, never in silence.

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


def candidates(wall: str) -> tuple[str, ...]:
    """Walls to be tried for a setting, in this order."""
    return ORDER if wall == "auto" else (wall,)


def missing(wall: str, *, by_name: bool) -> ProbeReport | None:
    """The report on a wall of which it is plain, before anything is started, that it cannot be.

    Args:
        by_name: a person chose it, weaknesses and all.
    """
    if wall == "bubblewrap" and bubblewrap.installed() is None:
        return unavailable(wall, "bwrap is not installed")
    if wall == "landlock":
        version = landlock.abi()
        if version == 0:
            return unavailable(wall, "this kernel has no Landlock")
        if version < LANDLOCK_ENOUGH and not by_name:
            return unavailable(wall, f"Landlock version {version} cannot hold signals back")
    return None


def announce(report: ProbeReport, failed: Sequence[ProbeReport]) -> None:
    """Logs which wall stands, and aloud where it is not the best or holds less than one thinks."""
    tried = {each.wall: each.failure for each in failed}
    if report.wall in WEAKNESSES:
        does_not_hold = ", ".join(WEAKNESSES[report.wall])
        _log.warning(
            "sandbox_wall_is_weak", wall=report.wall, does_not_hold=does_not_hold, failed=tried
        )
        return
    broken = {wall: why for wall, why in tried.items() if why != "bwrap is not installed"}
    if broken:
        _log.warning("sandbox_wall_does_not_work", failed=broken, taken=report.wall)
    _log.info("sandbox_wall", wall=report.wall)


def nothing_works(failed: Sequence[ProbeReport]) -> ConfigError:
    """The refusal: every wall that was tried, why it failed, and what to do."""
    reasons = "; ".join(f"{report.wall}: {report.failure}" for report in failed)
    steps = list(dict.fromkeys(step for report in failed for step in report.remedies))
    steps.append("Or use containers: --sandbox.wall docker.")
    return ConfigError(
        f"Programs of a model cannot be held back on this machine. {reasons}.",
        hint=" ".join(steps) + " `envserver doctor` shows every check.",
    )
