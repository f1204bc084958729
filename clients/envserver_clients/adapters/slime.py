"""slime: a custom generate function that gets its rollouts from a server.

In: slime's `Sample`, whose `metadata` names `task_id` and, if it varies, `environment`. Out: the
same sample, filled: `tokens` are prompt and response, `loss_mask` and `rollout_log_probs` have the
response's length (1 where the policy sampled; 0.0 where it did not). A rollout whose agent forked
its history is a list of samples that share a `rollout_id`. Routed experts, if the server records
them, are `rollout_routed_experts` (all tokens but the last).

    --custom-generate-function-path envserver_clients.adapters.slime.generate

The server is `args.envserver_url` (slime's `--custom-config-path` sets it) or ENVSERVER_URL; the
default environment is `args.envserver_environment`. Sampling settings are those of the server.

slime serves with SGLang, which gives no token ids with a chat: the server has a vLLM of its own,
and gets slime's weights from its full checkpoints on disk:

    --update-weight-mode full --update-weight-transport disk --update-weight-disk-dir DIR
    --custom-update-weight-post-write-path envserver_clients.adapters.slime.publish

The vLLM is `args.envserver_engine_url`, started as `envserver_clients/weights/README.md` says.

slime has one reward for a sample and spreads it over all of its tokens, so rewards of turns are
part of it; `metadata["turn_rewards"]` has them as [place in the response, value], for a
`--custom-reward-post-process-path` of your own.
slime is not on a package index: this follows the fields of the `Sample` of slime 0.3.1, and the
call of its hook.
"""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
from envserver_records import ConfigError, Trajectory

from envserver_clients.http import EnvClient, SyncEnvClient
from envserver_clients.weights import VllmFull

from .completions import (
    Completion,
    GroupOrder,
    check_text_only,
    check_trajectories,
    complete_groups,
    completions_of,
    masked_logprobs,
    named,
    reward_of,
    turn_rewards,
)

URL_VARIABLE: Final = "ENVSERVER_URL"
TEMPERATURE_FLAG: Final = "--rollout-temperature"


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Runs one rollout of the sample's task; returns a sample or a list of samples.

    Raises ConfigError: no server is configured. InputError: the sample does not name a task, or its
    tokens were sampled at another temperature than slime's. RolloutsLost: the rollout failed
    without the model's fault, after all tries.
    """
    url = _server_of(args)
    default = getattr(args, "envserver_environment", None)
    environment, task_id = named(sample.metadata or {}, default, "metadata")
    async with EnvClient(url, run=None) as client:
        ((trajectory,),) = await complete_groups(client, GroupOrder(environment, [task_id]))
    check_trajectories([trajectory], getattr(args, "rollout_temperature", 1.0), TEMPERATURE_FLAG)
    samples = samples_of(trajectory, sample)
    return samples if len(samples) > 1 else samples[0]


def publish(args: Any, folder: str, engines: Any = None) -> None:
    """Gives a checkpoint that slime wrote (`weight_v000012`) to the server's vLLM as version 12.

    slime calls this on every rank and then goes on; rank 0 does it. Raises ConfigError: no server
    or no engine is configured. For other errors see `envserver_clients.weights`.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return
    engine_url = getattr(args, "envserver_engine_url", None)
    if not engine_url:
        raise ConfigError(
            "No engine is configured.", hint="Set envserver_engine_url in its config."
        )
    written = Path(folder)

    def save(target: Path) -> None:
        shutil.copytree(written, target, dirs_exist_ok=True, copy_function=os.link)

    with SyncEnvClient(_server_of(args), run=None) as client:
        push = VllmFull(engine_url, written.parent / "envserver", server=client)
        push.publish(int(written.name.removeprefix("weight_v")), save)


def _server_of(args: Any) -> str:
    url = getattr(args, "envserver_url", None) or os.environ.get(URL_VARIABLE)
    if not url:
        raise ConfigError(
            "No server is configured.",
            hint=f"Set envserver_url in slime's config, or {URL_VARIABLE}.",
        )
    return str(url)


def samples_of(trajectory: Trajectory, sample: Any) -> list[Any]:
    rows = [check_text_only(row, "slime") for row in completions_of(trajectory)]
    return [_filled(copy.copy(sample), trajectory, row, siblings=len(rows) > 1) for row in rows]


def _filled(sample: Any, trajectory: Trajectory, row: Completion, *, siblings: bool) -> Any:
    statuses = type(sample).Status
    sample.tokens = row.prompt_ids + row.completion_ids
    sample.response = _last_words(trajectory)
    sample.response_length = len(row.completion_ids)
    sample.loss_mask = row.mask
    sample.rollout_log_probs = masked_logprobs(row, row.mask)
    if row.experts is not None:
        sample.rollout_routed_experts = row.experts.astype(np.int32)
    sample.reward = reward_of(trajectory, row.agent)
    sample.weight_versions = [str(version) for version in sorted({*row.versions} - {-1})]
    sample.status = statuses.TRUNCATED if trajectory.truncated else statuses.COMPLETED
    sample.remove_sample = trajectory.truncated
    sample.metadata = {**(sample.metadata or {}), "rollout_id": trajectory.rollout_id}
    if turns := turn_rewards(trajectory, row):
        sample.metadata["turn_rewards"] = [[place, reward] for place, reward in turns.items()]
    if siblings and getattr(sample, "rollout_id", None) is None:
        sample.rollout_id = sample.index
    return sample


def _last_words(trajectory: Trajectory) -> str:
    """For slime's logs; training uses `tokens`."""
    said = (
        message.get("content")
        for message in reversed(trajectory.messages)
        if message["role"] == "assistant"
    )
    return next((text for text in said if isinstance(text, str)), "")
