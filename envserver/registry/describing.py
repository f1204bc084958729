"""Describes environments in their own interpreter; `envserver env install` starts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from envserver_records.errors import UsageError

from . import find
from .description import describe


def main(out: str, *references: str) -> None:
    """Writes the descriptions of environments, as Python's JSON, to the file `out`."""
    try:
        made: list[Any] = [msgspec.to_builtins(describe(name, find(name))) for name in references]
    except UsageError as error:
        sys.exit(str(error))  # says it all without a traceback
    Path(out).write_text(json.dumps(made))
