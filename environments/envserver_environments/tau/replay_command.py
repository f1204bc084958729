"""Replays vectors of tau2-bench.

`python -m envserver_environments.tau replay FILE --tau2-data DIR`.

Prints a line per vector: reward, components, and whether all is as `expected` tells; exits with 1
if anything differs, with 2 if the vectors or the data cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envserver import EnvserverError, InputError
from envserver.rows.sources import every_row

from .domains.kinds import tau2_domain
from .evaluation import EvaluationError
from .replays import Replay, differences, replay


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m envserver_environments.tau replay",
        description="Plays scripted conversations of tau2-bench again and compares the outcome.",
    )
    parser.add_argument("file", type=Path, help='JSON: {"vectors": [...]} or a list; or JSONL')
    parser.add_argument(
        "--tau2-data", type=Path, help="tau2-bench's data; default: those of inspect_evals"
    )
    parser.add_argument("--only", help="replay only vectors with this text in their id")
    options = parser.parse_args(arguments)
    try:
        vectors = [v for v in every_row(options.file) if (options.only or "") in _name(v)]
        return _replay_all(vectors, options.tau2_data)
    except EnvserverError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _replay_all(vectors: Sequence[Mapping[str, Any]], data: Path | None) -> int:
    different = compared = 0
    for vector in vectors:
        try:
            played = replay(tau2_domain(str(vector.get("domain")), data), vector)
        except (InputError, EvaluationError, KeyError) as error:
            found = [f"{type(error).__name__}: {error}"]
            _print(vector, None, found)
        else:
            found = differences(vector, played) if "expected" in vector else []
            _print(vector, played, found)
        compared += "expected" in vector
        different += bool(found)
    sys.stdout.write(
        f"{len(vectors)} vectors, {compared} with an expected outcome, {different} different\n"
    )
    return 1 if different else 0


def _print(vector: Mapping[str, Any], played: Replay | None, found: Sequence[str]) -> None:
    verdict = "DIFFERENT" if found else "equal" if "expected" in vector else "-"
    line = f"{verdict:9} {_name(vector)}"
    if played is not None:
        components = " ".join(f"{k}={v:g}" for k, v in played.evaluation.components.items())
        line += f"  reward={played.evaluation.reward:g} {components} ({played.episode.ending})"
    sys.stdout.write("".join([line, *(f"\n    {text}" for text in found), "\n"]))


def _name(vector: Mapping[str, Any]) -> str:
    return str(vector.get("id") or f"{vector.get('domain')}/{vector.get('task_id')}")
