"""Accuracy by question type, as NExT-QA reports it. Pure.

Types are two letters, of which the first is the group: C (causal: CW why, CH how), T (temporal: TN
before or after, TC at the same time) and D (descriptive: DC count, DL place, DO other). TP is
counted as TN. A question without an answer is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_MERGED = {"TP": "TN"}
_GROUPS = ("C", "T", "D")


def kinds_of(type_: str) -> list[str]:
    """The names under which a question of this type is counted, "all" not among them."""
    name = _MERGED.get(type_, type_)
    group = [name[0]] if len(name) == 2 and name[0] in _GROUPS else []
    return [name, *group] if name else []


def accuracy_by_type(answers: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The mean of each type and group, and of all of them.

    Args:
        answers: type and correctness (in [0, 1]) of each.
    """
    found: dict[str, list[float]] = {}
    for type_, correct in answers:
        for name in (*kinds_of(type_), "all"):
            found.setdefault(name, []).append(correct)
    return {name: sum(values) / len(values) for name, values in found.items()}


def nextqa_accuracy(
    rows: Sequence[Mapping[str, Any]], predictions: Mapping[str, int | None]
) -> dict[str, float]:
    """`accuracy_by_type` of predicted options.

    Args:
        rows: of NExT-QA: video, qid, type, answer.
        predictions: option by "video_qid".
    """
    return accuracy_by_type(
        (str(row["type"]), float(predictions.get(f"{row['video']}_{row['qid']}") == row["answer"]))
        for row in rows
    )
