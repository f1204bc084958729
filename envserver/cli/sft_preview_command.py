"""`envserver sft preview SOURCE...`: shows the first rows of each tool."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .console import Console
from .specs.sft_preview_command import COMMAND, PreviewSettings


def run(argv: list[str]) -> int:
    """Runs the command; returns 1 if there are no rows."""
    from envserver_factory.sft_building.folder import as_line

    settings = COMMAND.read(argv)
    rows, tools, made = _rows(settings)
    if settings.as_json:
        sys.stdout.write("".join(as_line(row).decode() for row in rows))
        return 0 if rows else 1
    console = Console()
    for row in rows:
        _show(console, row, settings.width)
    bare = [f"{tool} ({count})" for tool, count in tools.most_common() if tool not in made]
    said = ", ".join(f"{tool} ({count})" for tool, count in made.most_common())
    console.say(f"Rows: {said or 'none'}.")
    if bare:
        console.say(f"Actions that became none: {', '.join(bare)}.")
    return 0 if rows else 1


def _rows(settings: PreviewSettings) -> tuple[list[dict[str, Any]], Counter[str], Counter[str]]:
    """Returns the rows to show, and counts by tool of all actions and all rows."""
    from envserver_factory.sft_building.per_tool import Choice, reward_of, rows_of
    from envserver_factory.sft_building.templates import Shown, read_templates
    from envserver_factory.trajectories.documents import objects

    templates = read_templates(settings.templates)
    choice = Choice(
        form=settings.form, shown=Shown(settings.context, settings.notes, settings.characters)
    )
    shown: list[dict[str, Any]] = []
    tools: Counter[str] = Counter()
    made: Counter[str] = Counter()
    read = 0
    for document in objects(settings.sources):
        rows: Iterable[dict[str, Any]]
        if _is_row(document.value):
            rows = [document.value]
        elif read == settings.trajectories:
            break
        else:
            read += 1
            reward = reward_of(document.value)
            if settings.min_reward is not None and (reward is None or reward < settings.min_reward):
                continue
            tools.update(_tools(document.value.get("actions")))
            rows = rows_of(document.value, templates, choice)
        for row in rows:
            made[row["tool"]] += 1
            if made[row["tool"]] <= settings.n and settings.tool in (None, row["tool"]):
                shown.append(row)
    return shown, tools, made


def _is_row(document: dict[str, Any]) -> bool:
    """Returns whether `sft build` wrote it."""
    return "tool" in document and ("instruction" in document or "messages" in document)


def _tools(actions: Any) -> Iterable[str]:
    found = actions if isinstance(actions, list) else []
    return [str(action.get("tool")) for action in found if isinstance(action, dict)]


def _show(console: Console, row: dict[str, Any], width: int) -> None:
    if "messages" in row:
        asked, said = (message["content"] for message in row["messages"])
        place = f"{row['task_id']}, step {row['step']}"
    else:
        asked, said = row["instruction"], row["output"]
        place = f"{row['meta']['task_id']}, step {row['meta']['step']}"
    console.rule(f"{row['tool']}: {place}".replace("[", "\\["), align="left")
    for name, text in (("instruction", asked), ("output", said)):
        cut = text if len(text) <= width else f"{text[:width]} ... ({len(text)} characters)"
        console.print(f"{name}:", style="bold")
        console.say(cut)
