"""Makes one optimizer step from one batch.

Invariants: the gradient is that of the whole batch, whatever the micro-batches and the number of
ranks; a step whose logprobs differ too much from the delivered ones, or whose gradient is not
finite, changes nothing; `state()` returns everything that later steps depend on.

With several ranks each learns from its share of the rows. The weights of tokens were computed from
the whole batch, so the sums over the ranks are the batch's; FSDP takes the mean of the ranks'
gradients, so each rank's loss counts times their number. All ranks run as many forward passes as
the one with most, because each pass collects the layers' weights from all of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from .examples import Example, Padded, filler, longest_first, micro_batches
from .guard import SKIPPED, disagree
from .loss import LARGEST_LOG_RATIO, policy_loss
from .objectives import LossSettings, Schedule, rate_of
from .policy import Policy, tensors
from .ranks import Ranks, own_part, placed_like, whole

Numbers = dict[str, float | str]

_SAMPLED: Final = 1024
"""Weights of each parameter that are looked at after a step."""
_ENOUGH_TOKENS: Final = 256
"""So many tokens of the policy's own version are judged without those of earlier ones."""


@dataclass(frozen=True)
class StepSettings:
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    schedule_steps: int = 0
    least_rate: float = 0.0
    weight_decay: float = 0.0
    most_gradient: float = 1.0
    micro_batch_tokens: int = 16384
    packed: bool = False
    reduce_each: bool = False
    updates: int = 1
    most_mismatch: float | None = None
    loss: LossSettings = field(default_factory=LossSettings)


