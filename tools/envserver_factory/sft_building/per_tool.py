"""Builds rows for each tool from unified trajectories: OUT/TOOL/train.jsonl, val.jsonl,
SUMMARY.json.

In: files of trajectories, and templates. Out: one row for each action whose tool has a template,
{"tool", "instruction", "output", "meta": {"task_id", "domain", "step"}}, or the same as
conversations. `splits` gives the order of rows; each row takes a few bytes of memory.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from envserver_records.errors import InputError
from envserver_records.files import storing

from ..trajectories.documents import Document, objects
from .folder import Spool, new_folder, write_lines, write_summary
from .splits import Held, split_tools, split_tools_by_group
from .templates import Shown, Templates, instruction_of, response_of

Json = dict[str, Any]
Form = Literal["rows", "messages"]
OnProgress = Callable[[int, int], None]
"""Called with the numbers of trajectories and bytes read so far."""

SUMMARY = "SUMMARY.json"


@dataclass(frozen=True)
class Choice:
    """The choice of rows, and their split.

    Args:
        seed: shuffle seed.
        val_ratio: held-out share of each tool's rows, rounded down, at least one row.
        strict_split: a tool's only row is for training; else it is in both parts.
        group_by: "task_id": all rows of a task are in one part, for all tools.
        min_reward: only trajectories with at least this reward; those without a reward are left
        out. form: rows, or messages.
    """

    seed: int = 123
    val_ratio: float = 0.05
    strict_split: bool = False
    group_by: Literal["task_id"] | None = None
    min_reward: float | None = None
    form: Form = "rows"
    shown: Shown = field(default_factory=Shown)


@dataclass
class Report:
    """Counts of a build.

    Args:
        summary: {tool: {"train", "val"}}: numbers of rows.
        read, below: trajectories; those whose reward was too low.
        without_template, empty: actions without a row.
        errors: actions that failed or were refused, which nobody should learn.
        blank: rows left out because a placeholder of their instruction was empty.
        yields: {domain: {tool: rows}}.
    """

    summary: dict[str, dict[str, int]] = field(default_factory=dict)
    read: int = 0
    below: int = 0
    without_template: int = 0
    empty: int = 0
    errors: int = 0
    blank: int = 0
    yields: dict[str, dict[str, int]] = field(default_factory=dict)


def build(
    sources: Sequence[str],
    templates: Templates,
    out: Path,
    choice: Choice | None = None,
    *,
    on_progress: OnProgress = lambda trajectories, size: None,
) -> Report:
    """Writes the rows of the trajectories in `sources` below `out`, all or nothing."""
    choice = choice or Choice()
    report = Report()
    with Spool() as spool:
        tools = _collected(objects(sources), templates, choice, spool, report, on_progress)
        if not tools:
            raise InputError(
                f"None of {report.read} trajectories has an action that became a row: "
                f"{report.below} below the minimum reward; {report.without_template} actions "
                f"without a template, {report.empty} without text, {report.errors} failed, "
                f"{report.blank} with an empty placeholder.",
                hint="See the tools in the file of templates.",
            )
        held = _split({tool: rows.groups for tool, rows in tools.items()}, choice)
        with new_folder(out, mark=SUMMARY) as folder, storing(out):
            for tool, parts in held.items():
                numbers = tools[tool].numbers
                for name, chosen in (("train", parts.train), ("val", parts.val)):
                    lines = spool.lines(numbers[number] for number in chosen)
                    write_lines(folder / tool / f"{name}.jsonl", lines)
                report.summary[tool] = {"train": len(parts.train), "val": len(parts.val)}
            write_summary(folder / SUMMARY, report.summary)
    return report


def rows_of(
    trajectory: Json,
    templates: Templates,
    choice: Choice | None = None,
    *,
    report: Report | None = None,
) -> Iterator[Json]:
    """Yields the rows of one trajectory, in the order of its actions."""
    choice, report = choice or Choice(), report or Report()
    actions = [one for one in trajectory.get("actions") or [] if isinstance(one, dict)]
    domain = str(trajectory.get("domain"))
    counts = report.yields.setdefault(domain, {})
    for number, action in enumerate(actions):
        found = templates.find(domain, str(action.get("tool")))
        if found is None:
            report.without_template += 1
            continue
        tool, template = found
        if _failed(action):
            report.errors += 1
            continue
        output = response_of(template, action)
        if not output:
            report.empty += 1
            continue
        asked = instruction_of(template, trajectory, action, actions[:number], choice.shown)
        if asked is None:
            report.blank += 1
            continue
        counts[tool] = counts.get(tool, 0) + 1
        yield _row(trajectory, action, tool, asked, output, choice.form)


def _failed(action: Json) -> bool:
    """Returns whether it failed or was refused; older files say so in its output."""
    output = action.get("output")
    return bool(action.get("error") or (isinstance(output, dict) and output.get("error")))


def reward_of(trajectory: Json) -> float | None:
    """Returns its reward; None where it has none."""
    metadata = trajectory.get("metadata")
    reward = metadata.get("reward") if isinstance(metadata, dict) else None
    if isinstance(reward, bool) or not isinstance(reward, (int, float)):
        return None
    return float(reward) if math.isfinite(reward) else None


@dataclass
class _Rows:
    """The rows of one tool: their places in the spool, and the task of each."""

    numbers: array[int] = field(default_factory=lambda: array("Q"))
    groups: list[str] = field(default_factory=list)


def _collected(
    found: Iterable[Document],
    templates: Templates,
    choice: Choice,
    spool: Spool,
    report: Report,
    on_progress: OnProgress,
) -> dict[str, _Rows]:
    tools: dict[str, _Rows] = {}
    size = 0
    for document in found:
        trajectory = document.value
        if not isinstance(trajectory.get("actions"), list):
            raise InputError(
                f"{document.place}: no unified trajectory: it has no list `actions`.",
                hint="`envserver convert` makes one of it.",
                place=document.place,
            )
        report.read += 1
        size += document.bytes
        on_progress(report.read, size)
        if choice.min_reward is not None:
            reward = reward_of(trajectory)
            if reward is None or reward < choice.min_reward:
                report.below += 1
                continue
        task = _task_of(trajectory)
        for row in rows_of(trajectory, templates, choice, report=report):
            rows = tools.setdefault(row["tool"], _Rows())
            rows.numbers.append(spool.add(row))
            rows.groups.append(task)
    return tools


def _task_of(trajectory: Json) -> str:
    """Returns its task: several rollouts of a task have ids of their own."""
    metadata = trajectory.get("metadata")
    own = metadata.get("task_id") if isinstance(metadata, dict) else None
    return str(trajectory.get("task_id") if own is None else (trajectory.get("domain"), own))


def _split(groups: dict[str, list[str]], choice: Choice) -> dict[str, Held]:
    if choice.group_by is not None:
        return split_tools_by_group(groups, seed=choice.seed, val_ratio=choice.val_ratio)
    return split_tools(
        {tool: len(rows) for tool, rows in groups.items()},
        seed=choice.seed,
        val_ratio=choice.val_ratio,
        strict=choice.strict_split,
    )


def _row(trajectory: Json, action: Json, tool: str, asked: str, output: str, form: Form) -> Json:
    task_id, domain = trajectory.get("task_id"), trajectory.get("domain")
    if form == "rows":
        meta = {"task_id": task_id, "domain": domain, "step": action.get("step")}
        return {"tool": tool, "instruction": asked, "output": output, "meta": meta}
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    return {
        "messages": said,
        "reward": reward_of(trajectory),
        "env": domain,
        "task_id": task_id,
        "tool": tool,
        "step": action.get("step"),
    }
