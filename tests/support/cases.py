"""Cases that lie as data beside their tests."""

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def cases_of(file: str, name: str = "") -> Any:
    """Returns what a TOML or JSON file beside `file` holds; without `name` the TOML file of its
    name."""
    path = Path(file).parent / name if name else Path(file).with_suffix(".toml")
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)


def write_jsonl(path: Path, rows: Iterable[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
