"""Describes the sandbox's tools to models: OpenAI function tools, names and arguments."""

from __future__ import annotations

from typing import Any

_PATH = {"type": "string", "minLength": 1, "maxLength": 4096}
_CONTENT = {"type": "string", "maxLength": 1_000_000}
_CODE = {"type": "string", "minLength": 1, "maxLength": 100_000}

_TOOLS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "read_file": (
        "Reads lines of a text file, numbered.",
        {
            "path": {**_PATH, "description": "Path of the file, below /work."},
            "start": {
                "type": "integer",
                "minimum": 1,
                "description": "First line; default 1.",
            },
            "lines": {
                "type": "integer",
                "minimum": 1,
                "maximum": 2000,
                "description": "How many lines; default 200.",
            },
        },
        ["path"],
    ),
    "write_file": (
        "Makes a file or replaces all that is in it. Missing directories are made.",
        {
            "path": {**_PATH, "description": "Path of the file, below /work."},
            "content": {**_CONTENT, "description": "Everything that the file shall hold."},
        },
        ["path", "content"],
    ),
    "append_file": (
        "Adds text at the end of a file, which is made if it does not exist.",
        {
            "path": {**_PATH, "description": "Path of the file, below /work."},
            "content": {**_CONTENT, "description": "The text to add, as it is."},
        },
        ["path", "content"],
    ),
    "edit": (
        "Replaces a piece of a file. The piece must occur exactly once in it.",
        {
            "path": {**_PATH, "description": "Path of the file, below /work."},
            "old": {
                **_CONTENT,
                "minLength": 1,
                "description": "The piece, exactly as it stands there, without line numbers.",
            },
            "new": {**_CONTENT, "description": "What shall stand there instead."},
        },
        ["path", "old", "new"],
    ),
    "list_dir": (
        "Lists a directory: names, kinds and sizes.",
        {
            "path": {**_PATH, "description": "Path of the directory; default /work."},
            "depth": {
                "type": "integer",
                "minimum": 1,
                "maximum": 5,
                "description": "How many levels; default 1.",
            },
        },
        [],
    ),
    "grep": (
        "Finds the lines of text files that a regular expression (of Python) matches.",
        {
            "pattern": {"type": "string", "minLength": 1, "maxLength": 1000},
            "path": {**_PATH, "description": "File or directory to search; default /work."},
            "glob": {
                "type": "string",
                "maxLength": 200,
                "description": "Only files of such names, as *.py or src/**/*.py; default all.",
            },
            "max": {
                "type": "integer",
                "minimum": 1,
                "maximum": 500,
                "description": "Most lines to show; default 100.",
            },
        },
        ["pattern"],
    ),
    "run_cmd": (
        "Runs a program in /work, without a shell. Its output is shown, a long one without its "
        "middle. Nothing that it starts lives on.",
        {
            "cmd": {
                "type": "array",
                "items": {"type": "string", "maxLength": 100_000},
                "minItems": 1,
                "maxItems": 1000,
                "description": "The program and its arguments.",
            },
        },
        ["cmd"],
    ),
    "bash": (
        "Runs a command line with bash in /work. Its output is shown, a long one without its "
        "middle. Directory, variables and background programs do not live on.",
        {"command": {**_CODE, "description": "The command line, or several lines."}},
        ["command"],
    ),
    "python": (
        "Runs a Python program in /work and shows what it prints. Variables do not live on.",
        {"code": {**_CODE, "description": "The program."}},
        ["code"],
    ),
    "git_diff": (
        "Shows all changes of the repository since the start, as a patch.",
        {},
        [],
    ),
}

NAMES = tuple(_TOOLS)
_TIMED = ("run_cmd", "bash", "python")


def description(name: str, command_seconds: int) -> dict[str, Any]:
    """The tool `name` in OpenAI's shape; commands may ask for up to `command_seconds`."""
    words, properties, required = _TOOLS[name]
    if name in _TIMED:
        timeout = {
            "type": "integer",
            "minimum": 1,
            "maximum": command_seconds,
            "description": f"Seconds until it is killed; default {command_seconds}.",
        }
        properties = {**properties, "timeout": timeout}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": words,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            },
        },
    }
