"""The loss's settings, and objectives by name: presets of them, described in objectives.toml.

In: names, joined by `+`: `dapo+tis`. Out: values of the trainer's settings. Invariants: a
preset only fills in settings that are not given, and all of them can be given; of two presets, the
later one takes precedence. What a preset does not set keeps its default, also the bound on tokens
whose delivered logprob is not the engine's (`correction`), unless the preset is about that.

Notation: r = exp(logprob - old logprob) of a token, w = exp(old logprob - engine's logprob), A its
advantage, |y| the trained tokens of a trajectory, sg: no gradient.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from envserver_records import ConfigError

Preset = dict[str, Any]
"""Values by the names of the trainer's settings."""


def _presets() -> dict[str, Preset]:
    presets: dict[str, Preset] = {}
    table = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    for name, own in tomllib.loads(table).items():
        known = presets.get(own.pop("like", ""), {})
        presets[name] = {**known, **dict.fromkeys(own.pop("unset", ())), **own}
    return presets


OBJECTIVES: Final[dict[str, Preset]] = _presets()


def preset(names: str) -> Preset:
    """Returns the settings of the named objectives, joined by `+`. Raises ConfigError: there is no
    such objective."""
    chosen: Preset = {}
    for name in names.split("+"):
        if name not in OBJECTIVES:
            raise ConfigError(
                f"There is no objective {name!r}.", hint=f"There are: {', '.join(OBJECTIVES)}."
            )
        chosen |= OBJECTIVES[name]
    return chosen


KlForm = Literal["k1", "k2", "k3", "k3_ratio", "k3+"]
"""The estimate of the KL divergence to the reference, per token, with d = reference - logprob.

k1: -d. k2: d²/2. k3: exp(d) - d - 1, which is never negative (GRPO, arXiv 2402.03300, equation 4).
All three are from http://joschu.net/blog/kl-approx.html. k3_ratio: k3 times the importance ratio,
so that its gradient is that of the KL divergence (DeepSeek-V3.2, arXiv 2512.02556; TRL's default,
`use_bias_correction_kl`). k3+: the value of k3 with the gradient of k2, which is that of the KL
divergence in expectation (verl's)."""

Surrogate = Literal["clip", "cispo"]
"""The form of the loss, with the ratio r and the advantage A of a token.

clip: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347, equation 7).
cispo: clip(r, 1 - clip_low, 1 + clip_high) A logprob, without a gradient through r: every token
keeps one (CISPO, MiniMax-M1, arXiv 2506.13585, equations 4 and 5)."""

Level = Literal["token", "sequence"]

Correction = Literal["mask", "truncate", "none"]
"""Treatment of tokens, or rows, whose w is far from 1.

mask: those with w outside [least_correction, most_correction] are not learned from (IcePop, arXiv
2510.18855). truncate: w is at most `most_correction` (truncated importance
sampling). none: w is used as it is."""

MOST_CORRECTION: Final[dict[Correction, float]] = {"mask": 5.0, "truncate": 2.0}
"""The usual upper bound of w."""


@dataclass(frozen=True)
class LossSettings:
    """The settings of the loss. Raises ConfigError: two of them contradict each other."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    surrogate: Surrogate = "clip"
    ratio_level: Level = "token"
    decoupled: bool = False
    correction: Correction = "mask"
    correction_level: Level = "token"
    least_correction: float = 0.5
    most_correction: float | None = None
    off_policy_bound: float | None = None
    kl_weight: float = 0.0
    kl_form: KlForm = "k3"
    entropy_weight: float = 0.0

    def __post_init__(self) -> None:
        for problem, hint in self._contradictions():
            raise ConfigError(problem, hint=hint)

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        if self.dual_clip is not None and self.surrogate == "cispo":
            yield "dual_clip is not for CISPO, which bounds every ratio.", "Lower clip_high."
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            least = 1 + self.clip_high
            yield (
                f"dual_clip ({self.dual_clip:g}) is not above 1 + clip_high ({least:g}).",
                "The usual value is 3.",
            )
        if self.correction == "mask" and self.least_correction >= self.upper_correction:
            yield (
                f"least_correction ({self.least_correction:g}) is not below most_correction "
                f"({self.upper_correction:g}), so nothing would be learned from.",
                "The usual values are 0.5 and 5.",
            )
        if self.correction_level == "sequence" and not self.decoupled:
            yield (
                "correction_level sequence needs decoupled: the ratio of a token cannot contain "
                "that of its whole row.",
                "Add --decoupled, or correct token by token.",
            )
        if self.kl_form == "k3_ratio" and self.kl_weight > 0 and self.ratio_level != "token":
            yield (
                "kl_form k3_ratio needs ratio_level token: the KL divergence is a token's.",
                "Choose --kl-form k3 or k2.",
            )

    @property
    def upper_correction(self) -> float:
        """Maximum of w, infinite without a correction."""
        return self.most_correction or MOST_CORRECTION.get(self.correction, math.inf)

    @property
    def is_reward_only(self) -> bool:
        """Whether a token whose advantage is 0 changes nothing."""
        return not (self.kl_weight or self.entropy_weight)


Schedule = Literal["constant", "linear", "cosine"]
"""The learning rate after the warm-up: as it is, or falling to a least one in a line or in half a
cosine wave (arXiv 1608.03983, equation 5)."""


def rate_of(
    update: int, highest: float, warmup: int, schedule: Schedule, last: int, least: float
) -> float:
    """The learning rate of an `update`, counted from 0.

    It rises in a line to `highest` over `warmup` updates; from update `last` on it is `least`.
    """
    if update < warmup:
        return highest * (update + 1) / warmup
    done = min(1.0, (update - warmup) / max(1, last - warmup))
    match schedule:
        case "constant":
            return highest
        case "linear":
            left = 1 - done
        case "cosine":
            left = (1 + math.cos(math.pi * done)) / 2
    return least + (highest - least) * left
