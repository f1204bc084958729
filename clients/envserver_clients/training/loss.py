"""The loss: policy gradient with clipped importance weights, token by token.

In: logprobs of the learning policy (with gradient), of the policy before this step (`proximal`) and
of the sampling policy (as delivered with each token, whatever its version), advantages and weights.
Out: the loss, which adds up over micro-batches, and statistics. What always holds: whatever was
delivered, the loss and its gradient are finite, because log-ratios are clamped to ±20.

Two ratios are kept apart. u = exp(logprob - proximal) is what this step changed. w = exp(proximal -
delivered) is how the policy before the step differs from the one that sampled: that one is some
versions older, and the engine computes slightly different numbers. w has no gradient, and it is
corrected first (`bounds.Correction`). With r = u * w and A the trajectory's advantage, the loss is

    - sum over tokens of  weight * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

(PPO, arXiv 1707.06347, equation 7; GRPO, arXiv 2402.03300, equation 3; two different bounds: DAPO's
"clip-higher", arXiv 2503.14476, equation 10). The gradient of a token is 0 where r has left the
bounds in the direction of A.

"Decoupled" (arXiv 2110.00641) bounds only what this step changes: w * min(u A, clip(u) A). This is
TRL's objective with `vllm_importance_sampling_correction`.

The distance to a reference policy is added for every trained token, also where A is 0; see
`bounds.KlForm`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .bounds import MOST_CORRECTION, KlForm, LossSettings

LARGEST_LOG_RATIO: Final = 20.0


def token_logprobs(logits: Tensor, targets: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Returns the logprob of each target.

    Args:
        logits: [B, N, V], those of the position before the target.
        targets: int64[B, N].
        temperatures: [B, N], by which the logits are divided; None: 1.

    Returns:
        float32[B, N].
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
) -> tuple[Tensor, dict[str, float]]:
    """Returns the loss of one micro-batch.

    Args:
        logprobs: [B, N], those of the learning policy.
        delivered: [B, N], those of the sampling policy; any value where mask is 0.
        mask: [B, N], 1 where the token is trained.
        advantages: [B], a row's, or [B, N], each token's.
        weights: [B], the weight of each token of a row.
        proximal: [B, N], those of the policy before this step; None: `logprobs` are.
        reference: [B, N], those of the reference policy; None: no such term.

    Returns:
        The loss, and sums over its tokens: `tokens`, `clipped`, `corrected` (w was masked or
        truncated), `ratio`, `kl_sampling` (from the sampling to the learning policy), `kl` (from
        the learning policy to the reference), and `ratio_max`.
    """
    trained = mask.bool()
    before = logprobs.detach() if proximal is None else proximal
    change = _ratio(logprobs - before, trained)
    origin = _ratio(before - delivered, trained)
    limited, kept = _corrected(origin, rules)
    ratio = change if rules.decoupled else change * limited
    advantage = advantages.unsqueeze(-1) if advantages.ndim == 1 else advantages
    bounded = ratio.clamp(1 - rules.clip_low, 1 + rules.clip_high)
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    if rules.dual_clip is not None:
        # A bad token that has become much likelier would decide the whole step (arXiv 1912.09729).
        gain = torch.where(advantage < 0, gain.maximum(rules.dual_clip * advantage), gain)
    cost = -gain * kept * (limited if rules.decoupled else 1.0)
    away = torch.zeros_like(ratio)
    if reference is not None:
        away = _distance(_bounded(reference - logprobs, trained), ratio, rules.kl_form)
        cost = cost + rules.kl_weight * away
    loss = (cost * mask * weights.unsqueeze(-1)).sum()
    with torch.no_grad():
        clipped = (ratio * advantage > bounded * advantage) & trained
        behind = _k3(_bounded(logprobs - delivered, trained))
        numbers = {
            "tokens": float(mask.sum()),
            "clipped": float(clipped.sum()),
            "corrected": float((((kept == 0) | (limited < origin)) & trained).sum()),
            "ratio": float((change * origin * mask).sum()),
            "ratio_max": float((change * origin * mask).max()),
            "kl_sampling": float((behind * mask).sum()),
            "kl": float((away * mask).sum()),
        }
    return loss, numbers


def _bounded(difference: Tensor, trained: Tensor) -> Tensor:
    """Returns a log-ratio within bounds, 0 where the token is not trained."""
    found = torch.where(trained, difference, 0.0)
    return found.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def _ratio(difference: Tensor, trained: Tensor) -> Tensor:
    return _bounded(difference, trained).exp()


def _corrected(origin: Tensor, rules: LossSettings) -> tuple[Tensor, Tensor]:
    """Returns w as it is used, and 1 where the token is kept (0: masked)."""
    kept = torch.ones_like(origin)
    if rules.correction == "none":
        return origin, kept
    most = rules.most_correction or MOST_CORRECTION[rules.correction]
    if rules.correction == "truncate":
        return origin.clamp(max=most), kept
    return origin, ((origin >= rules.least_correction) & (origin <= most)).to(origin.dtype)


def _distance(difference: Tensor, ratio: Tensor, form: KlForm) -> Tensor:
    """Returns the distance to the reference per token; see `KlForm`."""
    match form:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return _k3(difference)
        case "k3_ratio":
            return _k3(difference) * ratio


def _k3(difference: Tensor) -> Tensor:
    """Returns `exp(d) - d - 1`."""
    return difference.exp() - difference - 1
