"""Prepares a data set, or the plans of a teacher, for fine-tuning: train, validation and test as
JSONL, and summary.json.

Kept rows + dropped rows = read rows; the parts are `split_three` of the kept rows in reading order.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envserver_records.errors import ConfigError, InputError
from envserver_records.files import storing

from envserver.export.stored import StoredGroup, StoredRollout, read_groups

from .examples import Example, Form, Template, route_of
from .folder import Spool, Three, new_folder, split_three, write_lines, write_summary

Json = dict[str, Any]
OnProgress = Callable[[int], None]
"""Called with the number of rows read so far."""
Check = Callable[[Path], Iterator[str | None]]
"""Gets a JSONL file of {"task": row, "response": text}; yields for each line its fault or None."""

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Plan:
    """Options of the files; `check` keeps only the examples that it finds right."""

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


Balance = Literal["none", "route", "difficulty", "both"]

_LEVELS = ("introductory", "intermediate", "advanced")


@dataclass(frozen=True)
class Selection:
    rows: int | None = None
    balance: Balance = "none"
    seed: int = 7


@dataclass(frozen=True)
class _Candidate:
    """A usable row: its number in the spool, its query's position, its plan's digest."""

    number: int
    position: int
    digest: bytes
    route: str
    difficulty: str

    def cell(self, balance: Balance) -> Hashable:
        parts = {"none": (), "route": (self.route,), "difficulty": (self.difficulty,)}
        return parts.get(balance, (self.route, self.difficulty))


def write_plans(groups: Path, out: Path, selection: Selection) -> Json:
    dropped: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    found: list[_Candidate] = []
    with storing(out), Spool() as spool:
        for group in read_groups([str(groups)]):
            spent["groups"] += 1
            _spend(group, spent)
            best = _best(group)
            if best is None:
                dropped[_fault(group)] += 1
            else:
                found.append(_candidate(group, best, spool))
        kept = _distinct(found, dropped)
        chosen = _chosen(kept, selection, dropped)
        beside = out.with_name(f".{out.name}.new")
        digest = write_lines(beside, spool.lines(one.number for one in chosen))
        beside.replace(out)
    return {
        "groups": spent.pop("groups"),
        "rows": len(chosen),
        "dropped": dict(dropped.most_common()),
        "routes": dict(Counter(one.route for one in chosen).most_common()),
        "difficulties": dict(Counter(one.difficulty for one in chosen).most_common()),
        "spent": dict(spent),
        "sha256": digest,
    }


def balanced(cells: Sequence[Hashable], wanted: int, *, seed: int) -> list[int]:
    """Returns `wanted` positions in order, of each value equally many, as far as there are."""
    of_cell: dict[Hashable, list[int]] = defaultdict(list)
    for position, cell in enumerate(cells):
        of_cell[cell].append(position)
    rng, ranked = random.Random(seed), []
    for number, positions in enumerate(of_cell.values()):
        rng.shuffle(positions)
        ranked += [(rank, number, position) for rank, position in enumerate(positions)]
    return sorted(position for _, _, position in sorted(ranked)[:wanted])


def _best(group: StoredGroup) -> StoredRollout | None:
    valid = [one for one in group.rollouts if one.components.get("valid") == 1 and one.reward]
    return max(valid, key=lambda one: one.reward or 0.0, default=None)


def _fault(group: StoredGroup) -> str:
    for rollout in reversed(group.rollouts):
        for name in rollout.metrics:
            if name.startswith("invalid_"):
                return f"invalid plan: {name.removeprefix('invalid_')}"
        if rollout.truncated or rollout.finish_reason == "length":
            return "invalid plan: cut off"
    return "plan with a wrong result"


def _candidate(group: StoredGroup, rollout: StoredRollout, spool: Spool) -> _Candidate:
    plan = json.loads(rollout.output["plan"].rpartition("</think>")[2])
    query, is_graph = group.public["query"], "steps" in plan
    facts: Json = {"query": query, "plan": plan} if is_graph else {"user_query": query, **plan}
    # The first call of a rollout is the plan's.
    calls = (one.name for one in rollout.timings if one.kind == "engine")
    number = spool.add({"id": rollout.task_id, **facts, "model": next(calls, rollout.model)})
    written = json.dumps(plan, sort_keys=True).encode()
    return _Candidate(
        number,
        rollout.index,
        hashlib.sha256(written).digest()[:16],
        route_of(plan) or "",
        _LEVELS[min(len(plan["steps"]), 3) - 1] if is_graph else plan["difficulty"],
    )


def _distinct(found: Iterable[_Candidate], dropped: Counter[str]) -> list[_Candidate]:
    of_plan: dict[bytes, _Candidate] = {}
    for one in sorted(found, key=lambda one: one.position):
        if of_plan.setdefault(one.digest, one) is not one:
            dropped["duplicate plan"] += 1
    return list(of_plan.values())


def _chosen(
    kept: list[_Candidate], selection: Selection, dropped: Counter[str]
) -> list[_Candidate]:
    if selection.rows is None or selection.rows >= len(kept):
        return kept
    dropped["above --rows"] += len(kept) - selection.rows
    if selection.balance == "none":
        return kept[: selection.rows]
    cells = [one.cell(selection.balance) for one in kept]
    return [kept[n] for n in balanced(cells, selection.rows, seed=selection.seed)]


def _spend(group: StoredGroup, spent: Counter[str]) -> None:
    for rollout in group.rollouts:
        for name in ("prompt_tokens", "completion_tokens"):
            spent[name] += rollout.usage.get(name, 0)
        cost = rollout.usage.get("cost") or {}
        for model in (cost.get("models") or {}).values():
            spent[cost["currency"]] += model
