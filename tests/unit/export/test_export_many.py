"""Many trajectories: exported, filtered and validated in memory that does not grow, with a bar."""

from __future__ import annotations

import os
import pty
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.commands import ENVSERVER, environment_variables
from support.delivered import line, write_lines
from support.waiting import PATIENCE

MOST_MB = 160
"""Of memory, whatever the number: an interpreter with our imports takes some 60."""

_TELLING_MEMORY = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[2:])
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(status)
"""
"""Linux counts what a process had before it became another program: it comes from a small one."""


@pytest.mark.thorough
@pytest.mark.parametrize("rollouts", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_trajectories_are_exported_filtered_and_validated_in_bounded_memory(
    tmp_path: Path, rollouts: int
) -> None:
    source = write_lines(tmp_path / "run.jsonl", _lines(rollouts))
    (tmp_path / "exam.txt").write_text(" ".join(f"exam{number}" for number in range(20)))
    seen = _ran(
        "export", source, "--to", "unified", "--out", "unified", "--jsonl", "--dedupe",
        "--where", "reward >= 0.5 and turns < 6", "--against", "exam.txt",
        "--shard_rows", rollouts // 5, folder=tmp_path,
    )  # fmt: skip
    assert re.search(r"[\d,]+ rollouts read, [\d,]+ kept.*\d+%", seen, re.DOTALL), seen[-2000:]
    told = orjson.loads((tmp_path / "unified" / "MANIFEST.json").read_bytes())
    counts = told["counts"]
    assert counts["read"] == rollouts
    assert counts["read"] == counts["kept"] + sum(counts["dropped"].values())
    assert counts["dropped"] == {
        "where": rollouts // 4,
        "min_reward": 0,
        "contaminated": rollouts // 100,
        "not_chosen": 0,
        "duplicate": rollouts // 100,
    }
    assert [one["rows"] for one in told["files"]][:3] == [rollouts // 5] * 3
    seen = _ran("validate", "unified", folder=tmp_path)
    assert f"{counts['kept']:,} trajectories" in seen or f"{counts['kept']} trajectories" in seen


def _lines(rollouts: int) -> Iterator[dict[str, Any]]:
    """Groups of four with rewards 0, 1, 1 and 0.5; in every hundredth rollout a piece of the exam,
    in another the answer of the one before it."""
    words = [f"word{number}" for number in range(500)]
    drawn = random.Random(0)
    exam = " ".join(f"exam{number}" for number in range(3, 18))
    for number in range(rollouts // 4):
        said = [f"{number} {which} {' '.join(drawn.choices(words, k=40))}" for which in range(4)]
        if number % 25 == 7:
            said[1] = exam + said[1]
        if number % 25 == 9:
            said[2] = said[1]
        yield line(number, (0.0, 1.0, 1.0, 0.5), answers=said)


def _ran(*words: object, folder: Path) -> str:
    """What a command shows at a terminal; it ended well and within `MOST_MB`."""
    master, slave = pty.openpty()
    told = folder / "memory"
    process = subprocess.Popen(
        [sys.executable, "-c", _TELLING_MEMORY, told, ENVSERVER, *map(str, words)],
        cwd=folder,
        env=environment_variables() | {"TERM": "xterm", "COLUMNS": "140"},
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = bytearray()
    reader = threading.Thread(target=_read, args=(master, shown))
    reader.start()
    process.wait()
    reader.join(PATIENCE)
    text = shown.decode(errors="replace")
    assert process.returncode == 0, text[-3000:]
    assert int(told.read_text()) / 1024 < MOST_MB
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def _read(terminal: int, shown: bytearray) -> None:
    """Until nobody writes to it any more."""
    try:
        while data := os.read(terminal, 65536):
            shown += data
    except OSError:  # how a terminal says that all who wrote are gone
        return
    finally:
        os.close(terminal)
