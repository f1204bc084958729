"""What both sides of the wire share: backoff, cleaning, files, framing, errors, hints at extras."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from envserver_clients.adapters.skyrl import output_of
from envserver_clients.records import Row
from envserver_clients.training.advantages import (
    AdvantageSettings,
    overlong_rewards,
    rewards_of,
    row_advantages,
)
from envserver_clients.training.examples import ExampleSettings, examples_of
from envserver_clients.training.guard import SKIPPED, Guard, NothingLearned
from envserver_clients.training.settings import TrainerSettings, from_flags
from envserver_records import ConfigError, errors, extras
from envserver_records.cleaning import clean
from envserver_records.extras import CLIENTS, install_command, missing_module_hint
from envserver_records.files import PARTIAL_FILES, replace_file, replacing, replacing_path
from envserver_records.framing import FrameReader, frame, frame_header, receive_frame
from envserver_records.http_errors import MODEL, SANDBOX, SERVICE, ErrorReader
from envserver_records.records import Json, Score, Trajectory
from envserver_records.returns import Earned, advantages, turn_advantages
from envserver_records.tasks import TurnReward, with_totals
from envserver_records.waiting import Backoff
from hypothesis import given, settings
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.extent import examples
from support.rows_to_learn import group
from support.rows_to_learn import row as row_of
from support.trajectories import sequence, trajectory

CASES = cases_of(__file__)

many = settings(max_examples=examples(100), deadline=None)

# Pauses between tries


def test_pauses_double_up_to_the_maximum_and_the_random_number_spreads_them() -> None:
    backoff = Backoff(first_seconds=0.5, max_seconds=3.0)
    assert [backoff.seconds(failures) for failures in range(6)] == [0, 0.5, 1, 2, 3, 3]
    backoff = Backoff(first_seconds=4.0, jitter=(0.5, 1.0))
    assert [backoff.seconds(1, draw) for draw in (0.0, 0.5, 1.0)] == pytest.approx([2, 3, 4])


@many
@given(failures=st.integers(1, 10**9), draw=st.floats(0, 1))
def test_no_pause_leaves_its_bounds(failures: int, draw: float) -> None:
    backoff = Backoff(first_seconds=0.2, max_seconds=10.0, jitter=(0.5, 1.5))
    assert 0.1 <= backoff.seconds(failures, draw) <= 10.0


# Whatever a rollout returns can be stored, sent and pickled once it is cleaned.

ANY_TEXT = st.text(st.characters(exclude_categories=[]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT,
    lambda part: st.lists(part) | st.dictionaries(ANY_TEXT, part),
)


@many
@given(VALUES)
def test_a_cleaned_value_can_be_written(value: Any) -> None:
    assert b"\\u0000" not in orjson.dumps(clean(value).value)
    assert clean(clean(value).value) == (clean(value).value, frozenset())


# Files and folders are replaced as a whole, or stay as they were.


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_replaced(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / ("n" * 250)
    for data in ("größer", b"\xff"):
        replace_file(path, data, sync=sync, mode=0o600)
    assert path.read_bytes() == b"\xff"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_the_old_file_is_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"half")
        raise KeyError
    with pytest.raises(KeyError), replacing_path(path) as partial:
        partial.write_text("half")
        raise KeyError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_process_leaves_only_what_the_pattern_finds(tmp_path: Path) -> None:
    code = """
import os, pathlib, signal, sys
from envserver_records.files import replacing
with replacing(pathlib.Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], check=False)
    assert ended.returncode == -signal.SIGKILL
    left = list(tmp_path.iterdir())
    assert len(left) == 1 and left == list(tmp_path.glob(PARTIAL_FILES))


# Length-prefixed frames are whole however a stream is cut, and bounded.


@many
@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 400))
def test_bodies_come_out_however_the_stream_is_cut(bodies: list[bytes], step: int) -> None:
    data = b"".join(map(frame, bodies))
    reader = FrameReader(300)
    pieces = (data[start : start + step] for start in range(0, len(data), step))
    assert [body for piece in pieces for body in reader.feed(piece)] == bodies


