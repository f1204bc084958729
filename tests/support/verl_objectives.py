"""Our losses and advantages beside verl's own: `python verl_objectives.py`, in `.venv-trainers`.

Out: one JSON object, relative differences by name: of the loss's gradient with respect to the
logprobs, or of the advantages of tokens. Three groups of four rows with random logprobs and
rewards; a tool's tokens in between are not trained.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from envserver_clients.records import ClientGroup, Row
from envserver_clients.training.examples import examples_of, padded
from envserver_clients.training.loss import policy_loss
from envserver_clients.training.objectives import preset
from envserver_clients.training.settings import TrainerSettings
from verl.trainer.ppo import core_algos
from verl.workers.config import FSDPActorConfig

ROWS, GROUPS, LONGEST = 4, 3, 14
MODES = {
    "trajectory": "seq-mean-token-mean",
    "token": "token-mean",
    "constant": "seq-mean-token-sum-norm",
}
LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "grpo+dual_clip", "grpo, kl_form k1")
LOSSES += ("grpo, kl_form k2", "grpo, kl_form k3", "grpo, kl_form k3+", "grpo, entropy_weight")
ADVANTAGES = {
    "rloo": "rloo",
    "reinforce_pp": "reinforce_plus_plus",
    "reinforce_pp_baseline": "reinforce_plus_plus_baseline",
    "gdpo": "gdpo",
}

torch.set_num_threads(1)


def rows_of(rng: np.random.Generator) -> list[Row]:
    rows = []
    for number in range(GROUPS * ROWS):
        length = int(rng.integers(6, LONGEST + 1))
        mask = np.ones(length, np.uint8)
        mask[0], mask[3] = 0, 0
        parts = {"correct": float(rng.integers(0, 2)), "format": float(rng.normal())}
        rows.append(
            Row(
                tokens=np.arange(length, dtype=np.int32),
                mask=mask,
                logprobs=(rng.uniform(-2.5, -0.5, length) * mask).astype(np.float32),
                reward=sum(parts.values()),
                group_id=f"g{number // ROWS}",
                versions=np.where(mask, np.int32(0), np.int32(-1)),
                trajectory=number % ROWS,
                components=parts,
            )
        )
    return rows


def settings(name: str) -> TrainerSettings:
    """The preset in `name`, with narrow bounds for dual clip and weights for KL and entropy."""
    objective, _, more = name.partition(", ")
    own: dict[str, Any] = {"correction": "none"} if "correction" not in preset(objective) else {}
    if "dual_clip" in objective:
        own["dual_clip"] = 1.5
    if more.startswith("kl_form"):
        own |= {"kl_weight": 0.5, "kl_form": more.split()[1]}
    if more == "entropy_weight":
        own["entropy_weight"] = 0.1
    if objective == "gdpo":
        own["reward_weights"] = {"correct": 1.0, "format": 0.5}
    fixed = {"model": "-", "output": "-", "constant_tokens": LONGEST - 1}
    return TrainerSettings.model_validate(
        {**fixed, "objective": objective, "skip_equal": False, **own}
    )


class Batch:
    """The rows, as both take them: padded, without a prompt's first token."""

    def __init__(self, name: str) -> None:
        self.settings = settings(name)
        self.rows = rows_of(np.random.default_rng(0))
        groups = []
        for number in range(GROUPS):
            group = ClientGroup(f"g{number}", "e", "group", 0, memoryview(b""))
            group.__dict__["rows"] = self.rows[number * ROWS : (number + 1) * ROWS]
            groups.append(group)
        examples = examples_of(groups, 0, self.settings.examples()).examples
        assert len(examples) == len(self.rows)
        batch = padded(examples)
        self.mask, self.delivered = torch.from_numpy(batch.mask), torch.from_numpy(batch.logprobs)
        self.weights = torch.from_numpy(batch.weights)
        self.advantages = torch.from_numpy(batch.advantages)
        rng = torch.Generator().manual_seed(1)
        noise = 0.4 * torch.randn(self.mask.shape, generator=rng)
        self.own = (self.delivered + noise) * self.mask
        self.reference = (self.own + 0.3 * torch.randn(self.mask.shape, generator=rng)) * self.mask


def ours(batch: Batch) -> torch.Tensor:
    own = batch.own.clone().requires_grad_()
    rules = batch.settings.loss()
    loss, numbers = policy_loss(
        own,
        batch.delivered,
        batch.mask,
        batch.advantages,
        batch.weights,
        rules,
        reference=batch.reference if rules.kl_weight else None,
        entropies=own.square() if rules.entropy_weight else None,  # any function of what is learned
    )
    assert numbers["clipped"] > 0 or rules.surrogate == "cispo"
    loss.backward()
    assert own.grad is not None
    return own.grad


def verls(batch: Batch) -> torch.Tensor:
    own = batch.own.clone().requires_grad_()
    rules, mode = batch.settings.loss(), MODES[batch.settings.denominator]
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=rules.clip_low,
        clip_ratio_high=rules.clip_high,
        clip_ratio_c=rules.dual_clip or 1e9,
    )
    name = "cispo" if rules.surrogate == "cispo" else "vanilla"
    loss, _ = core_algos.get_policy_loss_fn("gspo" if rules.ratio_level == "sequence" else name)(
        old_log_prob=batch.delivered,
        log_prob=own,
        advantages=batch.advantages.unsqueeze(-1).expand_as(own),
        response_mask=batch.mask,
        loss_agg_mode=mode,
        config=config,
    )
    if rules.kl_weight:
        away = core_algos.kl_penalty(own, batch.reference, rules.kl_form)
        loss = loss + rules.kl_weight * core_algos.agg_loss(away, batch.mask, mode)
    if rules.entropy_weight:
        loss = loss - rules.entropy_weight * core_algos.agg_loss(own.square(), batch.mask, mode)
    loss.backward()
    assert own.grad is not None
    return own.grad


def verls_advantages(batch: Batch, estimator: str) -> torch.Tensor:
    """Each token's; the reward is at the last token."""
    last = batch.mask.cumsum(-1).argmax(-1)
    rewards = torch.zeros_like(batch.mask)
    rewards[torch.arange(len(batch.rows)), last] = torch.tensor([row.reward for row in batch.rows])
    names = batch.settings.reward_weights
    found, _ = core_algos.get_adv_estimator_fn(estimator)(
        token_level_rewards=rewards,
        response_mask=batch.mask,
        index=np.array([row.group_id for row in batch.rows]),
        config=Config(gamma=1.0, gdpo_reward_keys=[*names], gdpo_reward_weights=[*names.values()]),
        non_tensor_batch={
            name: np.array([row.components[name] for row in batch.rows]) for name in names
        },
        batch={
            "prompts": torch.zeros(len(batch.rows), 0),
            "attention_mask": (torch.arange(batch.mask.shape[1]) <= last[:, None]).long(),
        },
    )
    return found * batch.mask  # type: ignore[no-any-return]


class Config(SimpleNamespace):
    """Stands in for verl's configuration, which is read by attribute and by `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).double().norm() / other.double().norm())


def main() -> None:
    found = {}
    for name in LOSSES:
        batch = Batch(name)
        found[name] = difference(ours(batch) * batch.mask, verls(batch) * batch.mask)
    for name, estimator in ADVANTAGES.items():
        batch = Batch(name)
        own = batch.advantages.unsqueeze(-1) * batch.mask
        found[f"{name}, advantages"] = difference(own, verls_advantages(batch, estimator))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
