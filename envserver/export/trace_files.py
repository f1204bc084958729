"""Traces of runs as files, `{model}/{label}/run_NNN.json` below one folder.

Files are written atomically; a damaged one counts as missing, so that its run is made again.
`index.json` beside them lists what exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson
from envserver_records.errors import ConflictError

from .traces import problems_of_trace
from .unified import write_json

INDEX = "index.json"
Json = dict[str, Any]


def whole_trace(path: Path) -> Json | None:
    """Returns the trace in `path`; None where there is none, or a damaged or wrong one."""
    try:
        document = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    if not isinstance(document, dict) or list(problems_of_trace(document)):
        return None
    return document


def check_same_run(trace: Json, wanted: Mapping[str, Any], path: Path) -> None:
    """Checks that the trace in `path` is of the expected run.

    Args:
        wanted: keys of a trace and their expected values.
    """
    for key, value in wanted.items():
        if trace.get(key) != value:
            raise ConflictError(
                f"{path} is of another run: its {key} is another than now.",
                hint="Name another folder by --out, or another --label; or --overwrite.",
            )


def write_trace(path: Path, trace: Json) -> None:
    """Writes a trace. Raises as `write_json`."""
    write_json(path, trace)


def write_index(folder: Path, facts: Mapping[str, Any], paths: Iterable[Path]) -> None:
    """Writes the list of traces, with how each ended.

    Args:
        facts: facts about all of them.
        paths: of the traces; damaged ones are left out.
    """
    runs = []
    for path in sorted(paths):
        trace = whole_trace(path)
        if trace is not None:
            name = path.relative_to(folder).as_posix()
            runs.append({"path": name, "run_id": trace["run_id"], **trace["outcome"]})
    write_json(folder / INDEX, {**facts, "runs": runs})
