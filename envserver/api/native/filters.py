"""Warns about filters of a trainer that match nothing, or filter nothing.

In: a filter. Out: sentences for people; empty if the filter can act. A warning refuses nothing: an
environment may register later, and a version may be published later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from ...store import UNKNOWN_VERSION, GroupStore
from .models import Limits
from .policy import PolicyVersion

WARNING_HEADER: Final = "x-envserver-warning"
_MOST_SHOWN: Final = 10
_LONGEST_HEADER: Final = 1000


class FilterWarnings:
    """The warnings of one server.

    Args:
        present: returns the names of the environments that are registered or local.
    """

    def __init__(
        self, store: GroupStore, policy: PolicyVersion, present: Callable[[], Collection[str]]
    ) -> None:
        self._store = store
        self._policy = policy
        self._present = present

    def of_names(self, environments: Collection[str]) -> list[str]:
        """Returns a warning for the names that no environment has or had."""
        if not environments:
            return []
        known = {env for _, env, _ in self._store.tallies} | set(self._present())
        unknown = sorted(set(environments) - known)
        if not unknown:
            return []
        shown = ", ".join(sorted(known)[:_MOST_SHOWN]) or "none"
        more = ", ..." if len(known) > _MOST_SHOWN else ""
        names = ", ".join(map(repr, unknown))
        return [f"No environment is called {names} so far; known: {shown}{more}."]

    def of_limits(self, wanted: Limits) -> list[str]:
        """Returns the warnings for the filters of a lease."""
        warnings = self.of_names(wanted.environments or ())
        if wanted.max_staleness is not None and self._policy.version == UNKNOWN_VERSION:
            warnings.append(
                "max_staleness filters nothing: no policy version is published"
                " (POST /v1/policy-version)."
            )
        return warnings


def warning_headers(warnings: Collection[str]) -> dict[str, str]:
    """Returns the warnings as a header. Names in them may hold any characters, and be long."""
    text = " ".join(warnings).encode("ascii", "backslashreplace").decode()
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:_LONGEST_HEADER])
    return {WARNING_HEADER: shown.strip()} if warnings else {}
