"""The loss: policy gradient with bounded importance weights, for every objective of `objectives`.

In: logprobs of the learning policy (with gradient), of the policy before this step (`proximal`) and
of the sampling policy (as delivered with each token, whatever its version), advantages and weights.
Out: the loss, which adds up over micro-batches and ranks, and sums for the metrics. Invariants:
nothing is divided by a number of the micro-batch, because weights were computed from the whole
batch; whatever was delivered, the loss and its gradient are finite, because log-ratios are clamped
to ±20.

Two ratios are kept apart. u = exp(logprob - proximal) is what this step changed. w = exp(proximal -
delivered) is how the policy before the step differs from the one that sampled: that one is some
versions older, and the engine computes slightly different numbers. w has no gradient, and it is
corrected first (`bounds.Correction`). With r = u * w and A the token's advantage, the loss is

    - sum over tokens of  weight * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

(PPO, arXiv 1707.06347, equation 7; GRPO, arXiv 2402.03300, equation 3; two different bounds: DAPO's
"clip-higher", arXiv 2503.14476, equation 10). The gradient of a token is 0 where r has left the
bounds in the direction of A. Where A < 0, `dual_clip` is the maximum of r (arXiv 1912.09729;
INTELLECT-2, arXiv 2505.07291: the two forms are one above 1 + clip_high).

"Decoupled" (arXiv 2110.00641) bounds only what this step changes: w * min(u A, clip(u) A). This is
TRL's objective with `vllm_importance_sampling_correction`.

With `ratio_level` sequence r is the geometric mean over the trained tokens of the row, s, with the
gradient of each token's own logprob (GSPO, arXiv 2507.18071, equations 7 and 13). With
`correction_level` sequence w is the product over them. `off_policy_bound` leaves out rows with A <
0 whose mean of delivered - logprob is above it (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

The distance to a reference policy is added for every trained token, also where A is 0; see
`bounds.KlForm`. The entropy of each token's distribution is subtracted, weighed like the rest.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .objectives import KlForm, LossSettings

LARGEST_LOG_RATIO: Final = 20.0


def token_logprobs(logits: Tensor, targets: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """The logprob of each target, float32[...], from the logits [..., V] of the position before it.

    `targets`: int64[...]. The logits are divided by `temperatures` [...]; None: 1.
    """
    logits = logits.float()
    if temperatures is not None:
        logits = logits / temperatures.unsqueeze(-1)
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(-1)


def policy_loss(
    logprobs: Tensor,
    delivered: Tensor,
    mask: Tensor,
    advantages: Tensor,
    weights: Tensor,
    rules: LossSettings,
    *,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    entropies: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Returns the loss of one micro-batch, each of whose B rows is one sequence.

    Args:
        logprobs: [B, N], those of the learning policy.
        delivered: [B, N], those of the sampling policy; any value where mask is 0.
        mask: [B, N], 1 where the token is trained.
        advantages: [B], a row's, or [B, N], each token's.
        weights: [B], the weight of each token of a row.
        proximal: [B, N], those of the policy before this step; None: `logprobs` are.
        reference: [B, N], those of the reference policy; None: no such term.
        entropies: [B, N], of the learning policy's distributions; None: no such term.

    Returns:
        The loss, and sums over its trained tokens: `tokens` (their number), `clipped_low` and
        `clipped_high` (bounded because r is below or above), `clipped` (either), `clipped_dual`,
        `corrected` (w was masked or truncated), `off_policy` (left out with their row), `ratio`,
        `kl_sampling` (from the sampling to the learning policy), `kl` (from the learning policy to
        the reference), and `ratio_max`.
    """
    trained = mask.bool()
    before = logprobs.detach() if proximal is None else proximal
    advantage = advantages.unsqueeze(-1) if advantages.ndim == 1 else advantages
    change = _bounded(logprobs - before, trained)
    origin = _bounded(before - delivered, trained)
    limited, kept, beyond = _corrected(origin, rules)
    ratio = _ratio(change if rules.decoupled else change + limited.log(), mask, rules)
    on_policy = _on_policy(logprobs.detach() - delivered, mask, advantage, rules)
    gain, clipped = _surrogate(ratio, logprobs, advantage, rules)
    cost = -gain * kept * on_policy * (limited if rules.decoupled else 1.0)
    away = torch.zeros_like(ratio)
    if reference is not None:
        away = _distance(_bounded(reference - logprobs, trained), ratio, rules.kl_form)
        cost = cost + rules.kl_weight * away
    if entropies is not None:
        cost = cost - rules.entropy_weight * entropies
    loss = (torch.where(trained, cost, 0.0) * weights.unsqueeze(-1)).sum()
    with torch.no_grad():
        learned = _bounded(logprobs - delivered, trained)
        counted = {
            **clipped,
            "clipped": clipped["clipped_low"] | clipped["clipped_high"],
            "corrected": beyond,
            "off_policy": on_policy == 0,
            "ratio": learned.exp(),
            "kl_sampling": _k3(learned),
            "kl": away,
        }
        numbers = {name: float((value * mask).sum()) for name, value in counted.items()}
        numbers["tokens"] = float(mask.sum())
        numbers["ratio_max"] = float((learned.exp() * mask).max())
    return loss, numbers


