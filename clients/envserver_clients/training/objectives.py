"""Objectives by name: each is a preset of settings, with its paper and formula.

In: names, joined by `+`: `dapo+tis`. Out: values of the trainer's settings. What always holds: a
preset only fills in settings that are not given, and all of them can be given; of two presets, the
later one takes precedence. What a preset does not set keeps its default, also the bound on tokens
whose delivered logprob is not the engine's (`correction`), unless the preset is about that.

Notation: r = exp(logprob - old logprob) of a token, w = exp(old logprob - engine's logprob), A its
advantage, |y| the trained tokens of a trajectory, sg: no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from envserver_records import ConfigError

Preset = dict[str, Any]
"""Values by the names of the trainer's settings."""

_GROUP: Final[Preset] = {"baseline": "group", "advantage": "std", "whiten": False}
_CLIP: Final[Preset] = {"surrogate": "clip", "ratio_level": "token", "dual_clip": None}
_GRPO: Final[Preset] = {**_GROUP, **_CLIP, "clip_low": 0.2, "clip_high": 0.2}


def grpo() -> Preset:
    """GRPO (DeepSeekMath, arXiv 2402.03300, equation 3).

    -mean over trajectories of 1/|y| sum min(r A, clip(r, 1-.2, 1+.2) A), A = (R - mean) / std.
    """
    return {**_GRPO, "denominator": "trajectory"}


def dr_grpo() -> Preset:
    """Dr. GRPO (arXiv 2503.20783, section 3.2).

    -mean over trajectories of 1/constant sum min(r A, clip(r) A), A = R - mean.
    """
    return {**_GRPO, "advantage": "mean", "denominator": "constant"}


def dapo() -> Preset:
    """DAPO (arXiv 2503.14476, equation 8): a higher upper bound, and equal weight per token.

    -1/tokens sum min(r A, clip(r, 1-.2, 1+.28) A) over groups whose rewards differ. The server
    makes more of these groups (dynamic sampling). Trajectories that were cut off are left out;
    `overlong_tokens` turns on the soft penalty of equation 13.
    """
    return {
        **_GRPO,
        "clip_high": 0.28,
        "denominator": "token",
        "skip_equal": True,
        "learn_truncated": False,
    }


def gspo() -> Preset:
    """GSPO (arXiv 2507.18071, equations 5 to 7).

    -mean over trajectories of min(s A, clip(s, 1-3e-4, 1+4e-4) A), s = exp(mean of log r).
    """
    bounds = {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}
    return {**_GRPO, **bounds, "denominator": "trajectory"}


def cispo() -> Preset:
    """CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5).

    -1/tokens sum sg(min(r, 5)) A logprob: no token loses its gradient. There is no lower bound.
    """
    bounds = {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0}
    return {**_GRPO, **bounds, "denominator": "token"}


def rloo() -> Preset:
    """RLOO (arXiv 2402.14740, as TRL and verl cite it), with PPO's bounds.

    A = R - mean of the other trajectories of the group; -mean over trajectories of sum min(..) / a
    constant, as in the paper up to that constant.
    """
    own = {"baseline": "leave_one_out", "advantage": "mean", "denominator": "constant"}
    return {**_GRPO, **own}


def reinforce_pp() -> Preset:
    """REINFORCE++ (arXiv 2501.03262).

    A = (R - mean) / std, both over the tokens of the batch, not the group;
    -1/tokens sum min(r A, clip(r) A). The paper subtracts the KL divergence from the reward of each
    token; here `kl_weight` adds it to the loss.
    """
    own = {"baseline": "none", "advantage": "mean", "whiten": True, "denominator": "token"}
    return {**_GRPO, **own}


def reinforce_pp_baseline() -> Preset:
    """REINFORCE++-baseline (arXiv 2501.03262).

    A = (R - mean of the group), whitened over the batch; the KL divergence, if any, as k2.
    """
    return {**reinforce_pp(), "baseline": "group", "kl_form": "k2"}


def gdpo() -> Preset:
    """GDPO (arXiv 2601.05242), for several named rewards (`reward_weights`).

    A = sum of weight (R_k - mean_k) / std_k over the rewards k, whitened over the batch: over its
    tokens, as the authors' verl code does (TRL: over its rows).
    """
    return {**_GRPO, "whiten": True, "denominator": "trajectory"}


def dual_clip() -> Preset:
    """Dual-clip PPO (arXiv 1912.09729); two-sided GRPO (INTELLECT-2, 2505.07291).

    Where A < 0: max(min(r A, clip(r) A), 3 A), so a bad token weighs at most three times.
    """
    return {"dual_clip": 3.0}


def tis() -> Preset:
    """Truncated importance sampling (https://fengyao.notion.site/off-policy-rl).

    Each token's loss, bounded relative to the policy before the step, times min(w, 2).
    """
    return {
        "decoupled": True,
        "correction": "truncate",
        "correction_level": "token",
        "most_correction": 2.0,
    }


def icepop() -> Preset:
    """IcePop (Ring-1T, arXiv 2510.18855).

    Each token's loss times w, and 0 where w is outside [.5, 5].
    """
    return {
        "decoupled": True,
        "correction": "mask",
        "correction_level": "token",
        "least_correction": 0.5,
        "most_correction": 5.0,
    }


def sequence_tis() -> Preset:
    """Truncated importance sampling of whole rows (https://richardli.xyz/rl-collapse).

    Each row's loss times min(product of w over its tokens, 2).
    """
    return {**tis(), "correction_level": "sequence"}


def sequence_mis() -> Preset:
    """Masked importance sampling of whole rows (https://richardli.xyz/rl-collapse).

    Each row's loss times the product of w over its tokens, and 0 where that is above 3.
    """
    bounds = {"least_correction": 0.0, "most_correction": 3.0}
    return {**icepop(), "correction_level": "sequence", **bounds}


def opsm() -> Preset:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

    A row is left out where A < 0 and the mean of (engine's logprob - logprob) is above .5.
    """
    return {"off_policy_bound": 0.5}


OBJECTIVES: Final[dict[str, Callable[[], Preset]]] = {
    one.__name__: one
    for one in (
        *(grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp, reinforce_pp_baseline, gdpo),
        *(dual_clip, tis, icepop, sequence_tis, sequence_mis, opsm),
    )
}
"""Presets by name."""


def preset(names: str) -> Preset:
    """Returns what the named objectives set.

    Args:
        names: one, or several joined by `+`.

    Raises:
        ConfigError: there is no such objective.
    """
    chosen: Preset = {}
    for name in names.split("+"):
        if name not in OBJECTIVES:
            raise ConfigError(
                f"There is no objective {name!r}.", hint=f"There are: {', '.join(OBJECTIVES)}."
            )
        chosen |= OBJECTIVES[name]()
    return chosen
