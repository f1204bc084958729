"""Composition: assembles engine, proxy, workers, scorers, store and API, and runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .context import rollout_context
    from .engines import make_endpoint
    from .group_run import process_run
    from .mix import RunSpec, alone
    from .run_settings import ProcessSettings

__all__ = ["ProcessSettings", "RunSpec", "alone", "make_endpoint", "process_run", "rollout_context"]

__getattr__ = lazy_names(
    __name__,
    {
        "ProcessSettings": "run_settings",
        "RunSpec": "mix",
        "alone": "mix",
        "make_endpoint": "engines",
        "process_run": "group_run",
        "rollout_context": "context",
    },
)
