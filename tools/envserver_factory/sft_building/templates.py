"""Templates: how an action of a trajectory becomes a training row.

In: a YAML file (`configs/sft_templates.yaml`):

    tools:
      reason:
        instruction: "Task: {question}\nContext: {context}"
        response_from: action_output     # or action_input.command, action_input.a.b, action_call
        postprocess: {keep_first_bash_block: true}
      "tool:*": ...                      # all tools whose names begin so; rows of "tool"
    domains:
      math:
        reason: ...                      # in place of the one above, for this domain

Out: for each action with text whose tool has a template, an instruction and an output.
Placeholders: {question}; {context}, the outputs of earlier actions; {notes}, those of earlier hops
(`reason_hop`); {path} and others, from its input. Pure but for reading the file.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from envserver_records.errors import ConfigError, NotFoundError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from envserver.folders import shipped

Json = dict[str, Any]

HOP = "reason_hop"
_MAY_BE_EMPTY = ("context", "notes")
_PLACEHOLDERS = ("question", *_MAY_BE_EMPTY, "path")
_BASH_BLOCK = re.compile(r"```bash\s*(.*?)```", re.DOTALL | re.IGNORECASE)
_OUTPUT, _INPUT, _CALL = "action_output", "action_input.", "action_call"


class Postprocess(BaseModel):
    """The processing of a response."""

    model_config = ConfigDict(extra="forbid")

    keep_first_bash_block: bool = False
    """Keep only the contents of its first bash block; a response without one has no row."""


class Template(BaseModel):
    """The template that turns one tool's actions into rows."""

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
            raise ValueError(f"{error}; a brace that is meant is written twice") from error
        for name in names:
            if name not in _PLACEHOLDERS:
                known = ", ".join(f"{{{one}}}" for one in _PLACEHOLDERS)
                raise ValueError(f"{{{name}}} is not one of {known}; a brace is written twice")
        return text


class Templates(BaseModel):
    """The file of templates."""

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


@dataclass(frozen=True)
class Shown:
    """Additional content of a prompt.

    Args:
        context: fill {context} with the outputs of earlier actions, a paragraph each.
        notes: fill {notes} with the outputs of earlier hops, a line each.
        characters: maximum characters of each; the last ones are kept.
    """

    context: bool = False
    notes: bool = False
    characters: int = 4000


def read_templates(path: Path) -> Templates:
    """Reads the templates in a file, see `shipped`."""
    path = shipped(path)
    if not path.is_file():
        raise NotFoundError(f"There is no file of templates {str(path)!r}.")
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}.") from error
    return templates_of(value, str(path))


def templates_of(value: Any, where: str = "The templates") -> Templates:
    """Validates templates. Raises ConfigError as `read_templates`."""
    try:
        return Templates.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the top"
        raise ConfigError(f"{where}: {place}: {first['msg']}.") from error


def instruction_of(
    template: Template, trajectory: Json, action: Json, before: Sequence[Json], shown: Shown
) -> str | None:
    """Returns the model's instruction; None if a placeholder in it is empty that must not be."""
    values = {
        "question": trajectory.get("question") or "",
        "context": _context(before, shown.characters) if shown.context else "",
        "notes": _notes(before, shown.characters) if shown.notes else "",
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


def _context(before: Sequence[Json], characters: int) -> str:
    said = [_text(action.get("output")).strip() for action in before]
    return "\n\n".join(text for text in said if text)[-characters:].lstrip()


def _notes(before: Sequence[Json], characters: int) -> str:
    said = [_text(one.get("output")).strip() for one in before if one.get("tool") == HOP]
    return "\n".join(text for text in said if text)[-characters:].lstrip()


def _found(action: Json, names: Sequence[str]) -> str:
    """Returns what an action's input holds under these names, as text; "" where there is
    nothing.
    """
    value = action.get("input")
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return _text(value)


def _text(value: Any) -> str:
    return "" if value is None else _as_json(value)


def _as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
