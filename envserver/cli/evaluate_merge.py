"""`envserver evaluate merge SHARD ...`: makes one evaluation and its report of several shards."""

from __future__ import annotations

from ..running.evaluation_folder import Accepted, merge_evaluations
from .console import Console
from .evaluate_command import show_report
from .specs.evaluate_merge import COMMAND


def run(argv: list[str]) -> int:
    settings = COMMAND.read(argv)
    accepted = Accepted(tuple(settings.slices), settings.partial)
    report = merge_evaluations(
        settings.shards, settings.out, accepted, overwrite=settings.overwrite
    )
    show_report(Console(stderr=True), report, settings.out)
    return 0
