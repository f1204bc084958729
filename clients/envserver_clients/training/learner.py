"""Makes one optimizer step from one batch.

In: examples. Out: a policy that learned from them, and statistics of the step. What always holds:
the gradient is that of the whole batch, whatever the micro-batches; `state()` returns everything
that later steps depend on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .examples import Example
from .loss import LossSettings, policy_loss
from .padding import Padded, micro_batches
from .policy import Policy, tensors


@dataclass(frozen=True)
class StepSettings:
    """Settings of a step; see the trainer's settings."""

    learning_rate: float = 1e-5
    warmup_steps: int = 0
    weight_decay: float = 0.0
    most_gradient: float = 1.0
    micro_batch_tokens: int = 16384
    updates: int = 1
    decoupled: bool = False
    loss: LossSettings = field(default_factory=LossSettings)


class Learner:
    """A policy and its optimizer (AdamW, arXiv 1711.05101)."""

    def __init__(self, policy: Policy, rules: StepSettings) -> None:
        self.policy = policy
        self._rules = rules
        self._optimizer = torch.optim.AdamW(
            list(policy.trained.values()),
            lr=rules.learning_rate,
            betas=(0.9, 0.99),
            weight_decay=rules.weight_decay,
        )
        self._updates = 0

    def step(self, examples: Sequence[Example]) -> dict[str, float]:
        """Learns from `examples`; without examples the optimizer stays unchanged.

        Returns:
            loss, clip_fraction, ratio_mean, ratio_max, kl_sampling, kl (with a reference),
            gradient_norm (before clipping), learning_rate; empty without examples.
        """
        if not examples:
            return {}
        parts = list(micro_batches(examples, self._rules.micro_batch_tokens))
        before = [self._before(part) for part in parts]
        for _ in range(self._rules.updates):
            numbers = self._update(parts, before)
        return numbers

    def _before(self, part: Padded) -> torch.Tensor | None:
        """Returns the logprobs of the policy before the step, if bounds are relative to it."""
        if not self._rules.decoupled:
            return None
        with torch.no_grad():
            return self.policy.logprobs(part)

    def _update(
        self, parts: Sequence[Padded], before: Sequence[torch.Tensor | None]
    ) -> dict[str, float]:
        self._optimizer.zero_grad(set_to_none=True)
        losses, sums = 0.0, list[dict[str, float]]()
        for part, proximal in zip(parts, before, strict=True):
            loss, numbers = self._loss(part, proximal)
            loss.backward()
            losses += float(loss.detach())
            sums.append(numbers)
        rate = self._rate()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(
            self.policy.trained.values(), self._rules.most_gradient, error_if_nonfinite=True
        )
        self._optimizer.step()
        self._updates += 1
        return {
            "loss": losses,
            **_means(sums),
            "gradient_norm": float(norm),
            "learning_rate": rate,
        }

    def _loss(
        self, part: Padded, proximal: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        delivered, mask, advantages, weights = tensors(part, self.policy.device)
        has_reference = self._rules.loss.kl_weight > 0
        return policy_loss(
            self.policy.logprobs(part),
            delivered,
            mask,
            advantages,
            weights,
            self._rules.loss,
            proximal=proximal,
            reference=self.policy.reference_logprobs(part) if has_reference else None,
        )

    def _rate(self) -> float:
        """Returns the learning rate: linear warm-up, then constant."""
        risen = (self._updates + 1) / max(1, self._rules.warmup_steps)
        return self._rules.learning_rate * min(1.0, risen)

    def state(self) -> dict[str, Any]:
        """Returns weights, optimizer state, random number state and the number of updates."""
        return {
            "weights": self.policy.state(),
            "optimizer": self._optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "updates": self._updates,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores a state of `state()`."""
        self.policy.load_state(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self._updates = state["updates"]


def _means(sums: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns means per trained token over all micro-batches."""
    tokens = max(1.0, math.fsum(part["tokens"] for part in sums))

    def mean(name: str) -> float:
        return math.fsum(part[name] for part in sums) / tokens

    return {
        "clip_fraction": mean("clipped"),
        "ratio_mean": mean("ratio"),
        "ratio_max": max(part["ratio_max"] for part in sums),
        "kl_sampling": mean("kl_sampling"),
        "kl": mean("kl"),
    }