def test_a_socket_gives_whole_frames_and_one_that_is_too_large_is_refused_at_its_length() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(frame(b"first") + frame(b"") + frame_header(5) + b"cut")
        one.shutdown(socket.SHUT_WR)
        assert [receive_frame(other, 5), receive_frame(other, 5)] == [b"first", b""]
        with pytest.raises(OSError, match="gone"):
            receive_frame(other, 5)
    with pytest.raises(ValueError, match="larger than 10"):
        list(FrameReader(10).feed(frame_header(11)))


# Failed HTTP answers of the server become the errors that it raised.


@pytest.mark.parametrize(
    ("reader", "status", "problem", "kind"),
    [
        (MODEL, 400, {"code": "engine_refused"}, "EngineRefused"),
        (MODEL, 422, {"code": "unknown"}, "AgentError"),
        (MODEL, 502, None, "EngineGarbage"),
        (SANDBOX, 503, {"code": "sandbox_unavailable"}, "SandboxUnavailable"),
        (SANDBOX, 409, {}, "SandboxLost"),
        (SANDBOX, 400, {}, "InputError"),
        (SERVICE, 500, {}, "ServiceError"),
        (SERVICE, 422, {}, "InputError"),
        (SERVICE, 422, None, "ServiceError"),
    ],
)
def test_the_code_decides_then_the_status(
    reader: ErrorReader, status: int, problem: dict[str, str] | None, kind: str
) -> None:
    body = json.dumps({"error": {"message": "why", **problem}}) if problem is not None else "why"
    error = reader.read(status, body.encode())
    assert type(error) is getattr(errors, kind)
    assert "why" in error.message


# The command that installs an extra fits the way in which the package was installed.


