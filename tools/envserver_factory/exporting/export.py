"""The work of `envserver export`: delivered groups in, files in one format out.

Reads one group after the other, keeps the rollouts that pass all filters and writes them in the
chosen format. The counts add up (`read` equals `kept` plus everything that was dropped, by reason);
memory does not grow with the number of groups, except by about 16 bytes for each rollout if
duplicates are looked for, and by the evaluation sets to be excluded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envserver_records.errors import InputError

from envserver.export.stored import StoredGroup, StoredRollout, read_groups

from .filters import Choice, Forbidden, Seen, Where, chosen
from .formats import Format
from .shards import finish, place_for, writer_of

Json = dict[str, Any]
SCHEMA_VERSION = 1

DROPPED = {
    "where": "excluded by --where",
    "min_reward": "below --min_reward",
    "contaminated": "with a piece of an evaluation set",
    "not_chosen": "not chosen by --per_group",
    "duplicate": "the same as one before",
}
"""Why a rollout is not in an export."""


@dataclass
class Tally:
    """The result of an export.

    Args:
        groups, rollouts: numbers read.
        kept: rollouts that passed; in a format of pairs, some may be in no pair.
        rows: rows written.
        dropped: rollouts that did not pass, by the first reason (see DROPPED).
        bad: lines that were skipped; `first_bad` is the first.
        seconds: duration.
        files, bytes: numbers written.
    """

    groups: int = 0
    rollouts: int = 0
    kept: int = 0
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    bad: int = 0
    first_bad: str = ""
    files: int = 0
    bytes: int = 0

    def counts(self) -> Json:
        """Returns the counts for the manifest."""
        return {
            "groups": self.groups,
            "read": self.rollouts,
            "kept": self.kept,
            "rows": self.rows,
            "dropped": {reason: self.dropped[reason] for reason in DROPPED},
            "bad_lines": self.bad,
        }


@dataclass(frozen=True)
class Wanted:
    """Selects rollouts; the filters apply in this order.

    Args:
        where: condition that each rollout must meet.
        min_reward: minimum reward; a rollout without a reward is dropped.
        forbidden: texts of which no conversation may contain a piece.
        per_group: which of the remaining rollouts of a group to keep.
        distinct: drop a rollout with the same content as an earlier one.
    """

    where: Where | None = None
    min_reward: float | None = None
    forbidden: Forbidden | None = None
    per_group: Choice = "all"
    distinct: Seen | None = None

    def of(self, group: StoredGroup, dropped: Counter[str]) -> list[StoredRollout]:
        """Returns the selected rollouts of `group`; counts the others in `dropped`."""
        passed = []
        for rollout in group.rollouts:
            reason = self._refusal(rollout)
            if reason is None:
                passed.append(rollout)
            else:
                dropped[reason] += 1
        kept = chosen(passed, self.per_group)
        dropped["not_chosen"] += len(passed) - len(kept)
        if self.distinct is None:
            return kept
        new = [rollout for rollout in kept if self.distinct.add(rollout)]
        dropped["duplicate"] += len(kept) - len(new)
        return new

    def _refusal(self, rollout: StoredRollout) -> str | None:
        if self.where is not None and not self.where(rollout):
            return "where"
        if self.min_reward is not None and (
            rollout.reward is None or rollout.reward < self.min_reward
        ):
            return "min_reward"
        if self.forbidden is not None and self.forbidden.is_in_rollout(rollout):
            return "contaminated"
        return None


def export(
    sources: Sequence[str],
    format: Format,
    out: Path,
    *,
    wanted: Wanted,
    facts: Json,
    shard_rows: int,
    overwrite: bool = False,
    skip_bad: bool = False,
    on_progress: Callable[[Tally, int], None] = lambda tally, size: None,
) -> Tally:
    """Writes the rollouts of `sources` that `wanted` selects to `out`.

    `out` is a folder, or a file if its name has a file's ending.
    """
    single = out.suffix in (".jsonl", format.suffix)
    tally, read = Tally(), Counter[str]()

    def on_bad(error: InputError) -> None:
        tally.bad += 1
        tally.first_bad = tally.first_bad or str(error)

    def on_bytes(number: int) -> None:
        read["bytes"] += number

    with place_for(out, overwrite=overwrite, single=single) as place:
        writer = writer_of(format)
        writer.open(place.folder, None if single else shard_rows)
        for group in read_groups(sources, on_bad if skip_bad else None, on_bytes):
            for row in _rows(group, format, wanted, tally):
                writer.put(row)
                tally.rows += 1
            on_progress(tally, read.pop("bytes", 0))
        made = finish(
            place,
            writer.close(),
            {
                "schema_version": SCHEMA_VERSION,
                "format": format.name,
                "sources": list(sources),
                **facts,
                "counts": tally.counts(),
            },
            overwrite=overwrite,
        )
    tally.files, tally.bytes = made["files"], made["bytes"]
    return tally


def _rows(group: StoredGroup, format: Format, wanted: Wanted, tally: Tally) -> Iterator[Any]:
    tally.groups += 1
    tally.rollouts += len(group.rollouts)
    kept = wanted.of(group, tally.dropped)
    tally.kept += len(kept)
    return format.rows(group, kept) if kept else iter(())
