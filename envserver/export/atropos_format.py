"""`--to atropos`: groups with their kept rollouts, in the line format of `process`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .formats import Options, Row, Writer
from .shards import Files
from .stored import StoredGroup, StoredRollout

_OF_ROWS = (
    *("tokens", "masks", "scores", "messages", "inference_logprobs", "ref_logprobs", "overrides"),
    *("advantages", "images", "distill_token_ids", "distill_logprobs"),
)
"""Keys of a line with one entry for each row."""


class Atropos:
    """Writes lines that every reader of `process` files understands, chained as those are."""

    name = "atropos"
    suffix = ".jsonl"

    def __init__(self, options: Options) -> None:
        del options

    def writer(self) -> Writer:
        return Files(chained=True)

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        if len(kept) == len(group.rollouts):
            yield group.line
        else:
            yield kept_line(group, {rollout.rollout_id for rollout in kept})


def kept_line(group: StoredGroup, rollout_ids: set[str]) -> dict[str, Any]:
    """Returns the line of `group` with these rollouts only, their rows renumbered.

    Advantages are removed: they were computed over the whole group.
    """
    line = group.line
    rows: list[int] = []
    told = []
    for rollout in line["envserver"]["rollouts"]:
        if rollout["rollout_id"] in rollout_ids:
            begin = len(rows)
            rows += rollout["rows"]
            told.append({**rollout, "rows": list(range(begin, len(rows)))})
    columns = {key: [line[key][row] for row in rows] for key in _OF_ROWS if line.get(key)}
    envserver = {**line["envserver"], "rollouts": told}
    return {**line, **columns, "advantages": None, "envserver": envserver}
