"""Prints results of `models probe` as tables for 80 columns, or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
from rich.table import Table
from rich.text import Text

from ..models.probe import ProbeResult
from .console import Console, show_json

_MODES = {
    "tokens": "token ids in, token ids out",
    "completions": "token ids in and out by /v1/completions, messages by chat",
    "chat": "messages in, token ids out: each call has a separate prompt",
    "opaque": "messages in and out, no token ids: text only, cannot be used for RL",
}
_LOGPROBS = {
    "raw": "raw: from the model, before temperature",
    "processed": "processed: after temperature and other sampling settings",
    "unknown": "unknown whether raw or processed",
}
_BETTER = {
    "tokens": "Mode tokens",
    "completions": "Mode completions",
    "chat": "Mode chat",
    "tools": "Tool calls",
    "pausable": "Pausing",
}


class ProbedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The probe result of one address.

    Args:
        tokenizer: the folder of the model's tokenizer and chat template.
        template_kwargs: variables that the engine gives to every chat template, as told or found.
        not_stitched: why conversations cannot be continued from recorded tokens.
    """

    url: str
    probe_result: ProbeResult
    tokenizer: Path | None
    template_kwargs: dict[str, Any]
    not_stitched: str | None


def differences(probed: Sequence[ProbedEngine]) -> list[str]:
    """Returns the differences between replicas of one engine, one line each."""
    lines = []
    facts = [_facts(one) for one in probed]
    for name in facts[0] if facts else ():
        values = [_short(fact[name]) for fact in facts]
        if len(set(values)) > 1:
            addresses = [f"{value} at {one.url}" for value, one in zip(values, probed, strict=True)]
            lines.append(f"{name}: {', '.join(addresses)}")
    return lines


def _facts(probed: ProbedEngine) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(probed.probe_result)
    del facts["reasons"]
    echoes = facts.pop("echoes")
    facts["prompts"] = f"{[len(echo['prompt_ids']) for echo in echoes]} tokens"
    return facts


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unknown" if value in (None, "") else str(value)


def print_json(probed: Sequence[ProbedEngine], different: Sequence[str]) -> None:
    """Prints one JSON object on stdout."""
    engines = [
        {
            "url": one.url,
            **msgspec.to_builtins(one.probe_result),
            "tokenizer": str(one.tokenizer) if one.tokenizer else None,
            "template_kwargs": one.template_kwargs,
            "stitching": one.not_stitched is None,
            "not_stitched": one.not_stitched,
        }
        for one in probed
    ]
    show_json({"engines": engines, "differences": list(different)})


def print_table(probed: Sequence[ProbedEngine], different: Sequence[str]) -> None:
    """Prints one table for each address on stdout, and possible improvements."""
    console = Console(highlight=False, markup=False)
    for one in probed:
        console.print(Text(one.url, style="bold"))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in _rows(one):
            table.add_row(f"  {name}", value)
        console.print(table)
        _print_list(console, "To improve this:", list(_better(one)))
        console.print()
    _print_list(console, "THESE REPLICAS DIFFER:", different, style="bold red")


def _print_list(
    console: Console, title: str, lines: Sequence[str], style: str = "bold yellow"
) -> None:
    if not lines:
        return
    console.print(Text(title, style=style))
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row("  -", line)
    console.print(table)


def _rows(probed: ProbedEngine) -> Iterator[tuple[str, str]]:
    probe_result = probed.probe_result
    root = probe_result.root if probe_result.root not in (None, probe_result.model) else None
    yield "server", probe_result.server or "unknown"
    yield "model", f"{probe_result.model} (from {root})" if root else probe_result.model
    yield (
        "context",
        f"{probe_result.max_model_len} tokens" if probe_result.max_model_len else "unknown",
    )
    yield "mode", f"{probe_result.mode}: {_MODES[probe_result.mode]}"
    yield "tool calls", _yes(probe_result.tools)
    yield "reasoning", "parsed by the engine" if probe_result.reasoning_parser else "not parsed"
    yield "logprobs", _LOGPROBS[probe_result.logprobs]
    yield "weight versions", "for each token" if probe_result.weight_versions else "not reported"
    yield "pause, resume", _yes(probe_result.pausable)
    yield "metrics", _yes(probe_result.metrics)
    yield "tokenizer", str(probed.tokenizer) if probed.tokenizer else "not found"
    if probed.template_kwargs:
        yield "template variables", orjson.dumps(probed.template_kwargs).decode()
    yield "stitching", _stitching(probed)


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def _stitching(probed: ProbedEngine) -> str:
    if probed.not_stitched is not None:
        return f"no: {probed.not_stitched}"
    if not probed.probe_result.tools:
        return "yes: prompts rendered here match the engine's"
    return "yes: prompts rendered here match the engine's, also with tools"


def _better(probed: ProbedEngine) -> Iterator[str]:
    """Returns what the engine lacks, why, and how to fix it, grouped by reason."""
    reasons = probed.probe_result.reasons
    for reason in dict.fromkeys(reasons.values()):
        names = [_BETTER[name] for name, why in reasons.items() if why == reason]
        yield f"{', '.join(names)}: {reason}"