class Installed:
    requires = ("msgspec>=0.18", "smol_agents>=1; extra == 'gaia'", "b; extra == 'all'")

    def __init__(self, origin: dict[str, object] | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        return None if self._origin is None else json.dumps(self._origin)


def test_the_command_fits_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "my checkout"
    (root / "clients").mkdir(parents=True)
    monkeypatch.chdir(root)
    monkeypatch.setattr(extras, "distribution", lambda project: Installed(None))
    assert install_command("gaia") == "pip install 'envserver[gaia]'"
    assert install_command("train", CLIENTS) == "pip install 'envserver-clients[train]'"
    # A module of an extra is known.
    assert missing_module_hint("smol_agents.models") == "pip install 'envserver[gaia]' installs it."
    assert "pip" not in missing_module_hint("smol") + missing_module_hint("helpers")
    origin: dict[str, object] = {"url": root.as_uri(), "dir_info": {"editable": True}}
    monkeypatch.setattr(extras, "distribution", lambda project: Installed(origin))
    assert install_command("gaia").endswith("-e '.[gaia]'")
    origin = {
        "url": "https://h/e",
        "subdirectory": "c",
        "vcs_info": {"vcs": "git", "commit_id": "1"},
    }
    wanted = "pip install 'envserver-clients[train] @ git+https://h/e@1#subdirectory=c'"
    assert install_command("train", CLIENTS) == wanted
    origin = {"url": "file:///e.whl", "archive_info": {}}
    assert install_command("gaia").endswith("'envserver[gaia] @ file:///e.whl'")


# Objectives by name are presets of settings; rewards of turns and agents become returns,
# advantages and rewards of tokens

NEEDED = ("--model", "m", "--output", "o")
many_rows = hypothesis_settings(max_examples=examples(100), deadline=None)


def settings_of(*flags: str) -> TrainerSettings:
    return from_flags(TrainerSettings, [*NEEDED, *flags], program="grpo")


def row(trajectory: int, reward: float, tokens: int = 2, **more: Any) -> Row:
    """A row of one context token and `tokens` trained ones."""
    return row_of(range(tokens + 1), [0] + [1] * tokens, reward, trajectory, logprobs=-1, **more)


def test_settings_that_are_given_take_precedence_and_names_are_joined() -> None:
    found = settings_of("--objective", "gspo+tis", "--clip-high", "0.3")
    assert (found.ratio_level, found.clip_low, found.clip_high) == ("sequence", 3e-4, 0.3)
    assert (found.decoupled, found.correction, found.most_correction) == (True, "truncate", 2.0)
    assert found.loss().ratio_level == "sequence"


@pytest.mark.parametrize(("flags", "message"), CASES["contradictions"])
def test_settings_that_contradict_each_other_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        settings_of(*flags.split())
    assert raised.value.hint


def test_equal_groups_may_be_left_out_of_the_denominators() -> None:
    groups = [
        group(row(0, 1.0, 3), row(1, 0.0, 3), name="a"),
        group(row(0, 1.0, 4), row(1, 1.0, 4), name="b"),
    ]
    for skip, tokens in ((False, 14), (True, 6)):
        rules = ExampleSettings(denominator="token", skip_equal=skip, keep_zero=True)
        examples = examples_of(groups, 0, rules).examples
        assert {one.weight for one in examples} == {1 / tokens}
        assert len(examples) == (2 if skip else 4)


EQUAL = group(row(0, 0.0), row(1, 0.0))
WASTED = {
    "equal": ([EQUAL, EQUAL], r"All rewards of each group are equal \(mean 0\.00\)"),
    "stale": ([group(row(0, 1.0), row(1, 0.0))], "too old"),
    "cut_off": ([group(row(0, 1.0, learn=False), row(1, 0.0, learn=False))], "were cut off"),
    "no_experts": ([group(row(0, 1.0), row(1, 0.0))], "Rows lack the routed experts"),
}


@pytest.mark.parametrize("why", WASTED)
def test_a_trainer_that_learns_nothing_ends_by_a_setting_and_says_why(why: str) -> None:
    groups, message = WASTED[why]
    version, replays = 9 if why == "stale" else 0, why == "no_experts"
    rules = ExampleSettings(max_staleness=4, replay_experts=replays)
    line = {"step": 1, **examples_of(groups, version, rules).numbers}
    assert line[SKIPPED] == why
    chosen = settings_of("--waste-patience", "5")
    guard, most = Guard(chosen.guard()), chosen.patience if replays else 5
    for _ in range(2):
        for _ in range(most - 1):
            guard.judge(line)
        guard.judge({"step": 2})  # this one learned
    with pytest.raises(NothingLearned, match=message) as raised:
        for _ in range(most):
            guard.judge(line)
    assert f"{most} batches in a row" in raised.value.message
    assert raised.value.hint


def test_rows_without_the_experts_to_replay_are_left_out_and_counted() -> None:
    experts = np.zeros((2, 1, 2), np.uint8)
    one = group(row(0, 1.0, experts=experts), row(1, 0.0))
    batch = examples_of([one], 0, ExampleSettings(replay_experts=True))
    assert [example.experts is experts for example in batch.examples] == [True]
    assert batch.numbers["rows_no_experts"] == batch.numbers["rows_refused"] == 1
    plain = examples_of([one], 0, ExampleSettings()).examples
    assert [example.experts for example in plain] == [None, None]


def test_long_answers_are_penalised() -> None:
    rules = AdvantageSettings(overlong_tokens=10, overlong_buffer=4, overlong_penalty=0.5)
    rows = [row(number, 1.0, tokens) for number, tokens in enumerate((6, 7, 10, 20))]
    assert list(overlong_rewards(rows, rules).values()) == pytest.approx([1.0, 0.875, 0.5, 0.5])
    two = [row(0, 1.0, 4), row(0, 1.0, 4)]  # of one trajectory
    assert overlong_rewards(two, rules) == pytest.approx({(None, 0): 0.75})


# Returns

NUMBERS = st.floats(-4, 4, width=16)


@st.composite
def earned(draw: st.DrawFn, *, turns: int | None = None, rewarded: bool = True) -> Earned:
    calls = list(range(0, 2 * (turns if turns is not None else draw(st.integers(1, 4))), 2))
    own = draw(st.dictionaries(st.sampled_from(calls), NUMBERS)) if rewarded else {}
    return Earned(draw(NUMBERS) + sum(own.values()), calls, own)


@given(st.lists(earned(rewarded=False), min_size=1, max_size=5), st.sampled_from(["std", "mean"]))
@many_rows
def test_turns_without_rewards_have_its_advantage(group: list[Earned], scaling: str) -> None:
    whole = advantages([one.reward for one in group], scaling)  # type: ignore[arg-type]
    by_call = turn_advantages(group, scaling)  # type: ignore[arg-type]
    for one, found, value in zip(group, by_call, whole, strict=True):
        assert found == pytest.approx(dict.fromkeys(one.turns, float(value)), abs=1e-4)


def turned(number: int, agent: str, reward: float, turns: dict[int, float]) -> Row:
    """A row of a turn for each token, with their rewards."""
    calls = np.array([-1, *turns], np.int32)
    own = {call: value for call, value in turns.items() if value}
    told: Json = {"agent": agent, "calls": calls, "turns": list(turns)}
    return row(number, reward, len(turns), **told, turn_rewards=own)


def test_the_baseline_is_the_agents_own_and_turns_learn_from_their_own_returns() -> None:
    rows = [
        turned(number, agent, reward, {call: 0.0})
        for number, rewards in enumerate([(1.0, -1.0), (1.0, -3.0)])
        for agent, reward, call in zip(("one", "two"), rewards, (0, 1), strict=True)
    ]
    assert rewards_of(rows) == {("one", 0): 1, ("two", 0): -1, ("one", 1): 1, ("two", 1): -3}
    assert [found.value for found in row_advantages(rows, "mean")] == [0.0, 1.0, 0.0, -1.0]
    # Both got 1 in all: one for its first turn, the other for its second.
    rows = [turned(0, "one", 1.0, {0: 1.0, 2: 0.0}), turned(1, "one", 1.0, {1: 0.0, 3: 1.0})]
    assert [found.value for found in row_advantages(rows, "mean")] == [0.0, 0.0]

    def tokens(discount: float) -> list[list[float]]:
        found = row_advantages(rows, "mean", turn_discount=discount)
        return [one.tokens.tolist() for one in found if one.tokens is not None]

    assert tokens(1.0) == [[0.0, 0.0, -0.5], [0.0, 0.0, 0.5]]
    assert tokens(0.0)[0] == [0.0, 0.5, -0.5]


def rolled(rewards: dict[int, float], outcome: float) -> Trajectory:
    """Two rows of two calls each; call 9 is in no row."""
    rows = [sequence([1, 2, 3, 4], [0, 1, 1, 1]) for _ in range(2)]
    for number, one in enumerate(rows):
        one.calls = np.array([-1, 2 * number, 2 * number, 2 * number + 1], np.int32)
    turns = [TurnReward(0, value, None, call) for call, value in rewards.items()]
    return trajectory("r", *rows, score=with_totals(Score(reward=outcome, turns=turns), {}))


@given(st.dictionaries(st.sampled_from([0, 1, 2, 3, 9, -1]), NUMBERS), NUMBERS)
@many_rows
def test_rewards_of_tokens_add_up_to_the_reward(rewards: dict[int, float], outcome: float) -> None:
    made = rolled(rewards, outcome)
    told = output_of([made], None, step_wise=True)["rewards"]
    assert sum(map(sum, told)) == pytest.approx(made.score.reward, abs=1e-6)  # type: ignore[arg-type]
    assert told[0][1] == pytest.approx(rewards.get(0, 0.0))  # type: ignore[index]
    assert told[0][2] == pytest.approx(rewards.get(1, 0.0))  # type: ignore[index]
