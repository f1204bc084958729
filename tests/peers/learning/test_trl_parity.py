"""The gradient is TRL's: one batch, our learner and TRL's own `_compute_loss`, all parameters.

Twelve rows in three groups, of uneven lengths, with a tool's tokens in between that are not
trained. One group has equal rewards. The delivered logprobs differ from the policy's own. Each
objective is the preset of its name. With the variable PARITY_TABLE the differences are written to
that file.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from envserver_clients.records import ClientGroup, Row
from envserver_clients.training.examples import examples_of
from envserver_clients.training.learner import Learner, StepSettings
from envserver_clients.training.objectives import preset
from envserver_clients.training.policy import Policy
from envserver_clients.training.settings import TrainerSettings
from envserver_records.sampling import LogprobsKind, SamplingSpan
from support.gradients import difference
from support.rows_to_learn import group, row
from torch.nn.utils.rnn import pad_sequence

PROMPT = 6
LONGEST = 20
NOISE = 0.3
SetUp = Callable[[Any, dict[str, Any], torch.Tensor], None]
"""Completes TRL's trainer and its inputs, given the delivered logprobs."""
MOST_DIFFERENCE = 5e-6
"""Relative difference of the gradients in float32; both sums have other orders."""


@pytest.fixture(scope="module")
def trl_at(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Any]:
    """Makes TRL's trainer for a temperature; its loss alone is used, set up by each case."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.grpo_trainer import add_fused_lm_head

    @cache
    def made(temperature: float) -> Any:
        config = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=LONGEST,
            temperature=temperature,
        )
        trainer = GRPOTrainer(
            model=Policy(str(model)).model,
            reward_funcs=lambda completions, **_: [0.0 for _ in completions],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "a"}]),
            processing_class=Policy(str(model)).tokenizer,
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.args.steps_per_generation = 1
        trainer.model.train()  # the tiny model has no dropout
        trainer.reference = Policy(str(model)).model
        add_fused_lm_head(trainer.reference, temperature=trainer.temperature)
        return trainer

    return made


@pytest.fixture(scope="module")
def trl(trl_at: Callable[[float], Any]) -> Any:
    return trl_at(1.0)


def moved(model: Path) -> Policy:
    """The policy after some training; its reference is the model before it."""
    policy = Policy(str(model), keep_reference=True)
    torch.manual_seed(1)
    with torch.no_grad():
        for value in policy.trained.values():
            value.add_(torch.randn_like(value) * 0.01)
    return policy


def rows_of(
    policy: Policy, temperature: float = 1.0, logprobs: LogprobsKind = "processed"
) -> list[ClientGroup]:
    """The delivered logprobs are the policy's at the temperature, with some noise."""
    rng = np.random.default_rng(0)

    def made(number: int, trajectory: int) -> Row:
        length = PROMPT + int(rng.integers(6, LONGEST + 1))
        tokens = rng.integers(10, 4000, length).astype(np.int32)
        mask = np.arange(length) >= PROMPT
        mask[PROMPT + 2 : PROMPT + 4] = False
        with torch.no_grad():
            own = chosen(policy.model, tokens, temperature if logprobs == "processed" else 1.0)
        return row(
            *(tokens, mask, 1.0 if number == 2 else float(trajectory % 3 == 0), trajectory),
            logprobs=np.minimum(np.r_[0.0, own.numpy()] + rng.normal(0, NOISE, length), 0.0),
            sampling=[SamplingSpan(PROMPT, length, temperature, logprobs)],
        )

    return [
        group(*(made(number, trajectory) for trajectory in range(4)), name=f"g{number}")
        for number in range(3)
    ]


def chosen(model: Any, tokens: Any, temperature: float = 1.0) -> torch.Tensor:
    """The logprob of each token but the first, by definition."""
    ids = torch.from_numpy(tokens).long()[None]
    logprobs = torch.log_softmax(model(ids).logits[0, :-1] / temperature, -1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0]


def settings(objective: str, **more: Any) -> TrainerSettings:
    """The preset, without a correction of its own unless it is about one."""
    return TrainerSettings.model_validate(
        {"model": "-", "output": "-", "objective": objective, "constant_tokens": LONGEST}
        | ({} if "correction" in preset(objective) else {"correction": "none"})
        | more
    )


