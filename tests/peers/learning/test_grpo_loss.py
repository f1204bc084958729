"""The trainer's numbers: advantages, weights, padding, clipping, and the gradient's direction."""

import dataclasses
import io
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from envserver_clients import grpo
from envserver_clients.records import Batch, Row
from envserver_clients.training.advantages import AdvantageSettings, advantages
from envserver_clients.training.checkpoints import CheckpointInfo, Checkpoints
from envserver_clients.training.examples import (
    Example,
    ExampleSettings,
    Padded,
    examples_of,
    micro_batches,
    padded,
)
from envserver_clients.training.guard import Guard, GuardSettings, MismatchError, NothingLearned
from envserver_clients.training.learner import Learner, StepSettings
from envserver_clients.training.loss import policy_loss, token_logprobs
from envserver_clients.training.metrics import read_lines
from envserver_clients.training.objectives import LossSettings, Schedule, rate_of
from envserver_clients.training.policy import LoraSettings, Policy, _logprobs
from envserver_clients.training.settings import TrainerSettings
from envserver_records.images import RowImage
from envserver_records.sampling import LogprobsKind, SamplingSpan
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.rows_to_learn import group
from support.rows_to_learn import row as row_of
from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM

UNUSABLE = (-9999.0, float("-inf"), float("nan"), 0.5)


def row(trajectory: int, reward: float, length: int = 4, *, version: int = 3, **more: Any) -> Row:
    """A row of which all but the first two tokens are trained."""
    mask = [0, 0] + [1] * (length - 2)
    return row_of(range(length), mask, reward, trajectory, version=version, **more)


def loss_of(
    logprobs: Any, delivered: Any, advantage: float, rules: LossSettings, **more: torch.Tensor
) -> tuple[float, dict[str, float], torch.Tensor]:
    """The loss of rows of trained tokens of weight 1, its numbers, and the logprobs with their
    gradient."""
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


# The learner with a real (tiny, random) model: steps, checkpoints, LoRA, metrics of a restart;
# and the trainer's loop with batches that it must not learn from

Weights = dict[str, torch.Tensor]


def trained_after(start: int, length: int) -> np.ndarray:
    return (np.arange(length) >= start).astype(np.uint8)


def delivered(policy: Policy, tokens: np.ndarray) -> np.ndarray:
    """The policy's own logprobs of a row."""
    return np.array([0.0, *policy.prompt_logprobs(tokens.tolist())], np.float32)


