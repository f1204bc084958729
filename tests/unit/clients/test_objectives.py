"""Objectives by name are presets of settings; advantages beyond the group's mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from envserver_clients.records import ClientGroup, Row
from envserver_clients.training.advantages import AdvantageSettings, overlong_rewards
from envserver_clients.training.examples import ExampleSettings, examples_of
from envserver_clients.training.objectives import OBJECTIVES, preset
from envserver_clients.training.settings import TrainerSettings, from_flags
from envserver_records import ConfigError

NEEDED = ("--model", "m", "--output", "o")


def settings(*flags: str) -> TrainerSettings:
    return from_flags(TrainerSettings, [*NEEDED, *flags], program="grpo")


def group(name: str, *rows: Row) -> ClientGroup:
    made = ClientGroup(name, "math", "group", 0, memoryview(b""))
    made.__dict__["rows"] = rows
    return made


def row(trajectory: int, reward: float, tokens: int = 2, name: str = "g", **more: Any) -> Row:
    """A row of one context token and `tokens` trained ones."""
    mask = np.array([0] + [1] * tokens, np.uint8)
    return Row(
        tokens=np.arange(tokens + 1, dtype=np.int32),
        mask=mask,
        logprobs=-mask.astype(np.float32),
        reward=reward,
        group_id=name,
        versions=np.where(mask, np.int32(0), np.int32(-1)),
        trajectory=trajectory,
        **more,
    )


def learned(rules: AdvantageSettings, *groups: ClientGroup, **more: Any) -> list[float]:
    examples = examples_of(groups, 0, ExampleSettings(advantages=rules, **more)).examples
    return [one.advantage for one in examples]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_an_objective_sets_is_in_the_settings(name: str) -> None:
    needed = ("--reward-weights", "correct=1") if name == "gdpo" else ()
    recorded = settings("--objective", name, *needed).model_dump()
    assert {key: recorded[key] for key in preset(name)} == preset(name)
    doc = OBJECTIVES[name].__doc__ or ""
    assert "arXiv" in doc or "https://" in doc


def test_settings_that_are_given_take_precedence_and_names_are_joined() -> None:
    found = settings("--objective", "gspo+tis", "--clip-high", "0.3")
    assert (found.ratio_level, found.clip_low, found.clip_high) == ("sequence", 3e-4, 0.3)
    assert (found.decoupled, found.correction, found.most_correction) == (True, "truncate", 2.0)
    assert found.loss().ratio_level == "sequence"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--objective", "ppo3"], "no objective 'ppo3'"),
        (["--objective", "cispo+dual_clip"], "not for CISPO"),
        (["--dual-clip", "1.1"], "not above 1 [+] clip_high"),
        (["--correction-level", "sequence"], "needs decoupled"),
        (["--least-correction", "6"], "not below most_correction"),
        (["--objective", "gspo", "--kl-weight", "0.1", "--kl-form", "k3_ratio"], "ratio_level"),
        (["--baseline", "none"], "needs a baseline"),
        (["--overlong-tokens", "10"], "more than overlong_tokens"),
        (["--reward-weights", "a=1", "--turn-discount", "1"], "not for turn_discount"),
        (["--reward-weights", "a=nan"], "reward_weights.a: Input should be a finite number"),
        (["--learning-rate", "inf"], "learning_rate: Input should be a finite number"),
        (["--objective", "gdpo+tis"], "gdpo needs reward_weights"),
        (["--schedule-steps", "9"], "constant has no schedule_steps"),
        (["--least-rate", "1e-6"], "constant has no schedule_steps or least_rate"),
        (["--schedule", "cosine"], "needs schedule_steps or steps"),
        (["--schedule", "linear", "--steps", "5"], "within the warm-up"),
        (["--dynamic-sampling", "--wire", "atropos"], "needs the native wire"),
        (["--engine", "server"], "needs weights gloo or nccl"),
        (["--engine", "server", "--weights", "gloo", "--lora-rank", "4"], "no LoRA"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        settings(*flags)
    assert raised.value.hint


def test_baselines_by_hand() -> None:
    one = group("g", row(0, 3.0), row(1, 0.0), row(2, 0.0))
    found = learned(AdvantageSettings("mean", baseline="leave_one_out"), one)
    assert found == pytest.approx([3.0, -1.5, -1.5])
    assert learned(AdvantageSettings("mean", baseline="none"), one) == [3.0]


def test_a_whitened_batch_has_mean_0_and_variance_1_over_its_tokens() -> None:
    groups = [
        group("a", row(0, 1.0, 5, "a"), row(1, 0.0, 2, "a")),
        group("b", row(0, 1.0, 1, "b"), row(1, 1.0, 4, "b")),
    ]
    rules = AdvantageSettings("mean", baseline="none", whiten=True)
    batch = examples_of(groups, 0, ExampleSettings(advantages=rules))
    values = np.concatenate([[one.advantage] * int(one.mask.sum()) for one in batch.examples])
    assert (values.mean(), values.var(ddof=1)) == pytest.approx((0.0, 1.0), abs=1e-6)
    assert batch.numbers["groups_equal"] == 1


def test_equal_groups_may_be_left_out_of_the_denominators() -> None:
    groups = [
        group("a", row(0, 1.0, 3, "a"), row(1, 0.0, 3, "a")),
        group("b", row(0, 1.0, 4, "b"), row(1, 1.0, 4, "b")),
    ]
    for skip, tokens in ((False, 14), (True, 6)):
        rules = ExampleSettings(denominator="token", skip_equal=skip, keep_zero=True)
        examples = examples_of(groups, 0, rules).examples
        assert {one.weight for one in examples} == {1 / tokens}
        assert len(examples) == (2 if skip else 4)


def test_rows_without_the_experts_to_replay_are_left_out_and_counted() -> None:
    experts = np.zeros((2, 1, 2), np.uint8)
    one = group("g", row(0, 1.0, experts=experts), row(1, 0.0))
    batch = examples_of([one], 0, ExampleSettings(replay_experts=True))
    assert [example.experts is experts for example in batch.examples] == [True]
    assert batch.numbers["rows_no_experts"] == batch.numbers["rows_refused"] == 1
    plain = examples_of([one], 0, ExampleSettings()).examples
    assert [example.experts for example in plain] == [None, None]


def test_named_rewards_are_compared_one_by_one() -> None:
    """The second reward has a hundredth of the first one's spread, and counts half as much."""
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.01}]
    one = group("g", *(row(n, sum(own.values()), components=own) for n, own in enumerate(parts)))
    found = learned(AdvantageSettings(reward_weights={"a": 1.0, "b": 0.5}), one)
    assert found == pytest.approx([0.5, -0.5], abs=0.02)
    with pytest.raises(ConfigError, match="no reward named c") as raised:
        learned(AdvantageSettings(reward_weights={"c": 1.0}), one)
    assert "a, b" in raised.value.hint


def test_long_answers_are_penalised() -> None:
    rules = AdvantageSettings(overlong_tokens=10, overlong_buffer=4, overlong_penalty=0.5)
    rows = [row(number, 1.0, tokens) for number, tokens in enumerate((6, 7, 10, 20))]
    assert list(overlong_rewards(rows, rules).values()) == pytest.approx([1.0, 0.875, 0.5, 0.5])
    two = [row(0, 1.0, 4), row(0, 1.0, 4)]  # of one trajectory
    assert overlong_rewards(two, rules) == pytest.approx({(None, 0): 0.75})