def our_gradient(
    policy: Policy, groups: list[ClientGroup], rules: TrainerSettings
) -> dict[str, Any]:
    examples = examples_of(groups, 0, rules.examples()).examples
    before = {name: value.detach().clone() for name, value in policy.trained.items()}
    step = StepSettings(loss=rules.loss(), most_gradient=1e9, micro_batch_tokens=64)
    numbers = Learner(policy, step).step(examples)
    if not rules.decoupled and groups[0].rows[0].sampling[0].logprobs == "processed":
        bounded = float(numbers["clip_fraction"])
        assert bounded > 0.1 or rules.surrogate == "cispo"  # the bounds are tried, too
    found = {name: value.grad for name, value in policy.trained.items()}
    policy.load_state(before)
    return found


def trl_gradient(
    trainer: Any, policy: Policy, groups: list[ClientGroup], rules: TrainerSettings, set_up: SetUp
) -> dict[str, Any]:
    """The gradient of TRL's loss of the same rows; `set_up` completes trainer and inputs."""
    examples = examples_of(groups, 0, replace(rules.examples(), keep_zero=True)).examples
    advantages = [one.advantage for one in examples]
    rows = [row for group in groups for row in group.rows][: len(examples)]

    def padded(columns: Any, kind: Any = torch.long) -> torch.Tensor:
        """The completions' part."""
        parts = [torch.from_numpy(one[PROMPT:]).to(kind) for one in columns]
        return pad_sequence(parts, batch_first=True)

    inputs = {
        "prompt_ids": torch.tensor(np.array([row.tokens[:PROMPT] for row in rows])).long(),
        "prompt_mask": torch.ones(len(rows), PROMPT, dtype=torch.long),
        "completion_ids": padded(row.tokens for row in rows),
        "completion_mask": padded(np.ones_like(row.tokens) for row in rows),
        "tool_mask": padded(row.mask for row in rows),
        "advantages": torch.tensor(advantages, dtype=torch.float32),
        "num_items_in_batch": torch.tensor(float(sum(row.mask.sum() for row in rows))),
    }
    delivered = padded((row.logprobs for row in rows), torch.float32)
    inputs["ref_per_token_logps"] = logps(trainer, trainer.reference, inputs)
    trainer.model.load_state_dict(policy.model.state_dict())
    change(trainer, **PLAIN)
    set_up(trainer, inputs, delivered)
    trainer.model.zero_grad(set_to_none=True)
    trainer._compute_loss(trainer.model, inputs).backward()
    return {name: value.grad for name, value in trainer.model.named_parameters()}


PLAIN: dict[str, Any] = {
    "beta": 0.0,
    "use_vllm": False,
    "loss_type": "grpo",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "use_bias_correction_kl": False,
    "importance_sampling_level": "token",
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False,
    "vllm_importance_sampling_correction": True,
}


