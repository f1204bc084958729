"""Prepares a data set for fine-tuning: train, validation and test as JSONL, and summary.json.

In: rows, and a function from a row to an example. Out: a folder, complete or absent; `summary.json`
has the source of the rows, the size of each part, the dropped rows by reason, the sha256 of each
file, and counts of each tool and each shape of plan. Kept rows + dropped rows = read rows; the
parts are `split_three` of the kept rows in reading order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envserver_records.errors import ConfigError, InputError
from envserver_records.files import storing

from .examples import Example, Form, Template
from .folder import Spool, new_folder, write_lines, write_summary
from .splits import Three, split_three

Json = dict[str, Any]
OnProgress = Callable[[int], None]
"""Called with the number of rows read so far."""
Check = Callable[[Path], Iterator[str | None]]
"""Gets a JSONL file of {"task": row, "response": text}; yields for each line why it is wrong, None
where it is right.
"""

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Plan:
    """Options of the files.

    Args:
        seed: shuffle seed.
        val_ratio, test_ratio: shares, rounded down; a share of 0 has no file.
        form: form of the lines.
        template: renders conversations of the form `prompt` as text.
        check: keeps only the examples that it finds right.
    """

    seed: int
    val_ratio: float
    test_ratio: float
    form: Form
    template: Template | None = None
    check: Check | None = None


def prepare(
    rows: Iterable[Json | None],
    example_of: Callable[[Json], Example | str],
    out: Path,
    plan: Plan,
    *,
    source: str,
    on_progress: OnProgress = lambda count: None,
) -> Json:
    """Writes the examples of `rows` below `out`; returns the contents of summary.json."""
    if plan.val_ratio < 0 or plan.test_ratio < 0 or plan.val_ratio + plan.test_ratio >= 1:
        raise ConfigError("val_ratio and test_ratio must be 0 or more, and below 1 together.")
    dropped: Counter[str] = Counter()
    facts: list[dict[str, list[str]]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(new_folder(out, mark=SUMMARY))
        spool, asked = stack.enter_context(Spool()), stack.enter_context(Spool())
        read = 0
        for read, row in enumerate(rows, 1):
            on_progress(read)
            example = "no JSON object" if row is None else example_of(row)
            if isinstance(example, str):
                dropped[example] += 1
                continue
            spool.add(example.as_row(plan.form, plan.template))
            facts.append(example.facts)
            if plan.check is not None:
                asked.add({"task": example.row, "response": example.completion})
        with storing(out):
            right = _right(plan.check, asked, folder, dropped)
        kept = list(range(len(spool))) if right is None else right
        if not kept:
            raise InputError(
                f"None of the {read} rows of {source} is usable.",
                hint=_reasons(dropped),
                place=source,
            )
        parts = split_three(
            len(kept), seed=plan.seed, val_ratio=plan.val_ratio, test_ratio=plan.test_ratio
        )
        with storing(out):
            digests = _written(folder, parts, kept, spool, plan)
            summary = {
                "input": source,
                "rows": read,
                "counts": {name: len(part) for name, part in parts._asdict().items()},
                "dropped": dropped.total(),
                "dropped_reasons": dict(dropped.most_common()),
                "seed": plan.seed,
                "sha256": digests,
                **_histograms(facts[number] for number in kept),
            }
            write_summary(folder / SUMMARY, summary)
    return summary


def _right(
    check: Check | None, asked: Spool, folder: Path, dropped: Counter[str]
) -> list[int] | None:
    """Returns the numbers of the right examples; None for all, where nothing was checked."""
    if check is None or not len(asked):
        return None
    file = folder / "candidates.jsonl"
    write_lines(file, asked.lines(range(len(asked))))
    right: list[int] = []
    for number, fault in enumerate(check(file)):
        if fault is None:
            right.append(number)
        else:
            dropped[fault] += 1
    file.unlink()
    return right


def _written(
    folder: Path, parts: Three, kept: list[int], spool: Spool, plan: Plan
) -> dict[str, str]:
    """Writes the parts; returns the sha256 of each file."""
    shares = {"train": 1.0, "validation": plan.val_ratio, "test": plan.test_ratio}
    return {
        name: write_lines(folder / f"{name}.jsonl", spool.lines(kept[number] for number in part))
        for name, part in parts._asdict().items()
        if shares[name] > 0
    }


def _histograms(facts: Iterable[dict[str, list[str]]]) -> dict[str, dict[str, int]]:
    counted: dict[str, Counter[str]] = {}
    for one in facts:
        for histogram, names in one.items():
            counted.setdefault(histogram, Counter()).update(names)
    return {histogram: dict(counts.most_common()) for histogram, counts in counted.items()}


def _reasons(dropped: Counter[str]) -> str:
    return "; ".join(f"{count} times: {reason}" for reason, count in dropped.most_common(5))
