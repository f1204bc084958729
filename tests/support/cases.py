"""Cases that lie as data beside their tests."""

import tomllib
from pathlib import Path
from typing import Any


def cases_of(file: str) -> dict[str, Any]:
    """Returns what the TOML file beside `file` holds, which has its name."""
    return tomllib.loads(Path(file).with_suffix(".toml").read_text(encoding="utf-8"))
