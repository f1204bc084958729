"""The trainer's numbers: advantages, weights, padding, clipping, and the gradient's direction."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from envserver_clients.records import ClientGroup, Row
from envserver_clients.training.advantages import AdvantageSettings, advantages, shuffled
from envserver_clients.training.bounds import LossSettings
from envserver_clients.training.examples import Example, ExampleSettings, examples_of
from envserver_clients.training.guard import (
    Guard,
    GuardSettings,
    MismatchError,
    NothingLearned,
)
from envserver_clients.training.loss import policy_loss, token_logprobs
from envserver_clients.training.padding import micro_batches, padded
from envserver_records.images import RowImage
from envserver_records.sampling import LogprobsKind, SamplingSpan
from hypothesis import given, settings
from hypothesis import strategies as st

UNUSABLE = (-9999.0, float("-inf"), float("nan"), 0.5)

torch.set_num_threads(1)


def row(
    trajectory: int, reward: float, length: int = 4, *, version: int = 3, group: str = "g"
) -> Row:
    """A row of which all but the first two tokens are trained."""
    mask = np.array([0, 0] + [1] * (length - 2), np.uint8)
    return Row(
        tokens=np.arange(length, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
        reward=reward,
        group_id=group,
        versions=np.where(mask, np.int32(version), np.int32(-1)),
        trajectory=trajectory,
    )


def group(*rows: Row, group_id: str = "g") -> ClientGroup:
    made = ClientGroup(group_id, "math", "group", 3, memoryview(b""))
    made.__dict__["rows"] = list(rows)
    return made


def one_token(
    logprob: float,
    delivered: float,
    advantage: float,
    proximal: float | None = None,
    **how: object,
) -> float:
    """The loss of a single token of weight 1."""
    rules = LossSettings(clip_low=0.2, clip_high=0.3, **{"correction": "none", **how})  # type: ignore[arg-type]
    loss, _ = policy_loss(
        torch.tensor([[logprob]]),
        torch.tensor([[delivered]]),
        torch.ones(1, 1),
        torch.tensor([advantage]),
        torch.ones(1),
        rules,
        proximal=None if proximal is None else torch.tensor([[proximal]]),
    )
    return float(loss)


def test_advantages_of_a_group_by_hand() -> None:
    assert advantages([1, 0, 0, 0], "mean").tolist() == [0.75, -0.25, -0.25, -0.25]
    # The population's standard deviation is sqrt(3)/4.
    expected = np.array([0.75, -0.25, -0.25, -0.25]) / (math.sqrt(3) / 4 + 1e-4)
    assert np.allclose(advantages([1, 0, 0, 0], "std"), expected)
    assert advantages([0.1] * 7, "std").tolist() == [0.0] * 7


@given(st.lists(st.floats(0, 1), min_size=1, max_size=16), st.sampled_from(["std", "mean"]))
def test_advantages_add_up_to_nothing(rewards: list[float], scaling: str) -> None:
    found = advantages(rewards, scaling)  # type: ignore[arg-type]
    assert abs(float(found.sum())) < 1e-3
    assert np.isfinite(found).all()


def test_shuffled_rewards_are_the_same_rewards() -> None:
    rewards = [0.0, 0.25, 0.5, 1.0]
    dealt = [shuffled(rewards, np.random.default_rng(seed)) for seed in range(8)]
    assert all(sorted(one) == rewards for one in dealt)
    assert any(one != rewards for one in dealt)


def test_the_loss_of_a_token_by_hand() -> None:
    half = math.log(0.5)
    assert one_token(half, half, 2.0) == pytest.approx(-2.0)  # r = 1
    assert one_token(half, half - 0.1, 2.0) == pytest.approx(-2 * math.exp(0.1))
    assert one_token(half, half - 1.0, 2.0) == pytest.approx(-2 * 1.3)  # bounded above
    assert one_token(half, half + 1.0, 2.0) == pytest.approx(-2 * math.exp(-1))  # it may rise
    assert one_token(half, half + 1.0, -2.0) == pytest.approx(2 * 0.8)  # bounded below
    assert one_token(half, half - 1.0, -2.0) == pytest.approx(2 * math.exp(1))


def test_bounds_may_be_relative_to_the_policy_before_the_update() -> None:
    # r = 1 relative to the policy before; that one made the token e^0.5 times likelier.
    how = {"decoupled": True, "correction": "truncate"}
    assert one_token(-1.0, -1.5, 1.0, -1.0, **how) == pytest.approx(-math.exp(0.5))
    # The correction is cut off at 2.
    assert one_token(-1.0, -3.0, 1.0, -1.0, **how) == pytest.approx(-2.0)


def test_tokens_far_from_what_was_delivered_are_left_out_or_weigh_less() -> None:
    assert one_token(-1.0, -3.0, -1.0, correction="none") == pytest.approx(math.exp(2))
    assert one_token(-1.0, -3.0, -1.0, correction="truncate") == pytest.approx(2.0)
    assert one_token(-1.0, -3.0, -1.0, correction="mask") == 0.0  # e² is more than 5
    assert one_token(-1.0, -2.0, -1.0, correction="mask") == pytest.approx(math.e)
    assert one_token(-1.0, -0.1, 1.0, correction="mask") == 0.0  # e^-0.9 is less than a half
    assert one_token(-1.0, -3.0, -1.0, dual_clip=3.0) == pytest.approx(3.0)
    assert one_token(-1.0, -3.0, 1.0, dual_clip=3.0) == pytest.approx(-1.3)


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


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e4, 0, width=32), min_size=2, max_size=2),
    st.lists(st.floats(-1e4, 0, width=32), min_size=2, max_size=2),
    st.floats(-5, 5, width=32),
    loss_settings(),
)
def test_loss_and_gradient_are_finite_whatever_was_delivered(
    own: list[float], delivered: list[float], advantage: float, rules: LossSettings
) -> None:
    logprobs = torch.tensor([own], requires_grad=True)
    loss, numbers = policy_loss(
        logprobs,
        torch.tensor([delivered]),
        torch.ones(1, 2),
        torch.tensor([advantage]),
        torch.ones(1),
        rules,
        reference=torch.tensor([delivered]),
        entropies=-logprobs,
    )
    loss.backward()
    assert logprobs.grad is not None
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()
    assert all(math.isfinite(value) for value in numbers.values())


def test_rows_that_became_unlikely_are_left_out_where_they_are_bad() -> None:
    """Two rows, less likely by 0.4 and 0.6 nats per token, once bad and once good."""
    for advantage, left_out in ((-1.0, 2), (1.0, 0)):
        logprobs = torch.tensor([[-1.4, -1.4], [-1.3, -1.9]], requires_grad=True)
        _, numbers = policy_loss(
            logprobs,
            -torch.ones(2, 2),
            torch.ones(2, 2),
            torch.full((2,), advantage),
            torch.ones(2),
            LossSettings(off_policy_bound=0.5),
        )
        assert numbers["off_policy"] == left_out


def test_the_distance_to_the_reference_costs() -> None:
    loss, numbers = policy_loss(
        torch.tensor([[-1.0]]),
        torch.tensor([[-1.0]]),
        torch.ones(1, 1),
        torch.zeros(1),
        torch.ones(1),
        LossSettings(kl_weight=0.1),
        reference=torch.tensor([[-1.5]]),
    )
    assert numbers["kl"] == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    assert float(loss) == pytest.approx(0.1 * numbers["kl"])


def test_good_tokens_become_likelier_and_bad_ones_less() -> None:
    for advantage in (1.0, -1.0):
        logits = torch.zeros(1, 1, 5, requires_grad=True)
        logprobs = token_logprobs(logits, torch.tensor([[2]]))
        delivered = logprobs.detach().clone()
        loss, _ = policy_loss(
            logprobs,
            delivered,
            torch.ones(1, 1),
            torch.tensor([advantage]),
            torch.ones(1),
            LossSettings(),
        )
        loss.backward()
        assert logits.grad is not None
        after = token_logprobs(logits.detach() - logits.grad, torch.tensor([[2]]))
        assert math.copysign(1, float(after - delivered)) == advantage


def test_each_token_is_weighed_by_the_version_that_sampled_it() -> None:
    """Two tokens, alike but for what was delivered with them: the gradient is r times as large."""
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    delivered = torch.tensor([[-1.0, -1.1]])  # of this version, and of an earlier one
    loss, numbers = policy_loss(
        logprobs, delivered, torch.ones(1, 2), torch.ones(1), torch.ones(1), LossSettings()
    )
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist()[0] == pytest.approx([-1.0, -math.exp(0.1)])
    assert numbers["ratio"] == pytest.approx(1 + math.exp(0.1))


@pytest.mark.parametrize(
    ("denominator", "weights"),
    [
        ("trajectory", [1 / (2 * 6), 1 / (2 * 6), 1 / (2 * 3)]),
        ("token", [1 / 9] * 3),
        ("constant", [1 / (2 * 100)] * 3),
    ],
)
def test_denominators(denominator: str, weights: list[float]) -> None:
    """A trajectory of two rows (2 and 4 trained tokens) and one of a single row (3)."""
    batch = [group(row(0, 1.0, 4), row(0, 1.0, 6), row(1, 0.0, 5))]
    rules = ExampleSettings(
        denominator=denominator,  # type: ignore[arg-type]
        constant_tokens=100,
        advantages=AdvantageSettings("mean"),
    )
    learned = examples_of(batch, 3, rules)
    assert [one.weight for one in learned.examples] == pytest.approx(weights)
    assert [one.advantage for one in learned.examples] == [0.5, 0.5, -0.5]
    assert learned.numbers["reward_mean"] == 0.5


def test_what_teaches_nothing_is_counted_and_left_out() -> None:
    cut_off = row(1, 0.0, group="b")
    object.__setattr__(cut_off, "learn", False)
    batch = [
        group(row(0, 1.0), row(1, 1.0), group_id="a"),
        group(row(0, 1.0, group="b"), cut_off, group_id="b"),
        group(row(0, 1.0, version=0), row(1, 0.0), group_id="c"),
    ]
    learned = examples_of(batch, 3, ExampleSettings(max_staleness=2))
    numbers = learned.numbers
    assert learned.group_ids == ["a", "b", "c"]
    assert (numbers["groups"], numbers["groups_equal"], numbers["groups_stale"]) == (3, 1, 1)
    assert (numbers["trajectories"], numbers["reward_mean"]) == (4, 0.75)
    assert len(learned.examples) == 1
    assert learned.examples[0].weight == pytest.approx(1 / (4 * 2))
    assert len(examples_of(batch, 3, ExampleSettings(learn_truncated=True)).examples) == 4


def changed(one: Row, **what: object) -> Row:
    return dataclasses.replace(one, **what)  # type: ignore[arg-type]


def sampled(
    one: Row, temperature: float, logprobs: LogprobsKind, altered: tuple[str, ...] = ()
) -> Row:
    return changed(one, sampling=[SamplingSpan(2, 4, temperature, logprobs, altered)])


def with_logprob(one: Row, logprob: float) -> Row:
    assert one.logprobs is not None
    return changed(one, logprobs=np.where(np.arange(4) == 3, np.float32(logprob), one.logprobs))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (changed(row(0, 1.0), images=[RowImage("sha", 0, 1, b"PNG")]), "images"),
        (changed(row(0, 1.0), logprobs=None), "no_logprobs"),
        *((with_logprob(row(0, 1.0), value), "bad_logprobs") for value in UNUSABLE),
        (changed(row(0, 1.0), tokens=np.array([1, 2, 3, 100], np.int32)), "bad_tokens"),
        (sampled(row(0, 1.0), 1.0, "processed", ("top_p",)), "altered"),
        (sampled(row(0, 1.0), 0.0, "raw"), "greedy"),
        (sampled(row(0, 1.0, version=2), 0.7, "raw"), "raw"),
        (sampled(row(0, 1.0, version=2), 0.7, "unknown"), "raw"),
    ],
)
def test_rows_that_cannot_be_learned_from_are_left_out_and_counted(bad: Row, why: str) -> None:
    rules = ExampleSettings(vocabulary=100)
    learned = examples_of([group(bad, row(1, 0.0))], 3, rules)
    assert [one.advantage < 0 for one in learned.examples] == [True]  # its reward still counts
    assert (learned.numbers["rows_refused"], learned.numbers[f"rows_{why}"]) == (1, 1)
    assert "skipped" not in learned.numbers
    assert examples_of([group(bad, bad)], 3, rules).examples == []


@pytest.mark.parametrize(
    ("version", "logprobs", "raw"), [(3, "raw", 1), (3, "processed", 0), (2, "processed", 0)]
)
def test_rows_say_their_temperature(version: int, logprobs: LogprobsKind, raw: int) -> None:
    batch = [group(sampled(row(0, 1.0, version=version), 0.7, logprobs), row(1, 0.0))]
    (warm, usual) = examples_of(batch, 3, ExampleSettings()).examples
    assert warm.temperatures is not None
    assert warm.raw is not None
    assert warm.temperatures.tolist() == pytest.approx([1, 1, 0.7, 0.7])
    assert warm.raw.tolist() == [0, 0, raw, raw]
    assert usual.temperatures is not None
    assert usual.temperatures.tolist() == [1] * 4


def test_groups_of_a_later_version_are_refused() -> None:
    """As from an engine that another trainer has published to."""
    batch = [group(row(0, 1.0, version=4), row(1, 0.0, version=3))]
    learned = examples_of(batch, 3, ExampleSettings())
    assert learned.examples == []
    assert (learned.numbers["groups_newer"], learned.numbers["groups_stale"]) == (1, 0)
    assert learned.numbers["skipped"] == "newer"
    assert len(examples_of(batch, 4, ExampleSettings()).examples) == 2


def test_a_reference_is_for_rows_without_an_advantage_too() -> None:
    batch = [group(row(0, 1.0), row(1, 1.0))]
    assert examples_of(batch, 3, ExampleSettings()).examples == []
    held = examples_of(batch, 3, ExampleSettings(keep_zero=True)).examples
    assert [one.advantage for one in held] == [0.0, 0.0]


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


examples = st.lists(
    st.builds(
        lambda length, advantage, seed: Example(
            tokens=np.random.default_rng(seed).integers(0, 11, length).astype(np.int32),
            mask=np.r_[0, np.random.default_rng(seed).integers(0, 2, length - 1)].astype(np.uint8),
            logprobs=-np.random.default_rng(seed).random(length).astype(np.float32),
            advantage=advantage,
            weight=0.1,
        ),
        st.integers(2, 24),
        st.floats(-2, 2, width=32),
        st.integers(0, 1000),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=50, deadline=None)
@given(examples, st.integers(1, 200))
def test_the_loss_is_the_same_however_rows_are_padded_and_parted(
    rows: list[Example], most_tokens: int
) -> None:
    def total(most: int) -> float:
        whole = 0.0
        for part in micro_batches(rows, most):
            table = torch.linspace(-3, 3, 121).reshape(11, 11)
            tokens = torch.from_numpy(part.tokens)
            logprobs = token_logprobs(
                table[tokens[:, part.first : -1]], tokens[:, part.first + 1 :]
            )
            loss, _ = policy_loss(
                logprobs,
                torch.from_numpy(part.logprobs[:, part.first :]),
                torch.from_numpy(part.mask[:, part.first :]),
                torch.from_numpy(part.advantages),
                torch.from_numpy(part.weights),
                LossSettings(),
            )
            whole += float(loss)
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
    first = Example(tokens, mask * (own == 2), logprobs, 2.0, 0.25)
    second = Example(tokens, mask * (own == -1), logprobs, -1.0, 0.25)
    losses = []
    for examples in ([whole], [first, second], [whole, first]):
        batch = padded(examples)
        loss, _ = policy_loss(
            torch.linspace(-0.6, -0.4, 4).expand(len(examples), 4),
            *(torch.from_numpy(batch.logprobs), torch.from_numpy(batch.mask)),
            *(torch.from_numpy(batch.advantages), torch.from_numpy(batch.weights)),
            LossSettings(),
        )
        losses.append(float(loss))
    assert losses[0] == pytest.approx(losses[1])
    rest = padded([first])
    assert (batch.advantages.shape, rest.advantages.shape) == ((2, 4), (1,))
