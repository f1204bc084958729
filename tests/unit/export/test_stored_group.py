"""A line of JSONL is the same group again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from envserver_records.errors import ConfigError
from envserver_records.records import Conversation, Group
from envserver_records.scores import RewardRange, TurnReward
from msgspec import to_builtins
from msgspec.structs import replace
from support.api import native_group, sequence
from support.commands import read_jsonl
from support.delivered import line
from support.extent import first_of
from support.waiting import PATIENCE

from envserver.export import group_line
from envserver.export.output_file import OutputFile, lock, open_appending
from envserver.export.stored import group_of
from envserver.export.stored_group import group_record

SAID = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def read_again(group: Group, **facts: Any) -> Group:
    line = orjson.loads(
        group_line(group, include_messages=True, score_range="unit", include_actions=True)
    )
    for rollout in line["envserver"]["rollouts"]:
        rollout.update(facts)
    return group_record(group_of(line, "line 1"))


def test_it_differs_only_in_what_lines_lack() -> None:
    facts: dict[str, Any] = {"trained": True, "model": "m", "turns": 1, "completion_tokens": 3}
    other = Conversation(agent="critic", messages=SAID, tools=[], **facts)
    rollout = native_group(
        "g",
        sequences=[sequence(), replace(sequence(), agent="critic", flags=["mixed_versions"])],
        others=[other],
        actions=[{"step": 1, "tool": "reason", "input": {}, "output": "4"}],
        metrics={"steps": 2.0},
        turn_rewards=[TurnReward(0, 0.5)],
        flags=["truncated"],
        limit="turns",
    ).trajectories[0]
    group = replace(
        native_group("g"),
        trajectories=[rollout, replace(rollout, sequences=[], rollout_id="text-only")],
        reward_range=RewardRange(-1.0, 2.0),
        lost={"engine": 1},
        asked=3,
    )
    again = read_again(group)
    for ours, theirs in zip(group.trajectories, again.trajectories, strict=True):
        for before, after in zip(ours.sequences, theirs.sequences, strict=True):
            for name in ("tokens", "mask", "logprobs", "versions"):
                assert np.array_equal(getattr(before, name), getattr(after, name)), name
            assert (after.agent, after.flags) == (before.agent, before.flags)
            assert set(after.calls) == {-1}
    assert plain(again) == plain(group)


def plain(group: Group) -> Any:
    rollouts = [replace(one, sequences=[]) for one in group.trajectories]
    return to_builtins(replace(group, trajectories=rollouts), enc_hook=str)


_AT_ONCE = """
import sys, threading
import orjson
from envserver.export.stored import group_of
from envserver_records.records import Group, pack, unpack

line = orjson.loads(sys.stdin.read())
packed = pack(
    Group(group_id="g", index=0, env="math", task_id="t", split="train", trajectories=[])
)
barrier = threading.Barrier(8)

def read():
    barrier.wait()
    unpack(packed, Group)
    group_of(line, "line 1")

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=read) for _ in range(8)]
for one in threads:
    one.start()
for one in threads:
    one.join()
"""


@pytest.mark.parametrize("attempt", first_of(1, 2))
def test_threads_may_read_the_first_groups_of_a_process_at_once(attempt: int) -> None:
    """msgspec looks at a type when it first decodes one, which ends a process with two threads."""
    read = subprocess.run(
        [sys.executable, "-c", _AT_ONCE],
        input=orjson.dumps(line(attempt)),
        capture_output=True,
        timeout=PATIENCE,
    )
    assert (read.returncode, read.stderr) == (0, b"")


# The file that a run appends groups to, and how it replaces an old one ----------------------------


def news(path: Path) -> list[int]:
    """What was appended; the chain of lines is tested in unit/running/test_provenance.py."""
    return [line["new"] for line in read_jsonl(path)]


def test_the_first_line_replaces_the_old_content_and_later_lines_are_appended(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old 1\nold 2\n")
    with open_appending(path) as old, contextlib.closing(OutputFile(path, old, replaces=True)) as f:
        lock(old, path)
        assert path.read_text() == "old 1\nold 2\n"
        f.append(b'{"new":1}\n')
        assert news(path) == [1]
        f.append(b'{"new":2}\n')
        with open_appending(path) as other, pytest.raises(ConfigError, match="Another process"):
            lock(other, path)
    assert news(path) == [1, 2]


@pytest.mark.parametrize("name", ["/dev/full", "pipe"])
def test_what_cannot_be_read_again_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is a device or a pipe"):
        open_appending(tmp_path / name)