class Learner:
    """A policy and its optimizer (AdamW, arXiv 1711.05101)."""

    def __init__(self, policy: Policy, rules: StepSettings, ranks: Ranks | None = None) -> None:
        self.policy = policy
        self._rules = rules
        self._ranks = ranks or Ranks()
        self._optimizer = torch.optim.AdamW(
            list(policy.trained.values()),
            lr=rules.learning_rate,
            betas=(0.9, 0.99),
            weight_decay=rules.weight_decay,
        )
        self._updates = 0

    def step(self, examples: Sequence[Example]) -> Numbers:
        """Learns from `examples`; without examples the optimizer stays unchanged, and the result is
        empty.

        Returns loss, clip_fraction (and clip_low_fraction, clip_high_fraction, clip_dual_fraction),
        corrected_fraction, off_policy_fraction, ratio_mean, ratio_max, kl_sampling, entropy, kl
        (with a reference), gradient_norm (before clipping), learning_rate, weights_moved,
        mismatch_mean, mismatch_max, mismatch_kl, mismatch_ratio, mismatch_fresh; and why the step
        changed nothing as `skipped`.
        """
        if not examples:
            return {}
        with self._ranks.together("step", examples):
            return self._learn(examples)

    def _learn(self, examples: Sequence[Example]) -> Numbers:
        parts = self._own_parts(examples)
        before: list[Tensor | None] = [None for _ in parts]
        differences: Numbers = {}
        for update in range(self._rules.updates):
            sums, own, comparable = self._gradient(parts, before)
            if update == 0:
                differences = _mismatch(parts, comparable, self._ranks)
                before = list(own)
            numbers = self._stepped(sums, differences) | differences
            if SKIPPED in numbers:
                break
        return numbers

    def _own_parts(self, examples: Sequence[Example]) -> list[Padded]:
        rules, ranks, blank = self._rules, self._ranks, self.policy.blank
        rows = longest_first(examples)[ranks.rank :: ranks.size]
        parts = list(
            micro_batches(rows, rules.micro_batch_tokens, packed=rules.packed, blank=blank)
        )
        most = int(ranks.sums({"parts_max": len(parts)})["parts_max"])
        return parts + [filler(blank) for _ in range(most - len(parts))]

    def _gradient(
        self, parts: Sequence[Padded], before: Sequence[Tensor | None]
    ) -> tuple[list[dict[str, float]], list[Tensor], list[Tensor]]:
        """Adds up the gradient of all parts, and of all ranks after the last one.

        Returns sums of each part, the policy's logprobs, and those to compare with the delivered
        ones.
        """
        self._optimizer.zero_grad(set_to_none=True)
        sums, own, comparable = [], list[Tensor](), list[Tensor]()
        for part, proximal in zip(parts, before, strict=True):
            self.policy.gather_gradients(now=part is parts[-1] or self._rules.reduce_each)
            learn_entropy = self._rules.loss.entropy_weight > 0
            scores = self.policy.scores(part, learn_entropy=learn_entropy)
            entropy = scores.entropy if learn_entropy else None
            loss, numbers = self._loss(part, scores.logprobs, entropy, proximal)
            (loss * self._ranks.size).backward()
            numbers |= {
                "entropy": float(scores.entropy.detach().sum()),
                "loss": float(loss.detach()),
            }
            sums.append(dict.fromkeys(numbers, 0.0) if part.filler else numbers)
            own.append(scores.logprobs.detach())
            comparable.append(scores.as_delivered)
        return sums, own, comparable

    def _loss(
        self, part: Padded, logprobs: Tensor, entropies: Tensor | None, proximal: Tensor | None
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
            entropies=entropies,
        )

    def _stepped(self, sums: Sequence[dict[str, float]], differences: Numbers) -> Numbers:
        """Makes the optimizer's step, unless the data or the gradient forbid it."""
        rules = self._rules
        schedule = (rules.schedule, rules.schedule_steps, rules.least_rate)
        rate = rate_of(self._updates, rules.learning_rate, rules.warmup_steps, *schedule)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        weights = self.policy.trained.values()
        norm = float(whole(torch.nn.utils.clip_grad_norm_(weights, rules.most_gradient)))
        total = self._ranks.sums(_added(sums))
        numbers: Numbers = {
            "loss": total["loss"],
            **_means(total),
            "gradient_norm": norm,
            "learning_rate": rate,
        }
        if rules.most_mismatch is not None and disagree(differences, rules.most_mismatch):
            return {**numbers, SKIPPED: "mismatch"}
        if not math.isfinite(norm):
            return {**numbers, SKIPPED: "gradient"}
        before = self._sample()
        self._optimizer.step()
        self._updates += 1
        return numbers | _moved(before, self._sample(), self._ranks)

    def _sample(self) -> list[Tensor]:
        found = []
        for value in self.policy.trained.values():
            if value.grad is not None:
                some = own_part(value.grad).flatten()[:_SAMPLED].nonzero().squeeze(-1)
                found.append(own_part(value.detach()).flatten()[some].clone())
        return found

    def state(self) -> dict[str, Any]:
        """Weights, optimizer state by the weights' names, random number state and the number of
        updates; of divided tensors this rank's part."""
        numbers = self._optimizer.state_dict()["state"]
        return {
            "weights": self.policy.state(),
            "optimizer": {
                name: numbers[index]
                for index, name in enumerate(self.policy.trained)
                if index in numbers
            },
            "random": torch.get_rng_state(),
            "updates": self._updates,
        }

    def blank_state(self, stored: Collection[str]) -> dict[str, Any]:
        """Tensors for what a divided checkpoint has, to read it into; `stored`: its names, of which
        those of the optimizer begin with `optimizer.`."""
        moments = {"exp_avg", "exp_avg_sq"}
        return {
            "weights": self.policy.state(),
            "optimizer": {
                name: {
                    "step": torch.zeros(()),
                    **{key: torch.zeros_like(value.detach()) for key in moments},
                }
                for name, value in self.policy.trained.items()
                if f"optimizer.{name}.step" in stored
            },
            "random": torch.get_rng_state(),
            "updates": 0,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores a state of `state()`, of any number of ranks."""
        self.policy.load_state(state["weights"])
        names = list(self.policy.trained)
        stored = state["optimizer"]
        if "param_groups" in stored:  # written before 0.2, with the weights' indices
            stored = {names[index]: moments for index, moments in stored["state"].items()}
        numbers = {
            index: {
                key: placed_like(value, self.policy.trained[name])
                for key, value in stored[name].items()
            }
            for index, name in enumerate(names)
            if name in stored
        }
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": numbers, "param_groups": groups})
        torch.set_rng_state(state["random"])
        self._updates = state["updates"]


def _added(sums: Sequence[dict[str, float]]) -> dict[str, float]:
    """The sums of all micro-batches; of names that end in `_max` the largest value."""

    def added(name: str) -> float:
        values = [part[name] for part in sums]
        return max(values) if name.endswith("_max") else math.fsum(values)

    return {name: added(name) for name in sums[0]}


def _means(total: dict[str, float]) -> dict[str, float]:
    tokens = max(1.0, total["tokens"])
    return {
        "clip_fraction": total["clipped"] / tokens,
        "clip_low_fraction": total["clipped_low"] / tokens,
        "clip_high_fraction": total["clipped_high"] / tokens,
        "clip_dual_fraction": total["clipped_dual"] / tokens,
        "off_policy_fraction": total["off_policy"] / tokens,
        "corrected_fraction": total["corrected"] / tokens,
        "ratio_mean": total["ratio"] / tokens,
        "ratio_max": total["ratio_max"],
        "kl_sampling": total["kl_sampling"] / tokens,
        "kl": total["kl"] / tokens,
        "entropy": total["entropy"] / tokens,
    }


def _moved(before: Sequence[Tensor], after: Sequence[Tensor], ranks: Ranks) -> Numbers:
    """The share of weights that a step changed; a small step is lost in the rounding."""
    changed = sum(int((old != new).sum()) for old, new in zip(before, after, strict=True))
    total = ranks.sums({"weights": sum(len(weights) for weights in before), "changed": changed})
    return {"weights_moved": total["changed"] / total["weights"]} if total["weights"] else {}


def _mismatch(parts: Sequence[Padded], own: Sequence[Tensor], ranks: Ranks) -> Numbers:
    """Compares the policy's logprobs before the step with the delivered ones, on all ranks.

    Tokens of the policy's own version count, if there are enough; else all tokens. Differences d =
    own - delivered are bounded as in the loss, except for the maximum. `mismatch_ratio` is the mean
    of exp(d), `mismatch_kl` that of exp(d) - d - 1, an estimate of KL(engine || trainer);
    `mismatch_fresh` is the share of the policy's own version in what was compared.
    """
    fresh, rest = list[np.ndarray[Any, Any]](), list[np.ndarray[Any, Any]]()
    for part, logprobs in zip(parts, own, strict=True):
        if not part.filler:
            away = logprobs.cpu().double().numpy() - part.logprobs[:, part.first :]
            trained, new = part.mask[:, part.first :] == 1, part.fresh[:, part.first :] == 1
            fresh.append(away[trained & new])
            rest.append(away[trained & ~new])
    own_version = ranks.sums(_differences(fresh))
    judged = own_version
    if own_version["tokens"] < _ENOUGH_TOKENS:
        judged = ranks.sums(_differences([*fresh, *rest]))
    tokens = judged["tokens"]
    return {
        "mismatch_mean": judged["size"] / tokens,
        "mismatch_max": judged["size_max"],
        "mismatch_kl": judged["kl"] / tokens,
        "mismatch_ratio": judged["ratio"] / tokens,
        "mismatch_fresh": own_version["tokens"] / tokens,
    }


def _differences(parts: Iterable[np.ndarray[Any, Any]]) -> dict[str, float]:
    away = np.concatenate([np.zeros(0), *parts])
    bounded = np.clip(away, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return {
        "tokens": len(away),
        "size": float(np.abs(bounded).sum()),
        "size_max": float(np.abs(away).max(initial=0.0)),
        "kl": float((np.expm1(bounded) - bounded).sum()),
        "ratio": float(np.exp(bounded).sum()),
    }
