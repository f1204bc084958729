"""The bounds of an update by name, without torch; `loss` has the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

KlForm = Literal["k1", "k2", "k3", "k3_ratio"]
"""The estimate of the KL divergence to the reference, per token, with d = reference - logprob.

k1: -d. k2: d²/2. k3: exp(d) - d - 1, which is never negative (GRPO, arXiv 2402.03300, equation 4).
All three are from http://joschu.net/blog/kl-approx.html. k3_ratio: k3 times the importance ratio,
so that its gradient is that of the KL divergence (DeepSeek-V3.2, arXiv 2512.02556; TRL's default,
`use_bias_correction_kl`)."""

Correction = Literal["mask", "truncate", "none"]
"""Treatment of tokens whose w is far from 1.

mask: tokens with w outside [least_correction, most_correction] are not learned from (IcePop, arXiv
2510.18855). truncate: w is at most `most_correction` (truncated importance
sampling). none: w is used as it is."""

MOST_CORRECTION: Final[dict[Correction, float]] = {"mask": 5.0, "truncate": 2.0}
"""The usual upper bound of w."""


@dataclass(frozen=True)
class LossSettings:
    """The bounds of an update; see the trainer's settings."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    decoupled: bool = False
    correction: Correction = "mask"
    least_correction: float = 0.5
    most_correction: float | None = None
    kl_weight: float = 0.0
    kl_form: KlForm = "k3"
