"""Writes the README.md of an adapter or a model for the hub: a YAML header, then facts.

It contains nothing of this machine (folders, user names); the same training gives the same card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class CardFacts:
    """The facts in a card.

    Args:
        method: sft or dpo.
        tool: the tool that it was trained for; None: several.
        counts: how many rows became examples, and why others were left out.
        results: the last value of each metric.
        data: sha256 of the rows.
        heldout: measures of held-out rows by name: before and after the training.
    """

    method: str
    name: str
    base: str
    tool: str | None
    settings: Mapping[str, Any]
    counts: Mapping[str, int]
    results: Mapping[str, float]
    data: str
    versions: Mapping[str, str]
    license: str | None = None
    heldout: Mapping[str, Sequence[float]] = field(default_factory=dict)


_METHODS = {
    "sft": "Supervised fine-tuning; the loss counts only the assistant's tokens.",
    "dpo": "Direct preference optimization; only the assistant's tokens count.",
}


def card_of(about: CardFacts) -> str:
    return f"---\n{_header(about)}---\n\n{_body(about)}"


def base_name(model: str, given: str | None) -> str:
    """The base model's name for the card, which is never a path."""
    return given or (Path(model).resolve().name if Path(model).exists() else model)


def _header(about: CardFacts) -> str:
    lora = bool(about.settings["lora"])
    header: dict[str, Any] = {
        "base_model": about.base,
        "library_name": "peft" if lora else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["trl", about.method, "envserver", *(["lora"] if lora else [])],
    }
    if about.license:
        header["license"] = about.license
    if lora:
        header["base_model_relation"] = "adapter"
    return yaml.safe_dump(header, sort_keys=False, allow_unicode=True)


def _body(about: CardFacts) -> str:
    what = "LoRA adapter for" if about.settings["lora"] else "fine-tuned from"
    tool = f" It was trained for the tool `{about.tool}`." if about.tool else ""
    parts = [
        f"# {about.name}\n\nA {what} {about.base}. {_METHODS[about.method]}{tool}\n",
        "## Data\n\n" + _table({**about.counts, "sha256": about.data}),
        "## Training\n\n" + _table(about.settings),
        "## Held-out rows\n\n" + _before_and_after(about.heldout) if about.heldout else "",
        "## Last numbers\n\n" + _table(about.results) if about.results else "",
        "## Use\n\n" + _use(about),
        "## Libraries\n\n" + _table(about.versions),
    ]
    return "\n".join(part for part in parts if part)


def _table(facts: Mapping[str, Any]) -> str:
    lines = [f"| {name.replace('_', ' ')} | {_cell(value)} |" for name, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *lines]) + "\n"


def _before_and_after(numbers: Mapping[str, Sequence[float]]) -> str:
    lines = [
        f"| {name.replace('_', ' ')} | {' | '.join(map(_cell, values))} |"
        for name, values in numbers.items()
    ]
    return "\n".join(["| | before | after |", "|---|---|---|", *lines]) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value).replace("|", "\\|")


def _use(about: CardFacts) -> str:
    if about.settings["lora"]:
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            "",
            f'base = AutoModelForCausalLM.from_pretrained("{about.base}")',
            'model = PeftModel.from_pretrained(base, "THIS FOLDER")',
        ]
    else:
        lines = [
            "from transformers import AutoModelForCausalLM",
            "",
            'model = AutoModelForCausalLM.from_pretrained("THIS FOLDER")',
        ]
    code = "\n".join(lines)
    return f"```python\n{code}\n```\n"