def change(trainer: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(trainer if hasattr(trainer, name) else trainer.args, name, value)


def logps(trainer: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        found = trainer._get_per_token_logps_and_entropies(
            model, ids, attention, inputs["completion_ids"].shape[1]
        )
    return found[0]  # type: ignore[no-any-return]


def compare(
    model: Path, trainer: Any, rules: TrainerSettings, set_up: SetUp, **sampling: Any
) -> float:
    policy = moved(model)
    groups = rows_of(policy, **sampling)
    ours = our_gradient(policy, groups, rules)
    return difference(ours, trl_gradient(trainer, policy, groups, rules, set_up))


def like(**attributes: Any) -> SetUp:
    """TRL with these attributes, relative to the delivered logprobs."""

    def set_up(trainer: Any, inputs: dict[str, Any], delivered: torch.Tensor) -> None:
        inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"] = delivered
        change(trainer, **attributes)

    return set_up


def corrected(mode: str, most: float, least: float | None = None, **attributes: Any) -> SetUp:
    """TRL's correction for what the engine computes, as its `_generate_and_score_completions`."""

    def set_up(trainer: Any, inputs: dict[str, Any], delivered: torch.Tensor) -> None:
        like(use_vllm=True, **attributes)(trainer, inputs, delivered)
        own = logps(trainer, trainer.model, inputs)
        inputs["old_per_token_logps"] = own
        logs = (own - delivered) * inputs["completion_mask"] * inputs["tool_mask"]
        ratio = torch.exp(logs.sum(-1, keepdim=True) if "sequence" in mode else logs)
        if "truncate" in mode:
            ratio = ratio.clamp(max=most)
        else:
            ratio = ratio.masked_fill((ratio < (least or -math.inf)) | (ratio > most), 0.0)
        inputs["importance_sampling_ratio"] = ratio

    return set_up


GSPO = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
DAPO = {"loss_type": "dapo", "epsilon_high": 0.28}
CISPO = {"loss_type": "cispo", "epsilon_high": 5.0}
LOW = {"most_correction": 1.3}

TABLE: dict[str, tuple[dict[str, Any], SetUp]] = {
    "grpo": ({}, like()),
    "dr_grpo": ({}, like(loss_type="dr_grpo")),
    "dapo": ({}, like(**DAPO)),
    "gspo": ({}, like(**GSPO)),
    "cispo": ({}, like(**CISPO)),
    "grpo+dual_clip": ({"dual_clip": 1.5}, like(delta=1.5)),
    "grpo+tis": (LOW, corrected("token_truncate", 1.3)),
    "grpo+icepop": ({**LOW, "least_correction": 0.8}, corrected("token_mask", 1.3, 0.8)),
    "grpo+sequence_tis": (LOW, corrected("sequence_truncate", 1.3)),
    "dapo+sequence_mis": ({}, corrected("sequence_mask", 3.0, **DAPO)),
    "grpo+opsm": ({"off_policy_bound": 0.02}, like(off_policy_mask_threshold=0.02)),
    "dapo, entropy_weight": (
        {"entropy_weight": 0.1},
        like(**DAPO, entropy_coef=0.1, _entropy_bonus_enabled=True),
    ),
    "grpo, kl_form k3": ({"kl_weight": 0.5}, like(beta=0.5)),
    "grpo, kl_form k3_ratio": (
        {"kl_weight": 0.5, "kl_form": "k3_ratio"},
        like(beta=0.5, use_bias_correction_kl=True),
    ),
    "cispo, kl_form k3": ({"kl_weight": 0.5}, like(**CISPO, beta=0.5)),
}


def case(name: str) -> tuple[TrainerSettings, SetUp]:
    more, set_up = TABLE[name]
    return settings(name.partition(",")[0], **more), set_up


@pytest.fixture(scope="module")
def differences() -> Iterator[dict[str, float]]:
    """Differences by objective, written as JSON at the end."""
    found: dict[str, float] = {}
    yield found
    if path := os.environ.get("PARITY_TABLE"):
        Path(path).write_text(json.dumps(found))


@pytest.mark.parametrize("name", TABLE)
def test_objectives(model: Path, trl: Any, differences: dict[str, float], name: str) -> None:
    differences[name] = compare(model, trl, *case(name))
    assert differences[name] < MOST_DIFFERENCE


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("name", ["dapo", "grpo, kl_form k3_ratio"])
def test_temperatures(
    model: Path, trl_at: Any, differences: dict[str, float], temperature: float, name: str
) -> None:
    """Policy, delivered and reference logprobs are those of the logits over the temperature."""
    right = compare(model, trl_at(temperature), *case(name), temperature=temperature)
    differences[f"{name}, temperature {temperature}"] = right
    assert right < MOST_DIFFERENCE
    wrong = compare(model, trl_at(1.0), *case(name), temperature=temperature)
    assert wrong > 0.05  # so the temperature matters


def test_logprobs_before_the_temperature_are_compared_as_such(model: Path, trl_at: Any) -> None:
    """Tokens of the policy's own version: the ratio is to its own distribution, as TRL's is."""
    sampling = {"temperature": 0.7, "logprobs": "raw"}
    found = compare(model, trl_at(0.7), settings("grpo"), lambda *_: None, **sampling)
    assert found < MOST_DIFFERENCE


@pytest.mark.parametrize("form", ["k1", "k2"])
def test_forms_of_the_distance_that_trl_lacks(model: Path, trl: Any, form: str) -> None:
    """log p - log q, and its square's half, also where rewards are equal."""
    policy = moved(model)
    groups = rows_of(policy)
    rules = settings("grpo", kl_weight=0.5, kl_form=form)
    ours = our_gradient(policy, groups, rules)
    plain = trl_gradient(trl, policy, groups, rules, like())
    policy.model.zero_grad(set_to_none=True)
    rows = [row for group in groups for row in group.rows]
    for one in rows:
        with torch.no_grad():
            reference = chosen(policy._reference, one.tokens)
        away = chosen(policy.model, one.tokens) - reference
        mask = torch.from_numpy(one.mask[1:]).float()
        value = away if form == "k1" else away**2 / 2
        ((value * mask).sum() / mask.sum() / len(rows)).backward()
    theirs = {name: plain[name] + 0.5 * value.grad for name, value in policy.trained.items()}
    assert difference(ours, theirs) < MOST_DIFFERENCE
