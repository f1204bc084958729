"""The trainer's numbers: advantages, weights, padding, clipping, and the gradient's direction."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from envserver_clients.records import Row
from envserver_clients.training.advantages import AdvantageSettings, advantages
from envserver_clients.training.bounds import LossSettings
from envserver_clients.training.examples import Example, ExampleSettings, examples_of
from envserver_clients.training.guard import Guard, GuardSettings, MismatchError, NothingLearned
from envserver_clients.training.loss import policy_loss, token_logprobs
from envserver_clients.training.padding import Padded, micro_batches, padded
from envserver_records.images import RowImage
from envserver_records.sampling import LogprobsKind, SamplingSpan
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows_to_learn import group
from support.rows_to_learn import row as row_of

UNUSABLE = (-9999.0, float("-inf"), float("nan"), 0.5)


def row(trajectory: int, reward: float, length: int = 4, *, version: int = 3, **more: Any) -> Row:
    """A row of which all but the first two tokens are trained."""
    mask = [0, 0] + [1] * (length - 2)
    return row_of(range(length), mask, reward, trajectory, version=version, **more)


def loss_of(
    logprobs: Any, delivered: Any, advantage: float, rules: LossSettings, **more: torch.Tensor
) -> tuple[float, dict[str, float], torch.Tensor]:
    """The loss of rows of trained tokens of weight 1, its numbers, and the logprobs with their
    gradient.
    """
    own = torch.as_tensor(logprobs).requires_grad_()
    loss, numbers = policy_loss(
        own,
        torch.as_tensor(delivered),
        torch.ones_like(own),
        torch.full(own.shape[:1], advantage),
        torch.ones(len(own)),
        rules,
        **more,
    )
    loss.backward()
    return loss.item(), numbers, own


def loss_of_part(logprobs: torch.Tensor, part: Padded) -> float:
    given = (part.logprobs[:, part.first :], part.mask[:, part.first :])
    tensors = map(torch.from_numpy, (*given, part.advantages, part.weights))
    return float(policy_loss(logprobs, *tensors, LossSettings())[0])


def test_advantages_of_a_group_by_hand() -> None:
    assert advantages([1, 0, 0, 0], "mean").tolist() == [0.75, -0.25, -0.25, -0.25]
    # The population's standard deviation is sqrt(3)/4.
    expected = np.array([0.75, -0.25, -0.25, -0.25]) / (math.sqrt(3) / 4 + 1e-4)
    assert np.allclose(advantages([1, 0, 0, 0], "std"), expected)
    assert advantages([0.1] * 7, "std").tolist() == [0.0] * 7


@given(st.lists(st.floats(0, 1), min_size=1, max_size=16), st.sampled_from(["std", "mean"]))
def test_advantages_add_up_to_nothing(rewards: list[float], scaling: Any) -> None:
    found = advantages(rewards, scaling)
    assert abs(float(found.sum())) < 1e-3
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("delivered", "advantage", "expected", "correction"),
    [
        (-3.0, -1.0, 2.0, "truncate"),
        (-3.0, -1.0, 0.0, "mask"),  # e² is more than 5
        (-2.0, -1.0, math.e, "mask"),
        (-0.1, 1.0, 0.0, "mask"),  # e^-0.9 is less than a half
    ],
)
def test_the_correction_of_a_token_by_hand(
    delivered: float, advantage: float, expected: float, correction: Any
) -> None:
    rules = LossSettings(clip_low=0.2, clip_high=0.3, correction=correction)
    loss, *_ = loss_of([[-1.0]], [[delivered]], advantage, rules)
    assert loss == (pytest.approx(expected) if expected else 0.0)


@st.composite
def loss_settings(draw: st.DrawFn) -> LossSettings:
    decoupled, ratio_level = draw(st.booleans()), draw(st.sampled_from(["token", "sequence"]))
    forms = ["k1", "k2", "k3", "k3+", *(["k3_ratio"] if ratio_level == "token" else [])]
    return LossSettings(
        correction=draw(st.sampled_from(["mask", "truncate", "none"])),
        correction_level=draw(st.sampled_from(["token", "sequence"])) if decoupled else "token",
        decoupled=decoupled,
        surrogate=draw(st.sampled_from(["clip", "cispo"])),
        ratio_level=ratio_level,
        off_policy_bound=0.5,
        kl_weight=0.1,
        kl_form=draw(st.sampled_from(forms)),  # type: ignore[arg-type]
        entropy_weight=0.1,
    )


two_logprobs = st.lists(st.floats(-1e4, 0, width=32), min_size=2, max_size=2)


@given(two_logprobs, two_logprobs, st.floats(-5, 5, width=32), loss_settings())
def test_loss_and_gradient_are_finite_whatever_was_delivered(
    own: list[float], delivered: list[float], advantage: float, rules: LossSettings
) -> None:
    logprobs = torch.tensor([own], requires_grad=True)
    more = {"reference": torch.tensor([delivered]), "entropies": -logprobs}
    loss, numbers, _ = loss_of(logprobs, [delivered], advantage, rules, **more)
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert all(map(math.isfinite, (loss, *numbers.values())))


@pytest.mark.parametrize(
    ("denominator", "weights"),
    [
        ("trajectory", [1 / (2 * 6), 1 / (2 * 6), 1 / (2 * 3)]),
        ("token", [1 / 9] * 3),
        ("constant", [1 / (2 * 100)] * 3),
    ],
)
def test_denominators(denominator: Any, weights: list[float]) -> None:
    """A trajectory of two rows (2 and 4 trained tokens) and one of a single row (3)."""
    batch = [group(row(0, 1.0, 4), row(0, 1.0, 6), row(1, 0.0, 5))]
    how = {"denominator": denominator, "constant_tokens": 100}
    learned = examples_of(batch, 3, ExampleSettings(**how, advantages=AdvantageSettings("mean")))
    assert [one.weight for one in learned.examples] == pytest.approx(weights)
    assert [one.advantage for one in learned.examples] == [0.5, 0.5, -0.5]
    assert learned.numbers["reward_mean"] == 0.5


def test_what_teaches_nothing_is_counted_and_left_out() -> None:
    batch = [
        group(row(0, 1.0), row(1, 1.0), name="a"),
        group(row(0, 1.0), row(1, 0.0, learn=False), name="b"),
        group(row(0, 1.0, version=0), row(1, 0.0), name="c"),
    ]
    learned = examples_of(batch, 3, ExampleSettings(max_staleness=2))
    numbers = learned.numbers
    assert learned.group_ids == ["a", "b", "c"]
    assert (numbers["groups"], numbers["groups_equal"], numbers["groups_stale"]) == (3, 1, 1)
    assert (numbers["trajectories"], numbers["reward_mean"]) == (4, 0.75)
    assert len(learned.examples) == 1
    assert learned.examples[0].weight == pytest.approx(1 / (4 * 2))
    assert len(examples_of(batch, 3, ExampleSettings(learn_truncated=True)).examples) == 4


def sampled(temperature: float, kind: LogprobsKind, *altered: str, version: int = 3) -> Row:
    return row(0, 1.0, version=version, sampling=[SamplingSpan(2, 4, temperature, kind, altered)])


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (row(0, 1.0, images=[RowImage("sha", 0, 1, b"PNG")]), "images"),
        (dataclasses.replace(row(0, 1.0), logprobs=None), "no_logprobs"),
        *((row(0, 1.0, logprobs=[0, 0, -0.5, value]), "bad_logprobs") for value in UNUSABLE),
        (row_of([1, 2, 3, 100], [0, 0, 1, 1], 1.0, version=3), "bad_tokens"),
        (sampled(1.0, "processed", "top_p"), "altered"),
        (sampled(0.0, "raw"), "greedy"),
        (sampled(0.7, "raw", version=2), "raw"),
        (sampled(0.7, "unknown", version=2), "raw"),
    ],
)
def test_rows_that_cannot_be_learned_from_are_left_out_and_counted(bad: Row, why: str) -> None:
    rules = ExampleSettings(vocabulary=100)
    learned = examples_of([group(bad, row(1, 0.0))], 3, rules)
    assert [one.advantage < 0 for one in learned.examples] == [True]  # its reward still counts
    assert (learned.numbers["rows_refused"], learned.numbers[f"rows_{why}"]) == (1, 1)
    assert "skipped" not in learned.numbers
    assert examples_of([group(bad, bad)], 3, rules).examples == []


def test_groups_of_a_later_version_are_refused() -> None:
    """As from an engine that another trainer has published to."""
    batch = [group(row(0, 1.0, version=4), row(1, 0.0, version=3))]
    learned = examples_of(batch, 3, ExampleSettings())
    assert learned.examples == []
    assert (learned.numbers["groups_newer"], learned.numbers["groups_stale"]) == (1, 0)
    assert learned.numbers["skipped"] == "newer"
    assert len(examples_of(batch, 4, ExampleSettings()).examples) == 2


def test_a_run_ends_after_several_batches_in_a_row_that_teach_nothing() -> None:
    guard = Guard(GuardSettings(patience=2))
    refused = {"step": 1, "skipped": "mismatch", "mismatch_mean": 0.8}
    guard.judge(refused)
    guard.judge({"step": 2, "mismatch_mean": 0.01})
    guard.judge(refused)
    with pytest.raises(MismatchError, match=r"differ .* by 0\.80 nats") as raised:
        guard.judge(refused)
    assert raised.value.detail["reason"] == "mismatch"
    with pytest.raises(NothingLearned, match="later policy version"):
        guard.judge({"step": 5, "skipped": "newer"})


def example(length: int, advantage: float, seed: int) -> Example:
    rng = np.random.default_rng(seed)
    tokens, logprobs = rng.integers(0, 11, length).astype(np.int32), -rng.random(length)
    mask = np.r_[0, rng.integers(0, 2, length - 1)].astype(np.uint8)
    return Example(tokens, mask, logprobs.astype(np.float32), advantage, 0.1)


examples = st.lists(
    st.builds(example, st.integers(2, 24), st.floats(-2, 2, width=32), st.integers(0, 1000)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=50)
@given(examples, st.integers(1, 200))
def test_the_loss_is_that_of_any_padding_and_parting(rows: list[Example], most_tokens: int) -> None:
    table = torch.linspace(-3, 3, 121).reshape(11, 11)

    def total(most: int) -> float:
        whole = 0.0
        for part in micro_batches(rows, most):
            tokens = torch.from_numpy(part.tokens)[:, part.first :]
            whole += loss_of_part(token_logprobs(table[tokens[:, :-1]], tokens[:, 1:]), part)
        return whole

    assert total(most_tokens) == pytest.approx(total(1), rel=1e-4, abs=1e-5)
    assert sum(len(part.tokens) for part in micro_batches(rows, most_tokens)) == len(rows)
    assert padded(rows).mask.sum() == sum(int(one.mask.sum()) for one in rows)


def test_turns_with_advantages_of_their_own_are_weighed_token_by_token() -> None:
    """The loss of a row whose turns have advantages 2 and -1 is that of two rows, one for each."""
    tokens, logprobs = np.arange(5, dtype=np.int32), np.full(5, -0.5, np.float32)
    mask = np.array([0, 1, 1, 1, 1], np.uint8)
    own = np.array([0, 2, 2, -1, -1], np.float32)
    whole = Example(tokens, mask, logprobs, 0.5, 0.25, token_advantages=own)
    first, second = (
        Example(tokens, mask * (own == turn), logprobs, turn, 0.25) for turn in (2.0, -1.0)
    )
    losses = []
    for rows in ([whole], [first, second], [whole, first]):
        batch = padded(rows)
        losses.append(loss_of_part(torch.linspace(-0.6, -0.4, 4).expand(len(rows), 4), batch))
    assert losses[0] == pytest.approx(losses[1])
    assert (batch.advantages.shape, padded([first]).advantages.shape) == ((2, 4), (1,))
