"""Makes one optimizer step from one batch.

In: examples. Out: a policy that learned from them, and statistics of the step. What always holds:
the gradient is that of the whole batch, whatever the micro-batches; a step whose logprobs differ
too much from the delivered ones, or whose gradient is not finite, changes nothing; `state()`
returns everything that later steps depend on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from .bounds import LossSettings
from .examples import Example
from .guard import SKIPPED, disagree
from .loss import LARGEST_LOG_RATIO, policy_loss
from .padding import Padded, micro_batches
from .policy import Policy, tensors

Numbers = dict[str, float | str]

_SAMPLED: Final = 1024
"""Weights of each parameter that are looked at after a step."""
_ENOUGH_TOKENS: Final = 256
"""So many tokens of the policy's own version are judged without those of earlier ones."""


@dataclass(frozen=True)
class StepSettings:
    """Settings of a step; see the trainer's settings."""

    learning_rate: float = 1e-5
    warmup_steps: int = 0
    weight_decay: float = 0.0
    most_gradient: float = 1.0
    micro_batch_tokens: int = 16384
    updates: int = 1
    most_mismatch: float | None = None
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

    def step(self, examples: Sequence[Example]) -> Numbers:
        """Learns from `examples`; without examples the optimizer stays unchanged.

        Returns:
            loss, clip_fraction, corrected_fraction, ratio_mean, ratio_max, kl_sampling, kl (with a
            reference), gradient_norm (before clipping), learning_rate, weights_moved,
            mismatch_mean, mismatch_max, mismatch_kl, mismatch_ratio, mismatch_fresh; and why the
            step changed nothing as `skipped`.
            Empty without examples.
        """
        if not examples:
            return {}
        parts = list(micro_batches(examples, self._rules.micro_batch_tokens))
        before: list[Tensor | None] = [None for _ in parts]
        differences: Numbers = {}
        for update in range(self._rules.updates):
            sums, own, comparable = self._gradient(parts, before)
            if update == 0:
                differences = _mismatch(parts, comparable)
                before = list(own)
            numbers = self._stepped(sums, differences) | differences
            if SKIPPED in numbers:
                break
        return numbers

    def _gradient(
        self, parts: Sequence[Padded], before: Sequence[Tensor | None]
    ) -> tuple[list[dict[str, float]], list[Tensor], list[Tensor]]:
        """Adds up the gradient of all parts.

        Returns:
            Their sums, the policy's logprobs, and those to compare with the delivered ones.
        """
        self._optimizer.zero_grad(set_to_none=True)
        sums, own, comparable = [], list[Tensor](), list[Tensor]()
        for part, proximal in zip(parts, before, strict=True):
            logprobs, as_delivered = self.policy.both_logprobs(part)
            loss, numbers = self._loss(part, logprobs, proximal)
            loss.backward()
            sums.append({**numbers, "loss": float(loss.detach())})
            own.append(logprobs.detach())
            comparable.append(as_delivered)
        return sums, own, comparable

    def _loss(
        self, part: Padded, logprobs: Tensor, proximal: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        delivered, mask, advantages, weights = tensors(part, self.policy.device)
        if part.raw.any():
            # Those of the distribution that was sampled from were not delivered, but the policy of
            # before this step sampled these tokens, so they are its own.
            raw = torch.from_numpy(part.raw[:, part.first :]).to(self.policy.device).bool()
            before = logprobs.detach() if proximal is None else proximal
            delivered = torch.where(raw, before, delivered)
        has_reference = self._rules.loss.kl_weight > 0
        return policy_loss(
            logprobs,
            delivered,
            mask,
            advantages,
            weights,
            self._rules.loss,
            proximal=proximal,
            reference=self.policy.reference_logprobs(part) if has_reference else None,
        )

    def _stepped(self, sums: Sequence[dict[str, float]], differences: Numbers) -> Numbers:
        """Makes the optimizer's step, unless the data or the gradient forbid it."""
        rate = self._rate()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = float(
            torch.nn.utils.clip_grad_norm_(self.policy.trained.values(), self._rules.most_gradient)
        )
        numbers: Numbers = {
            "loss": math.fsum(part["loss"] for part in sums),
            **_means(sums),
            "gradient_norm": norm,
            "learning_rate": rate,
        }
        most = self._rules.most_mismatch
        if most is not None and disagree(differences, most):
            return {**numbers, SKIPPED: "mismatch"}
        if not math.isfinite(norm):
            return {**numbers, SKIPPED: "gradient"}
        before = self._sample()
        self._optimizer.step()
        self._updates += 1
        return numbers | _moved(before, self._sample())

    def _sample(self) -> list[Tensor]:
        """Returns some weights of each parameter, those that have a gradient."""
        found = []
        for value in self.policy.trained.values():
            if value.grad is not None:
                some = value.grad.flatten()[:_SAMPLED].nonzero().squeeze(-1)
                found.append(value.detach().flatten()[some].clone())
        return found

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
        "corrected_fraction": mean("corrected"),
        "ratio_mean": mean("ratio"),
        "ratio_max": max(part["ratio_max"] for part in sums),
        "kl_sampling": mean("kl_sampling"),
        "kl": mean("kl"),
    }


def _moved(before: Sequence[Tensor], after: Sequence[Tensor]) -> Numbers:
    """Returns the share of weights that a step changed; a small step is lost in the rounding."""
    weights = sum(len(one) for one in before)
    if not weights:
        return {}
    changed = sum(int((one != two).sum()) for one, two in zip(before, after, strict=True))
    return {"weights_moved": changed / weights}


def _mismatch(parts: Sequence[Padded], own: Sequence[Tensor]) -> Numbers:
    """Compares the policy's logprobs before the step with the delivered ones.

    Tokens of the policy's own version count, if there are enough; else all tokens. Differences d =
    own - delivered are bounded as in the loss, except for the maximum. `mismatch_ratio` is the mean
    of exp(d), `mismatch_kl` that of exp(d) - d - 1, an estimate of KL(engine || trainer);
    `mismatch_fresh` is the share of the policy's own version in what was compared.
    """
    fresh, rest = list[np.ndarray[Any, Any]](), list[np.ndarray[Any, Any]]()
    for part, logprobs in zip(parts, own, strict=True):
        away = logprobs.cpu().double().numpy() - part.logprobs[:, part.first :]
        trained, new = part.mask[:, part.first :] == 1, part.fresh[:, part.first :] == 1
        fresh.append(away[trained & new])
        rest.append(away[trained & ~new])
    judged = own_version = np.concatenate(fresh)
    if len(judged) < _ENOUGH_TOKENS:
        judged = np.concatenate([own_version, *rest])
    bounded = np.clip(judged, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return {
        "mismatch_mean": float(np.abs(bounded).mean()),
        "mismatch_max": float(np.abs(judged).max()),
        "mismatch_kl": float((np.expm1(bounded) - bounded).mean()),
        "mismatch_ratio": float(np.exp(bounded).mean()),
        "mismatch_fresh": len(own_version) / len(judged),
    }
