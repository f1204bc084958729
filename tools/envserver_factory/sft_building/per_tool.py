"""Builds rows for each tool from unified trajectories: OUT/TOOL/train.jsonl, val.jsonl, summary.

A row is {"tool", "instruction", "output", "meta": {"task_id", "domain", "step"}}, or the same as a
conversation; each takes a few bytes of memory.
"""

from __future__ import annotations

import json
import math
import re
import string
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from envserver_records.errors import ConfigError, InputError, NotFoundError
from envserver_records.files import storing
from envserver_records.tasks import Json
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from envserver.folders import shipped

from ..trajectories import Document, objects
from . import (
    Held,
    Spool,
    new_folder,
    split_tools,
    split_tools_by_group,
    write_lines,
    write_summary,
)

#     tools:
#       reason:
#         instruction: "Task: {question}
# Context: {context}"
#         response_from: action_output     # or action_input.command, action_input.a.b, action_call
#         postprocess: {keep_first_bash_block: true}
#       "tool:*": ...                      # all tools whose names begin so; rows of "tool"
#     domains:
#       math:
#         reason: ...                      # in place of the one above, for this domain

HOP = "reason_hop"
_MAY_BE_EMPTY = ("context", "notes")
_PLACEHOLDERS = ("question", *_MAY_BE_EMPTY, "path")
_BASH_BLOCK = re.compile(r"```bash\s*(.*?)```", re.DOTALL | re.IGNORECASE)
_OUTPUT, _INPUT, _CALL = "action_output", "action_input.", "action_call"


class Postprocess(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keep_first_bash_block: bool = False
    """Keep only the contents of its first bash block; a response without one has no row."""


class Template(BaseModel):
    model_config = ConfigDict(extra="forbid")

    instruction: str = Field(min_length=1)
    response_from: str = Field(default=_OUTPUT, pattern=r"^action_(call|output|input(\.[^.]+)+)$")
    postprocess: Postprocess = Postprocess()

    @field_validator("instruction")
    @classmethod
    def _known_placeholders(cls, text: str) -> str:
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        except ValueError as error:
            raise ValueError(f"{error}; write a literal brace twice") from error
        for name in names:
            if name not in _PLACEHOLDERS:
                known = ", ".join(f"{{{placeholder}}}" for placeholder in _PLACEHOLDERS)
                raise ValueError(f"{{{name}}} is not one of {known}; write a literal brace twice")
        return text


class Templates(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tools: dict[str, Template]
    domains: dict[str, dict[str, Template]] = {}

    def find(self, domain: str, tool: str) -> tuple[str, Template] | None:
        """Returns the name of the rows that actions of `tool` become, and their template."""
        for templates in (self.domains.get(domain, {}), self.tools):
            if (template := templates.get(tool)) is not None:
                return tool, template
            start, colon, _ = tool.partition(":")
            if colon and (template := templates.get(f"{start}:*")) is not None:
                return start, template
        return None


def read_templates(path: Path) -> Templates:
    """Reads the templates in a file, see `shipped`."""
    path = shipped(path)
    if not path.is_file():
        raise NotFoundError(f"There is no file of templates {str(path)!r}.")
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}.") from error
    try:
        return Templates.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the top"
        raise ConfigError(f"{path}: {place}: {first['msg']}.") from error


def instruction_of(
    template: Template, trajectory: Json, action: Json, before: Sequence[Json], choice: Choice
) -> str | None:
    """Returns the model's instruction; None if a placeholder is empty that must not be."""
    hops = [action for action in before if action.get("tool") == HOP]
    values = {
        "question": trajectory.get("question") or "",
        "context": _outputs(before, "\n\n", choice.characters) if choice.context else "",
        "notes": _outputs(hops, "\n", choice.characters) if choice.notes else "",
        "path": _found(action, ["path"]),
    }
    used = {name for _, name, _, _ in string.Formatter().parse(template.instruction) if name}
    if any(not str(values[name]).strip() for name in used - {*_MAY_BE_EMPTY}):
        return None
    return template.instruction.format(**values).strip()


def response_of(template: Template, action: Json) -> str:
    """Returns the model's response; "" for none. An output that is not a string becomes JSON."""
    if template.response_from == _OUTPUT:
        said = _text(action.get("output"))
    elif template.response_from == _CALL:
        name = str(action.get("tool")).partition(":")[2] or action.get("tool")
        said = _as_json({"name": name, "arguments": action.get("input")})
    else:
        said = _found(action, template.response_from.removeprefix(_INPUT).split("."))
    if template.postprocess.keep_first_bash_block:
        block = _BASH_BLOCK.search(said)
        return block[1].strip() if block else ""
    return said


def _outputs(before: Sequence[Json], between: str, characters: int) -> str:
    said = [_text(action.get("output")).strip() for action in before]
    return between.join(text for text in said if text)[-characters:].lstrip()


def _found(action: Json, names: Sequence[str]) -> str:
    """Returns what an action's input holds under these names, as text."""
    value = action.get("input")
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return _text(value)


def _text(value: Any) -> str:
    return "" if value is None else _as_json(value)


def _as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


Form = Literal["rows", "messages"]
OnProgress = Callable[[int, int], None]
"""Called with the numbers of trajectories and bytes read so far."""

SUMMARY = "SUMMARY.json"


@dataclass(frozen=True)
class Choice:
    """The choice of rows, and their split; as in `BuildSettings`.

    Trajectories without a reward are below every `min_reward`.
    """

    seed: int = 123
    val_ratio: float = 0.05
    strict_split: bool = False
    group_by: Literal["task_id"] | None = None
    min_reward: float | None = None
    form: Form = "rows"
    context: bool = False
    notes: bool = False
    characters: int = 4000


@dataclass
class Report:
    """Counts of a build; `summary`: {tool: {"train", "val"}}; `yields`: {domain: {tool: rows}}.

    `below`: trajectories with too low a reward. Actions without a row: without a template, `empty`,
    `errors` (failed or refused: nothing to learn from), `blank` (an empty placeholder).
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
    choice, report = choice or Choice(), report or Report()
    actions = [action for action in trajectory.get("actions") or [] if isinstance(action, dict)]
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
        instruction = instruction_of(template, trajectory, action, actions[:number], choice)
        if instruction is None:
            report.blank += 1
            continue
        counts[tool] = counts.get(tool, 0) + 1
        yield _row(trajectory, action, tool, instruction, output, choice.form)


def _failed(action: Json) -> bool:
    """Returns whether it failed or was refused; older files say so in its output."""
    output = action.get("output")
    return bool(action.get("error") or (isinstance(output, dict) and output.get("error")))


def reward_of(trajectory: Json) -> float | None:
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
                f"{document.place}: not a unified trajectory: it has no list `actions`.",
                hint="`envserver convert` converts it.",
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
    """Several rollouts of a task have ids of their own."""
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


def _row(
    trajectory: Json, action: Json, tool: str, instruction: str, output: str, form: Form
) -> Json:
    task_id, domain = trajectory.get("task_id"), trajectory.get("domain")
    if form == "rows":
        meta = {"task_id": task_id, "domain": domain, "step": action.get("step")}
        return {"tool": tool, "instruction": instruction, "output": output, "meta": meta}
    said = [{"role": "user", "content": instruction}, {"role": "assistant", "content": output}]
    return {
        "messages": said,
        "reward": reward_of(trajectory),
        "env": domain,
        "task_id": task_id,
        "tool": tool,
        "step": action.get("step"),
    }
