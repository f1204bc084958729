"""The loss: policy gradient with clipped importance weights, token by token.

In: logprobs of the learning policy (with gradient) and of the sampling policy (as delivered with
each token, whatever its version), advantages and weights. Out: the loss, which adds up over
micro-batches, and statistics.

With r = exp(logprob - delivered logprob) of a token and A its trajectory's advantage, the loss is

    - sum over tokens of  weight * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

(PPO, arXiv 1707.06347, equation 7; GRPO, arXiv 2402.03300, equation 3; two different bounds: DAPO's
"clip-higher", arXiv 2503.14476, equation 10). The gradient of a token is 0 where r has left the
bounds in the direction of A.

If the sampling policy is some versions behind, or the engine computes slightly different numbers,
the two purposes of r can be separated ("decoupled", arXiv 2110.00641): the size of the update is
bounded relative to the policy before the update (`proximal`), and the different origin of the
tokens is corrected by a weight, exp(proximal - delivered), limited to `most_correction` (truncated
importance sampling).

The distance to a reference policy is `exp(d) - d - 1` with d = reference - logprob: it is never
negative, and its mean is the KL divergence (arXiv 2402.03300, equation 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossSettings:
    """The bounds of an update; see the trainer's settings."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_weight: float = 0.0
    most_correction: float = 2.0


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the logprob of each target.

    Args:
        logits: [B, N, V], those of the position before the target.
        targets: int64[B, N].

    Returns:
        float32[B, N].
    """
    logits = logits.float()
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
        advantages, weights: [B], a row's advantage, and the weight of each of its tokens.
        proximal: [B, N], those of the policy before this update; None: not decoupled.
        reference: [B, N], those of the reference policy; None: no such term.

    Returns:
        The loss, and sums over its tokens: `tokens`, `clipped`, `ratio`, `kl_sampling` (from the
        sampling to the learning policy), `kl` (from the learning policy to the reference), and
        `ratio_max`.
    """
    trained = mask.bool()
    base = delivered if proximal is None else proximal
    # 0 at untrained tokens: a large difference there would overflow, and inf * 0 is nan.
    ratio = torch.where(trained, logprobs - base, 0.0).exp()
    advantage = advantages.unsqueeze(-1)
    bounded = ratio.clamp(1 - rules.clip_low, 1 + rules.clip_high)
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    if proximal is not None:
        correction = torch.where(trained, proximal - delivered, 0.0).exp()
        gain = gain * correction.clamp(max=rules.most_correction)
    cost = -gain
    away = torch.zeros_like(ratio)
    if reference is not None:
        away = _distance(torch.where(trained, reference - logprobs, 0.0))
        cost = cost + rules.kl_weight * away
    loss = (cost * mask * weights.unsqueeze(-1)).sum()
    with torch.no_grad():
        clipped = (ratio * advantage > bounded * advantage) & trained
        behind = _distance(torch.where(trained, logprobs - delivered, 0.0))
        numbers = {
            "tokens": float(mask.sum()),
            "clipped": float(clipped.sum()),
            "ratio": float((ratio * mask).sum()),
            "ratio_max": float((ratio * mask).max()),
            "kl_sampling": float((behind * mask).sum()),
            "kl": float((away * mask).sum()),
        }
    return loss, numbers


def _distance(difference: Tensor) -> Tensor:
    """Returns `exp(d) - d - 1`."""
    return difference.exp() - difference - 1