def batch(policy: Policy, seed: int) -> list[Example]:
    """Rows of random tokens whose delivered logprobs are the policy's own; half were good."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(4):
        tokens = rng.integers(10, 4000, 8 + number).astype(np.int32)
        mask = trained_after(4, len(tokens))
        advantage = 1.0 if number % 2 else -1.0
        made.append(Example(tokens, mask, delivered(policy, tokens) * mask, advantage, 0.05))
    return made


def with_noise(rows: list[Example], low: float, high: float) -> list[Example]:
    """Other delivered logprobs, by `low` to `high` nats."""
    rng = np.random.default_rng(0)
    return [
        replace(
            row,
            logprobs=np.minimum(row.logprobs + rng.uniform(low, high, len(row.tokens)), 0)
            * row.mask,
        )
        for row in rows
    ]


def copied(weights: Weights) -> Weights:
    return {name: value.clone() for name, value in weights.items()}


def are_equal(found: Weights, expected: Weights) -> bool:
    return all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.fixture
def policy(model: Path) -> Policy:
    return Policy(str(model))


def learner(
    model: Path, *, most_mismatch: float | None = None, lora: LoraSettings | None = None
) -> Learner:
    torch.manual_seed(0)
    rules = StepSettings(
        learning_rate=1e-3, warmup_steps=2, micro_batch_tokens=24, most_mismatch=most_mismatch
    )
    return Learner(Policy(str(model), lora=lora), rules)


def test_a_step_makes_what_was_good_likelier(model: Path) -> None:
    one = learner(model)
    rows = batch(one.policy, 0)
    before = [one.policy.prompt_logprobs(row.tokens.tolist())[3:] for row in rows]
    numbers = one.step(rows)
    after = [one.policy.prompt_logprobs(row.tokens.tolist())[3:] for row in rows]
    for row, old, new in zip(rows, before, after, strict=True):
        assert np.sign(np.sum(new) - np.sum(old)) == np.sign(row.advantage)
    assert numbers["ratio_mean"] == pytest.approx(1.0, abs=1e-4)  # it sampled them itself
    assert numbers["kl_sampling"] == pytest.approx(0.0, abs=1e-6)
    assert numbers["learning_rate"] == pytest.approx(5e-4)  # half way up
    assert numbers["clip_fraction"] == 0.0
    assert one.step([]) == {}


def test_what_must_not_be_learned_changes_nothing(model: Path) -> None:
    """A gradient that is not finite; delivered logprobs with noise of 0 to 2 nats, which is
    measured."""
    one = learner(model, most_mismatch=0.5)
    first, *others = rows = batch(one.policy, 0)
    before = copied(one.policy.state())
    assert one.step([replace(first, weight=float("inf")), *others])["skipped"] == "gradient"
    numbers = one.step(with_noise(rows, -2, 0))
    assert numbers["skipped"] == "mismatch"
    assert 0.7 < float(numbers["mismatch_mean"]) < 1.3
    assert 1.5 < float(numbers["mismatch_max"]) < 2.1
    assert float(numbers["mismatch_kl"]) > 0.3
    assert are_equal(one.policy.state(), before)
    numbers = one.step(rows)
    assert float(numbers["mismatch_mean"]) < 1e-4
    assert "skipped" not in numbers


def test_an_earlier_policy_is_told_from_tampered_logprobs(model: Path, policy: Policy) -> None:
    """A policy that has moved far since differs by more than the bound, and legitimately."""
    torch.manual_seed(1)
    sampled = policy.model.generate(
        torch.randint(10, 4000, (16, 4)),
        do_sample=True,
        top_k=0,
        min_new_tokens=64,
        max_new_tokens=64,
    )
    mask = trained_after(4, 68)
    rows = [
        Example(tokens, mask, delivered(policy, tokens) * mask, 0.0, 0.01)
        for tokens in sampled.numpy().astype(np.int32)
    ]
    one = learner(model, most_mismatch=0.5)
    torch.manual_seed(2)
    with torch.no_grad():
        for value in one.policy.trained.values():
            value.add_(0.05 * value.std() * torch.randn_like(value))
    numbers = one.step(rows)
    assert float(numbers["mismatch_mean"]) > 0.5
    assert numbers["mismatch_fresh"] == 0.0
    assert "skipped" not in numbers
    assert float(numbers["mismatch_ratio"]) == pytest.approx(1.0, abs=0.3)
    for low, high in ((-2, 0), (0, 2), (-2, 2)):
        assert one.step(with_noise(rows, low, high))["skipped"] == "mismatch"
    own = [replace(row, fresh=row.mask) for row in rows]
    assert one.step(own)["skipped"] == "mismatch"  # its own version has not moved since


def moves(one: Learner, steps: int) -> torch.Tensor:
    """How far each weight is from where it was after some steps."""
    start = copied(one.policy.state())
    for seed in range(steps):
        one.step(batch(one.policy, seed))
    return torch.cat(
        [(value - start[name]).flatten() for name, value in one.policy.state().items()]
    )


def test_bfloat16_moves_weights_as_float32(model: Path, policy: Policy, tmp_path: Path) -> None:
    """At a usual learning rate: of bfloat16 weights nine of ten would stay where they are."""
    rules = StepSettings(learning_rate=1e-6)
    half = Learner(Policy(str(model), dtype=torch.bfloat16), rules)
    whole = moves(Learner(policy, rules), 3)
    found = moves(half, 3)
    assert float((found != 0).sum() / (whole != 0).sum()) > 0.9
    assert float(found.abs().sum() / whole.abs().sum()) == pytest.approx(1.0, abs=0.1)
    half.policy.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    rounded = {name: one.bfloat16().float() for name, one in half.policy.state().items()}
    assert are_equal(rounded, Policy(str(tmp_path)).state())  # which is read as float32


def test_a_step_lost_in_rounding_is_told(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    numbers = Learner(policy, StepSettings(learning_rate=1e-12)).step(batch(policy, 0))
    assert float(numbers["weights_moved"]) < 0.1
    Guard(GuardSettings()).judge({"step": 1, **numbers})
    assert "lost in the rounding" in caplog.text
    numbers = Learner(policy, StepSettings(learning_rate=1e-5)).step(batch(policy, 0))
    assert float(numbers["weights_moved"]) > 0.9


@pytest.mark.parametrize(
    ("lora", "of_first_version"), [(None, False), (LoraSettings(4), False), (None, True)]
)
def test_a_restart_from_a_checkpoint_leads_to_the_same_weights(
    model: Path, tmp_path: Path, lora: LoraSettings | None, of_first_version: bool
) -> None:
    """Also from one of the first version, with the optimizer's numbers by the weight's index."""
    through = learner(model, lora=lora)
    batches = [batch(through.policy, seed) for seed in range(4)]
    kept = Checkpoints(tmp_path, keep=2)

    def state() -> dict[str, Any]:
        first = {"optimizer": through._optimizer.state_dict()} if of_first_version else {}
        return through.state() | first

    for step, rows in enumerate(batches, start=1):
        through.step(rows)
        if step <= 2:
            kept.save(CheckpointInfo(step, step, f"lease-{step}", (f"g{step}",)), state)
    (tmp_path / ".step-3").mkdir()  # killed while it wrote the third
    saved = kept.latest()
    assert saved == CheckpointInfo(2, 2, "lease-2", ("g2",))
    again = learner(model, lora=lora)
    again.load_state(kept.load(saved, again.blank_state))
    for rows in batches[2:]:
        again.step(rows)
    assert are_equal(again.policy.state(), through.policy.state())
    kept.save(CheckpointInfo(3, 3), again.state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


def test_the_learning_rate_rises_and_falls() -> None:
    def rates(schedule: Schedule) -> list[float]:
        return [rate_of(update, 8.0, 2, schedule, 6, 2.0) for update in range(8)]

    assert rates("constant") == [4, 8, 8, 8, 8, 8, 8, 8]
    assert rates("linear") == pytest.approx([4, 8, 8, 6.5, 5, 3.5, 2, 2])
    assert rates("cosine") == pytest.approx([4, 8, 8, 7.1213, 5, 2.8787, 2, 2], abs=1e-4)


def test_rows_of_recurrent_models_are_not_packed(
    model: Path, policy: Policy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = MambaConfig(vocab_size=4096, hidden_size=16, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "mamba")
    words = ["--model", str(tmp_path / "mamba"), "--output", str(tmp_path / "out"), "--packed"]
    assert grpo.main(words) == 1
    assert "only attention layers" in capsys.readouterr().out
    assert not policy.is_recurrent


def test_a_lora_of_chosen_layers_leaves_the_reference(model: Path, tmp_path: Path) -> None:
    policy = Policy(str(model), lora=LoraSettings(4, alpha=12, targets="q_proj, v_proj"))
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in policy.trained}
    assert layers == {"q_proj", "v_proj"}
    layer = next(one for one in policy.model.modules() if hasattr(one, "lora_A"))
    assert layer.scaling == {"default": 3.0}
    rows = padded(batch(policy, 2))
    one = Learner(policy, StepSettings(learning_rate=1e-2, loss=LossSettings(kl_weight=0.1)))
    before = policy.logprobs(rows).detach()
    one.step(batch(policy, 3))
    assert torch.equal(policy.reference_logprobs(rows), before)
    assert not torch.equal(policy.logprobs(rows), before)
    policy.save(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "model.safetensors").exists()


def test_logprobs_keep_no_copy_of_the_logits_and_have_the_same_gradient() -> None:
    """3,000 distributions, of which 1,024 are computed at a time."""
    torch.manual_seed(0)
    logits = torch.randn(2, 1500, 64).bfloat16().requires_grad_()
    targets = torch.randint(64, (2, 1500))
    for temperatures in (None, torch.rand(2, 1500) + 0.5):
        expected = token_logprobs(logits, targets, temperatures)
        (wanted,) = torch.autograd.grad(expected.square().sum(), logits)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = _logprobs(logits, targets, temperatures)
        assert torch.equal(found, expected)
        assert torch.equal(torch.autograd.grad(found.square().sum(), logits)[0], wanted)
        size = kept.pop(logits.data_ptr())
        assert sum(kept.values()) < size / 2


def source_of(waiting: list[Batch]) -> Any:
    """Leases batches one after the other; an acknowledged one never comes again."""

    def batches() -> Iterator[Batch]:
        while waiting:
            yield waiting[0]

    def done(batch: Batch, checkpoint: str | None) -> None:
        assert waiting.pop(0) is batch

    return SimpleNamespace(resume=lambda saved: None, batches=batches, done=done)


@contextmanager
def publisher(*_: object) -> Iterator[Any]:
    yield SimpleNamespace(
        first_version=lambda saved: saved, publish=lambda version, examples=(): None
    )


def leased(policy: Policy, number: int, noise: float) -> Batch:
    """A group of four rows whose delivered logprobs have noise of 0 to `noise` nats."""
    rng = np.random.default_rng(number)
    rows = []
    for trajectory in range(4):
        tokens = rng.integers(10, 4000, 24).astype(np.int32)
        logprobs = delivered(policy, tokens) - rng.uniform(0, noise, 24)
        given = (tokens, trained_after(4, 24), float(trajectory == 0), trajectory)
        rows.append(row_of(*given, logprobs=logprobs))
    return Batch(f"lease-{number}", 0.0, [group(*rows, name=f"g{number}")])


@pytest.fixture
def train(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the trainer on batches; it continues where it was."""

    def run(batches: list[Batch], **more: object) -> list[dict[str, Any]]:
        monkeypatch.setattr(grpo, "open_source", lambda *_: (source_of(batches), None))
        monkeypatch.setattr(grpo, "Publisher", publisher)
        settings = TrainerSettings(
            model=str(model), output=tmp_path, threads=1, max_staleness=None, **more
        )
        grpo.train(settings, Console(file=io.StringIO()))
        return list(read_lines(tmp_path / "metrics.jsonl"))

    return run


def test_noise_on_logprobs_ends_it_with_reasons(policy: Policy, tmp_path: Path, train: Any) -> None:
    spoiled = [leased(policy, number, 2.0) for number in range(4)]
    with pytest.raises(MismatchError, match=r"differ .* nats per token") as raised:
        train(spoiled, steps=8)
    assert "model" in raised.value.hint
    assert len(spoiled) == 1  # three were acknowledged: they cannot stop it again
    state = torch.load(tmp_path / "checkpoints" / "step-3" / "state.pt", weights_only=False)
    assert are_equal(policy.state(), state["weights"])
    lines = train([leased(policy, 5, 0.0)], steps=4)
    assert [line.get("skipped") for line in lines] == ["mismatch"] * 3 + [None]
    assert lines[-1]["mismatch_mean"] < 1e-4
