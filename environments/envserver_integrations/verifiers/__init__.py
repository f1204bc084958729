"""Environments of verifiers: `--env verifiers:NAME`, the name of a package (`vf-eval NAME`).
Packages with `load_environment` need verifiers before 0.4, task sets need 0.4: two backends,
because the dependencies of the two exclude each other."""

from __future__ import annotations

import os
import threading
from importlib.metadata import version

from envserver import Environment, Integration

from .backends import backend_of, is_classic


def environment(name: str) -> type[Environment]:
    """Returns the class of the package `name`, for the generation of verifiers that is here."""
    _without_progress_bars()
    if is_classic(version("verifiers")):
        from .classic import classic_class

        return classic_class(name)
    from .tasksets import taskset_class

    return taskset_class(name)


def _without_progress_bars() -> None:
    """Keeps the bars of packages that map their data set out of workers' output. tqdm would also
    start a thread, and make a semaphore that outlives a killed worker."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from tqdm import tqdm

    tqdm.monitor_interval = 0
    tqdm.set_lock(threading.RLock())


INTEGRATION = Integration(
    what="environments and task sets of verifiers",
    environment=environment,
    module="verifiers",
    backend=backend_of,
)
