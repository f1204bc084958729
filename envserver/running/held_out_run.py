"""One evaluation of a held-out split, on the engine of a server; see `held_out`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from envserver_records.errors import ConfigError
from envserver_records.packing import ready

from ..evaluation.folders import Pricing, View, groups_path
from ..evaluation.report import summary_scalars
from ..export.stored_sources import opened
from ..settings.config import MixSettings
from ..settings.runs import HeldOutConfig
from .context import SharedEngine
from .evaluating import Choice, evaluate_on
from .mix import Member, RunSpec


async def evaluated(
    room: SharedEngine,
    served: Sequence[Member[MixSettings]],
    config: HeldOutConfig,
    pricing: Pricing,
    folder: Path,
    *,
    again: bool,
) -> tuple[dict[str, float], dict[str, int]]:
    """Returns its results, and its rollouts by policy version; see `held_out.HeldOut`.
    `again`: it was begun before in this folder; what fits the settings of now is kept."""
    members = [_member(member, config) for member in served]
    view = View(
        pass_at=config.pass_at,
        failures=config.failures,
        truncated=config.truncated,
        pricing=pricing,
    )
    choice = Choice(folder=folder, resume=again, baselines=config.baselines, view=view)
    try:
        done = await evaluate_on(room, members, choice)
    except ConfigError:
        if not again:
            raise
        # The settings have changed since it was begun: nothing of it can be used.
        anew = dataclasses.replace(choice, resume=False, overwrite=True)
        done = await evaluate_on(room, members, anew)
    ready(_Line)
    folders = [
        done.folder if len(members) == 1 else done.folder / member.name for member in members
    ]
    paths = [path for folder in folders if (path := groups_path(folder)).exists()]
    results = {} if done.report is None else summary_scalars(done.report)
    return results, dict(await asyncio.to_thread(sampled_by, paths))


def sampled_by(paths: Sequence[Path]) -> Counter[str]:
    """Counts the rollouts in files of groups by the version that sampled all of their tokens."""
    counts: Counter[str] = Counter()
    decoder = msgspec.json.Decoder(_Line)
    for path in paths:
        with opened(path) as lines:
            for line in lines:
                for rollout in decoder.decode(line).envserver.rollouts:
                    seen = {span[0] for row in rollout.versions for span in row if span[0] >= 0}
                    name = str(seen.pop()) if len(seen) == 1 else "several" if seen else "unknown"
                    counts[name] += 1
    return counts


class _Rollout(msgspec.Struct):
    versions: list[list[list[int]]] = []


class _Rollouts(msgspec.Struct):
    rollouts: list[_Rollout]


class _Line(msgspec.Struct):
    envserver: _Rollouts


def _member(member: Member[MixSettings], config: HeldOutConfig) -> RunSpec[MixSettings]:
    settings, env = member.settings, member.settings.env
    size = config.group_size or env.group_size
    own = env.model_copy(
        update={"split": config.split, "total_steps": config.total_steps, "group_size": size}
    )
    sampling, rollouts = settings.sampling, settings.rollouts
    if config.temperature is not None:
        sampling = sampling.model_copy(update={"temperature": config.temperature})
    rollouts = rollouts.model_copy(
        update={
            "max_concurrent": config.max_concurrent,
            "min_group_size": 1,  # as in `evaluate`
            "max_staleness": None,
            "max_staleness_at_delivery": None,
        }
    )
    changed = settings.model_copy(
        update={"env": own, "sampling": sampling, "rollouts": rollouts, "track": []}
    )
    return dataclasses.replace(member.spec, settings=changed, name=member.share.name)
