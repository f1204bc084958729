"""`envserver sft WORD`: finds the command that the word names, and says which there are."""

from __future__ import annotations

import importlib

from envserver_records.errors import UsageError

_WORDS = {
    "build": ("sft_build_command", "rows for each tool from unified trajectories, train and val"),
    "preview": ("sft_preview_command", "show what `sft build` would write, write nothing"),
    "router": ("sft_prepare_command", "prepare the router's data set: queries and plans"),
    "math": ("sft_prepare_command", "prepare problems with solutions whose answer is right"),
    "code": ("sft_prepare_command", "prepare instructions with programs"),
}


def run(argv: list[str]) -> int:
    """The command.

    Raises:
        UsageError: the first word names none.
    """
    if argv and argv[0] in _WORDS:
        module = importlib.import_module(f".{_WORDS[argv[0]][0]}", __package__)
        return int(module.run(argv))
    if argv in (["--help"], ["-h"]):
        print(_help())
        return 0
    words = ", ".join(f"`envserver sft {word}`" for word in _WORDS)
    raise UsageError(f"Which data for supervised fine-tuning? {words}.")


def _help() -> str:
    lines = [f"  {word:<9}  {summary}" for word, (_, summary) in _WORDS.items()]
    return "\n".join(
        [
            "Usage: envserver sft WORD SOURCE [--name value ...]",
            "",
            *lines,
            "",
            "For example: envserver sft build data/unified --out data/sft",
            "All settings of a word: envserver sft WORD --help",
            "Rows of the best rollouts, made now: envserver sft-gen --help",
        ]
    )