def _surrogate(
    ratio: Tensor, logprobs: Tensor, advantage: Tensor, rules: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the surrogate of each token's reward (see `Surrogate`), and where it is bounded."""
    least, most = 1 - rules.clip_low, 1 + rules.clip_high
    bounded = ratio.clamp(least, most)
    if rules.surrogate == "cispo":
        gain = bounded.detach() * advantage * logprobs
        low, high, dual = ratio < least, ratio > most, torch.zeros_like(ratio, dtype=torch.bool)
        return gain, {"clipped_low": low, "clipped_high": high, "clipped_dual": dual}
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    low, high = (ratio < least) & (advantage < 0), (ratio > most) & (advantage > 0)
    dual = torch.zeros_like(low)
    if rules.dual_clip is not None:
        # A bad token that has become much likelier would decide the whole step.
        dual = (ratio > rules.dual_clip) & (advantage < 0)
        gain = torch.where(advantage < 0, gain.maximum(rules.dual_clip * advantage), gain)
    return gain, {"clipped_low": low, "clipped_high": high, "clipped_dual": dual}


def _ratio(logs: Tensor, mask: Tensor, rules: LossSettings) -> Tensor:
    """The ratio [B, N] of log-ratios, at the level of `rules`."""
    if rules.ratio_level == "token":
        return logs.exp()
    # The value is the row's mean, the gradient each token's own (GSPO-token, equation 14).
    return (_row_mean(logs.detach(), mask) + logs - logs.detach()).exp()


def _on_policy(difference: Tensor, mask: Tensor, advantage: Tensor, rules: LossSettings) -> Tensor:
    """0 for bad tokens of rows that the policy has moved away from, else 1."""
    if rules.off_policy_bound is None:
        return torch.ones_like(difference)
    moved = _row_mean(_bounded(-difference, mask.bool()), mask) > rules.off_policy_bound
    return 1.0 - (moved & (advantage < 0)).to(difference.dtype).expand_as(difference)


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean [B, 1] over the trained tokens of each row."""
    return (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)


def _bounded(difference: Tensor, trained: Tensor) -> Tensor:
    """A log-ratio within bounds, 0 where the token is not trained."""
    found = torch.where(trained, difference, 0.0)
    return found.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def _corrected(logs: Tensor, rules: LossSettings) -> tuple[Tensor, Tensor, Tensor]:
    """w of log-ratios as it is used, 1 where the token is kept (0: masked), and whether w was
    beyond its bounds."""
    if rules.correction_level == "sequence":
        logs = logs.sum(-1, keepdim=True).expand_as(logs)
        logs = logs.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    origin = logs.exp()
    beyond = origin > rules.upper_correction
    if rules.correction == "mask":
        beyond = beyond | (origin < rules.least_correction)
        return origin, 1.0 - beyond.to(origin.dtype), beyond
    return origin.clamp(max=rules.upper_correction), torch.ones_like(origin), beyond


def _distance(difference: Tensor, ratio: Tensor, form: KlForm) -> Tensor:
    """The distance to the reference per token; see `KlForm`."""
    match form:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return _k3(difference)
        case "k3_ratio":
            return _k3(difference) * ratio
        case "k3+":
            slope = difference.square() / 2
            return _k3(difference).detach() + slope - slope.detach()


def _k3(difference: Tensor) -> Tensor:
    return difference.exp() - difference - 1
