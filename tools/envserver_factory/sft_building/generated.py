"""Rows of plans that a teacher wrote: `envserver sft router generate`.

In: a file of groups of the environment `router`, one for each query. Out: JSONL, a row for each
valid plan: the ten keys beside `user_query`, or `query` and `plan` where plans are graphs. Rows are
in the order of the queries, whatever the order of the groups; no plan occurs twice; rows + dropped
= groups; the file is complete or unchanged.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envserver_records.files import storing

from envserver.export.stored import StoredGroup, StoredRollout, read_groups

from .folder import Spool, write_lines
from .router import route_of

Json = dict[str, Any]
Balance = Literal["none", "route", "difficulty", "both"]

_LEVELS = ("introductory", "intermediate", "advanced")


@dataclass(frozen=True)
class Selection:
    """The choice among usable rows."""

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
    """Writes the rows of `groups` to `out`; returns counts for a summary."""
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
    """Returns `wanted` positions of `cells` in order: of each value equally many, as far as there
    are; all positions if there are fewer."""
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
