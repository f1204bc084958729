"""Replays vectors of tau2-bench.

`python -m envserver_environments.tau replay FILE --tau2-data DIR`.

Prints a line per vector: reward, components, and whether all is as `expected` tells; exits with 1
if anything differs, with 2 if the vectors or the data cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envserver import EnvserverError, InputError

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
        vectors = [v for v in read_vectors(options.file) if (options.only or "") in _name(v)]
        return _replay_all(vectors, options.tau2_data)
    except EnvserverError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def read_vectors(path: Path) -> list[Mapping[str, Any]]:
    """Returns the vectors of a file.

    Raises:
        InputError: there is no such file, or it holds no vectors.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    try:
        content = json.loads(text)
    except ValueError:
        content = list(_json_lines(path, text))
    if isinstance(content, dict):
        content = content.get("vectors", [content])
    if not isinstance(content, list) or not all(isinstance(v, dict) for v in content):
        raise InputError(f"{path} holds no list of vectors.")
    return content


def _json_lines(path: Path, text: str) -> Iterator[Any]:
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            if line.strip():
                yield json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number} is not JSON: {error}") from error


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
