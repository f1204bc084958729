"""Checks the completions of a data set with the environment that rewards them.

The environment is loaded by its name, so this module knows nothing about its tasks. In: a file of
{"task": row, "response": text}. Out: for each line, in order, why it is wrong, or None if it has
the full reward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from envserver_records.errors import ConfigError

from ..config import SandboxConfig
from ..registry import find
from ..running.scoring import run_score
from .loop import run_loop
from .reading_bar import reading_bar

FULL = 0.999
"""Minimum reward that counts as the full reward, because rewards are floats."""


def scored_right(
    name: str, candidates: Path, *, processes: int, sandbox: SandboxConfig
) -> Iterator[str | None]:
    """Scores the lines of `candidates` with the environment `name`."""
    scores = candidates.with_name("scores.jsonl")
    config = find(name).Config().model_dump(mode="json")
    size = candidates.stat().st_size
    with reading_bar("rows verified", size) as on_progress:
        scoring = run_score(
            name,
            config,
            candidates,
            scores,
            processes=processes,
            sandbox=sandbox,
            progress=lambda rows, share: on_progress(rows, int(share * size)),
        )
        run_loop(scoring)
    try:
        with scores.open("rb") as file:
            for line in file:
                yield _fault(json.loads(line))
    finally:
        scores.unlink()


def _fault(scored: dict[str, object]) -> str | None:
    error, reward = scored["error"], scored["reward"]
    if isinstance(error, str):
        kind, _, message = error.partition(": ")
        if kind == "config":
            raise ConfigError(message, hint="Or use --verify false to keep rows unverified.")
        return f"not verified: {kind}"
    if not isinstance(reward, (int, float)):
        return "not verified: no score"
    return None if reward >= FULL else "wrong by its own check"
