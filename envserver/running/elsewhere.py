"""Where the groups of `process` and `evaluate` are made: here, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from ..settings.config import MixSettings
from .group_run import OpenMakers, no_makers

if TYPE_CHECKING:
    from .ray_making import RayMakers


def makers_of(settings: MixSettings, weights: Sequence[float] = (1.0,)) -> OpenMakers:
    """Returns what opens the makers that `settings.ray` names.

    Args:
        weights: of the environments that run at the same time.
    """
    if not settings.ray.address:
        return no_makers

    def opened() -> AbstractAsyncContextManager[RayMakers | None]:
        from .ray_making import ray_makers

        return ray_makers(settings, weights)

    return opened
