"""prime-rl: training samples for its packer.

In: the trajectories of a group. Out: prime-rl's `TrainingSample`s, one for each row: four lists as
long as `token_ids` (`mask` True where the policy sampled, `logprobs` 0.0 elsewhere,
`temperatures`), and `advantages` of the same length.

prime-rl is on no package index, so this is held against its published types
(`src/prime_rl/transport/types.py`): `TrainingSample` below has their fields in their order, and the
same bytes in MessagePack. Where prime-rl is installed, give its own class as `kind`. Its other
seam, an environment server of verifiers, asks the other way round: it names the engine, while here
the server has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from envserver_records import InputError, Trajectory

from .whole_groups import is_trainable, reward_of


class TrainingSample(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A row as it travels: what stands behind `advantages` there is None by default."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None = None
    mm_refs: Any = None
    routed_experts: Any = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    advantages: list[float] | None = None


def centred(rewards: Sequence[float]) -> list[float]:
    """Advantages: each reward less the mean of its group."""
    mean = sum(rewards) / max(1, len(rewards))
    return [reward - mean for reward in rewards]


def samples_of_group(
    group: Sequence[Trajectory],
    *,
    temperature: float,
    advantages: Callable[[Sequence[float]], Sequence[float]] = centred,
    kind: Callable[..., Any] = TrainingSample,
) -> list[Any]:
    """All rows of a group, in its order; trajectories that were lost or scored by nobody are left
    out before advantages are computed.

    Args:
        temperature: that all rollouts were sampled with (`Group.generation_params`).
        advantages: from the rewards of the trajectories to as many advantages.
        kind: makes a sample from its fields.

    Raises:
        InputError: `advantages` gave another number of them.
    """
    trainable = [one for one in group if is_trainable(one)]
    rewards = [reward_of(one) for one in trainable]
    found = list(advantages(rewards))
    if len(found) != len(trainable):
        raise InputError(f"{len(found)} advantages for {len(trainable)} trajectories.")
    return [
        kind(**fields)
        for trajectory, advantage in zip(trainable, found, strict=True)
        for fields in _fields_of(trajectory, advantage, temperature)
    ]


def _fields_of(
    trajectory: Trajectory, advantage: float, temperature: float
) -> list[dict[str, Any]]:
    rows = [one for one in trajectory.sequences if one.mask.any()]
    return [
        {
            "token_ids": row.tokens.tolist(),
            "mask": (row.mask.astype(bool) & (not trajectory.truncated)).tolist(),
            "logprobs": np.where(row.mask, row.logprobs, np.float32(0.0)).tolist(),
            "temperatures": [temperature] * len(row.tokens),
            "env_name": trajectory.env,
            "advantages": [advantage] * len(row.tokens),
        }
        for row in rows
    ]
