"""`envserver models WORD`: finds the command that the word names, and says which there are."""

from __future__ import annotations

import importlib

from envserver_records.errors import UsageError

_WORDS = {
    "list": ("models_list", "show the models that have names"),
    "start": ("models_start", "start an engine for a model, keep it up, end it in order"),
    "make-tiny": ("models_tiny", "make a tiny language model that learns on a laptop"),
    "probe": ("models_probe", "show how an engine can be asked, and what it lacks"),
    "sim": ("models_sim", "serve the simulated engine over HTTP"),
}


def run(argv: list[str]) -> int:
    """The command.

    Raises:
        UsageError: the first word names none.
    """
    if argv and argv[0] in _WORDS:
        module = importlib.import_module(f".{_WORDS[argv[0]][0]}", __package__)
        return int(module.run(argv[1:]))
    if argv in (["--help"], ["-h"]):
        print(_help())
        return 0
    words = " or ".join(f"`envserver models {word}`" for word in _WORDS)
    raise UsageError(f"Which command about models? {words}.")


def _help() -> str:
    lines = [f"  {word:<9}  {summary}" for word, (_, summary) in _WORDS.items()]
    return "\n".join(
        [
            "Usage: envserver models WORD [--name value ...]",
            "",
            *lines,
            "",
            "For example: envserver models probe http://localhost:8000",
            "All settings of a word: envserver models WORD --help",
        ]
    )
