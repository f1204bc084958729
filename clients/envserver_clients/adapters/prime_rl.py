"""prime-rl: makes training samples for its packer.

In: the trajectories of a group. Out: prime-rl's `TrainingSample`s, one for each row: four lists as
long as `token_ids` (`mask` True where the policy sampled, `logprobs` 0.0 elsewhere,
`temperatures`), and `advantages` of the same length.

prime-rl is not on a package index, so this follows its published types
(`src/prime_rl/transport/types.py`): `TrainingSample` has their fields in their order, and the same
bytes in MessagePack. Where prime-rl is installed, pass its class as `kind`. Its other interface, an
environment server of verifiers, works the other way round: the caller names the engine, while here
the server has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from envserver_records import InputError, Trajectory
from envserver_records import Sequence as Row

from .temperatures import check_trajectories
from .whole_groups import is_trainable, reward_of


class TrainingSample(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A row in prime-rl's format; its fields after `advantages` are None by default."""

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
    """Returns advantages: each reward minus the mean of its group."""
    mean = sum(rewards) / max(1, len(rewards))
    return [reward - mean for reward in rewards]


def samples_of_group(
    group: Sequence[Trajectory],
    *,
    temperature: float = 1.0,
    advantages: Callable[[Sequence[float]], Sequence[float]] = centred,
    kind: Callable[..., Any] = TrainingSample,
) -> list[Any]:
    """Converts the rows of a group, in order; trajectories without a reward are left out before
    advantages are computed.

    Args:
        temperature: of rows that do not say it, as those of older servers.
        advantages: turns the rewards of one agent in the trajectories into as many advantages.
        kind: makes a sample from its fields.

    Raises:
        InputError: `advantages` returned a different number of values, or rows were sampled with
            top_p or have logprobs from before the temperature.
    """
    trainable = [one for one in group if is_trainable(one)]
    check_trajectories(trainable, None, "")
    by_agent: dict[str | None, list[float]] = {}
    for agent in {row.agent for one in trainable for row in one.sequences}:
        by_agent[agent] = list(advantages([reward_of(one, agent) for one in trainable]))
        if len(by_agent[agent]) != len(trainable):
            raise InputError(
                f"{len(by_agent[agent])} advantages for {len(trainable)} trajectories."
            )
    return [
        kind(**fields)
        for number, trajectory in enumerate(trainable)
        for fields in _fields_of(
            trajectory, {agent: own[number] for agent, own in by_agent.items()}, temperature
        )
    ]


def _fields_of(
    trajectory: Trajectory, advantages: Mapping[str | None, float], temperature: float
) -> list[dict[str, Any]]:
    rows = [one for one in trajectory.sequences if one.mask.any()]
    return [
        {
            "token_ids": row.tokens.tolist(),
            "mask": (row.mask.astype(bool) & (not trajectory.truncated)).tolist(),
            "logprobs": np.where(row.mask, row.logprobs, np.float32(0.0)).tolist(),
            "temperatures": _temperatures(row, temperature),
            "env_name": trajectory.env,
            "advantages": [advantages[row.agent]] * len(row.tokens),
        }
        for row in rows
    ]


def _temperatures(row: Row, usual: float) -> list[float]:
    """Returns the temperature of each token; `usual` where the row does not say it."""
    found = [usual] * len(row.tokens)
    for span in row.sampling:
        found[span.start : span.end] = [span.temperature] * (span.end - span.start)
    return found
