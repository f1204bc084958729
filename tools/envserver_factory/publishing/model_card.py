"""Writes evaluation results into a model card: `model-index` in its YAML header, as the Hugging
Face hub reads it, and a table for people.

In: the text of a README.md, and results. Out: the text with them. What holds: results of an earlier
call are replaced, results of others stay, and so does all other text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import yaml
from envserver_records.errors import InputError

_KIND: Final = "envserver/"
"""Beginning of the data set type of our results."""
_BEGIN: Final = "<!-- envserver: evaluation -->"
_END: Final = "<!-- envserver: end of evaluation -->"
_SECTION: Final = re.compile(rf"\n*{re.escape(_BEGIN)}.*?{re.escape(_END)}\n*", re.DOTALL)
_HEADER: Final = re.compile(r"\A---\r?\n(.*?)^---[ \t]*\r?\n?", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """The evaluation of a model on one environment.

    Args:
        tasks, attempts: numbers of those that count.
        mean_reward: the mean over tasks; `low`, `high`: its 95 % interval, None for one task.
        pass_at: pass@k by k.
    """

    environment: str
    split: str
    tasks: int
    attempts: int
    mean_reward: float
    low: float | None
    high: float | None
    pass_at: Mapping[int, float] = field(default_factory=dict)


def with_results(text: str, name: str, results: Sequence[Result]) -> str:
    """Returns a card with the results in it.

    Args:
        name: name of the model, for `model-index`.
    """
    header, body = split_card(text)
    others = [one for one in _entries(header) if not _is_ours(one)]
    entries = [*others, *map(_entry, results)]
    header["model-index"] = [{"name": name, "results": entries}]
    body = _SECTION.sub("\n\n", body).rstrip("\n")
    return joined_card(header, f"{body}\n\n{_BEGIN}\n{_table(results)}{_END}\n")


def split_card(text: str) -> tuple[dict[str, Any], str]:
    """Returns the header of a card, {} without one, and the text below.
    Raises InputError: the header is not a YAML mapping.
    """
    found = _HEADER.match(text)
    if found is None:
        return {}, text
    try:
        header = yaml.safe_load(found[1]) or {}
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-13-01
        raise InputError(f"README.md: its header is not YAML: {error}") from error
    if not isinstance(header, dict):
        raise InputError("README.md: its header must be a mapping.")
    return header, text[found.end() :]


def joined_card(header: Mapping[str, Any], body: str) -> str:
    """Returns the text of a card."""
    told = yaml.safe_dump(dict(header), sort_keys=False, allow_unicode=True)
    return f"---\n{told}---\n\n{body.lstrip(chr(10))}"


def _entries(header: Mapping[str, Any]) -> list[Any]:
    models = header.get("model-index")
    first = models[0] if isinstance(models, list) and models else {}
    found = first.get("results") if isinstance(first, dict) else None
    return found if isinstance(found, list) else []


def _is_ours(entry: Any) -> bool:
    data = entry.get("dataset") if isinstance(entry, dict) else None
    return isinstance(data, dict) and str(data.get("type", "")).startswith(_KIND)


def _entry(result: Result) -> dict[str, Any]:
    counted = {"tasks": result.tasks, "attempts": result.attempts}
    interval = {} if result.low is None else {"low": result.low, "high": result.high}
    metrics = [
        {
            "type": "mean_reward",
            "value": result.mean_reward,
            "name": "mean reward",
            "args": counted | interval,
        },
        *(
            {"type": f"pass@{k}", "value": value, "name": f"pass@{k}"}
            for k, value in result.pass_at.items()
        ),
    ]
    name = result.environment
    return {
        "task": {"type": "text-generation", "name": "Agent in an environment"},
        "dataset": {"type": f"{_KIND}{name}", "name": name, "split": result.split},
        "metrics": metrics,
    }


def _table(results: Sequence[Result]) -> str:
    lines = [
        "## Evaluation\n",
        "| environment | split | tasks | attempts | mean reward | 95 % interval | pass@k |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for one in results:
        interval = "" if one.low is None else f"{one.low:.3f} to {one.high:.3f}"
        passed = ", ".join(f"@{k} {value:.3f}" for k, value in one.pass_at.items())
        name = one.environment.replace("|", "\\|")
        lines.append(
            f"| {name} | {one.split} | {one.tasks} | {one.attempts} | {one.mean_reward:.3f} | "
            f"{interval} | {passed} |"
        )
    told = "\nMeasured by `envserver evaluate`; intervals resample tasks.\n"
    return "\n".join(lines) + "\n" + told
