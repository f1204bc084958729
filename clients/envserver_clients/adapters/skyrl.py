"""SkyRL: a generator that gets its trajectories from a server.

In: SkyRL's `GeneratorInput`. Each row names `task_id` (and `environment`, if it is not the row's
`env_class`) in `env_extras`, where SkyRL puts every column of the data set except prompt and
env_class. Out: its `GeneratorOutput`, rows in the order of the input. In step-wise mode the rows of
a trajectory are adjacent, the last has `is_last_step`, and the outcome is on its last token;
rewards of turns are on the last tokens of their calls.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return EnvserverGenerator("http://127.0.0.1:8000")

Rows with images need `processor`: SkyRL gets their `pixel_values` and `image_grid_thw`.

Sampling settings are those of the server. Tested with skyrl 0.3.0: its checks of outputs,
concatenation, merging of steps, and metrics.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from envserver_records import InputError, Split, Trajectory
from envserver_records.http_errors import Urls

from envserver_clients.http import EnvClient
from envserver_clients.records import pixels

from .completions import (
    Completion,
    GroupOrder,
    check_trajectories,
    complete_groups,
    completions_of_agent,
    loss_mask,
    main_completion,
    masked_logprobs,
    named,
    reward_of,
    turn_rewards,
)


class Output(TypedDict):
    """The fields of SkyRL's `GeneratorOutput` that are filled; lists have one item per row."""

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float] | list[list[float]]
    loss_masks: list[list[int]]
    stop_reasons: list[str]
    rollout_metrics: dict[str, float]
    rollout_logprobs: list[list[float]]
    trajectory_ids: list[Any] | None
    is_last_step: list[bool] | None
    rollout_expert_indices: list[Any] | None
    pixel_values: list[Any] | None
    image_grid_thw: list[Any] | None


@dataclass(frozen=True)
class TaskGroup:
    """Tasks that need the same number of rollouts; `places`: the input rows of each task."""

    wish: GroupOrder
    places: list[list[int]]


class EnvserverGenerator:
    """Implements SkyRL's `GeneratorInterface` (`GeneratorInterface.register(EnvserverGenerator)`).

    Args:
        url: the server's address; several equal servers: a list, or a text with commas.
        step_wise: return all rows of a trajectory (SkyRL's `generator.step_wise_trajectories`);
            False: only the one with the most trained tokens.
        agent: which of several agents is trained; None: the first of each trajectory.
        train_split, eval_split: default: the one that the server serves.
        tries: how often to order a group whose rollouts are lost without the model's fault.
        temperature: SkyRL's `trainer.algorithm.temperature`. Default: that of the input's
            `sampling_params`, or 1.
        processor: folder or hub id of the vision-language model, for rows with images. SkyRL
            trains those whose processor gives grids: Qwen2-VL to Qwen3-VL.
    """

    def __init__(
        self,
        url: Urls,
        *,
        step_wise: bool = False,
        agent: str | None = None,
        train_split: Split | None = None,
        eval_split: Split | None = None,
        token: str | None = None,
        tries: int = 3,
        timeout_seconds: float = 3600.0,
        temperature: float | None = None,
        processor: str | None = None,
    ) -> None:
        self._url = url
        self._processor = None if processor is None else _opened_processor(processor)
        self._temperature = temperature
        self._step_wise = step_wise
        self._agent = agent
        self._splits = {"train": train_split, "eval": eval_split}
        self._token = token
        self._tries = tries
        self._timeout_seconds = timeout_seconds

    async def generate(self, input_batch: Mapping[str, Any]) -> Output:
        """Returns a trajectory for each row of the input.

        Raises InputError: a row does not name a task, or rows to train on were sampled at another
        temperature than SkyRL's. RolloutsLost: rollouts failed without the model's fault, after all
        tries.
        """
        about = input_batch.get("batch_metadata")
        phase = about.training_phase if about else "train"
        split = self._splits[phase]
        wanted = task_groups_of(input_batch, split)
        async with EnvClient(self._url, run=None, token=self._token) as client:
            came = await asyncio.gather(
                *(
                    complete_groups(
                        client,
                        request.wish,
                        tries=self._tries,
                        timeout_seconds=self._timeout_seconds,
                    )
                    for request in wanted
                )
            )
        found: dict[int, Trajectory] = {}
        for request, groups in zip(wanted, came, strict=True):
            for places, group in zip(request.places, groups, strict=True):
                found.update(zip(places, group, strict=True))
        ordered = [found[place] for place in range(len(found))]
        if phase == "train":
            own = (input_batch.get("sampling_params") or {}).get("temperature", 1.0)
            temperature = own if self._temperature is None else self._temperature
            check_trajectories(ordered, temperature, "generator.sampling_params.temperature")
        identities = input_batch.get("trajectory_ids")
        return output_of(
            ordered,
            identities,
            step_wise=self._step_wise,
            agent=self._agent,
            processor=self._processor,
        )


def task_groups_of(input_batch: Mapping[str, Any], split: Split | None) -> list[TaskGroup]:
    """Groups the input's rows, one rollout each, by task and instance (SkyRL's repetitions)."""
    extras = input_batch.get("env_extras") or [{}] * len(input_batch["prompts"])
    identities = input_batch.get("trajectory_ids") or [None] * len(extras)
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for place, (columns, identity) in enumerate(zip(extras, identities, strict=True)):
        environment, task_id = named(columns, input_batch["env_classes"][place], "env_extras")
        instance = "" if identity is None else str(identity.instance_id)
        groups[environment, task_id, instance].append(place)
    alike: dict[tuple[str, int], list[tuple[str, list[int]]]] = defaultdict(list)
    for (environment, task_id, _), places in groups.items():
        alike[environment, len(places)].append((task_id, places))
    return [
        TaskGroup(
            GroupOrder(environment, [task_id for task_id, _ in tasks], size, split),
            [p for _, p in tasks],
        )
        for (environment, size), tasks in alike.items()
    ]


def output_of(
    trajectories: Sequence[Trajectory],
    identities: Sequence[Any] | None,
    *,
    step_wise: bool,
    agent: str | None = None,
    processor: Any = None,
) -> Output:
    """Converts trajectories to SkyRL's output.

    `identities`: SkyRL's `TrajectoryID`s. Raises InputError: a trajectory has no trained token or
    no reward, or images that SkyRL cannot get.
    """
    rows = [
        (place, row)
        for place, trajectory in enumerate(trajectories)
        for row in (
            completions_of_agent(trajectory, agent)
            if step_wise
            else [main_completion(trajectory, agent)]
        )
    ]
    masks = [loss_mask(trajectories[place], row) for place, row in rows]
    places = [place for place, _ in rows]
    last = [place != after for place, after in zip(places, [*places[1:], -1], strict=True)]
    rewards = [reward_of(trajectories[place], row.agent) for place, row in rows]
    values, grids = _pixels([row for _, row in rows], processor)
    return {
        "prompt_token_ids": [row.prompt_ids for _, row in rows],
        "response_ids": [row.completion_ids for _, row in rows],
        "rewards": [
            _token_rewards(trajectories[place], row, ends=ends)
            for (place, row), ends in zip(rows, last, strict=True)
        ]
        if step_wise
        else rewards,
        "loss_masks": masks,
        "stop_reasons": ["length" if trajectories[p].truncated else "stop" for p in places],
        "rollout_metrics": _metrics(trajectories),
        "rollout_logprobs": [
            masked_logprobs(row, mask) for (_, row), mask in zip(rows, masks, strict=True)
        ],
        "trajectory_ids": [identities[place] for place in places] if identities else None,
        "is_last_step": last if step_wise else None,
        "rollout_expert_indices": None if step_wise else _experts([row for _, row in rows]),
        "pixel_values": values,
        "image_grid_thw": grids,
    }


def _opened_processor(source: str) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(source)


def _pixels(
    rows: Sequence[Completion], processor: Any
) -> tuple[list[Any], list[Any]] | tuple[None, None]:
    """Tensors of pixels and of grids for each row; None where no row has images."""
    if not any(row.images for row in rows):
        return None, None
    if processor is None or not all(row.images for row in rows):
        raise InputError(
            "Rows have images, and SkyRL needs pixels of every row of a batch or of none.",
            hint="EnvserverGenerator(processor=MODEL) makes them; every task must have an image.",
            place="images",
        )
    made = [pixels(processor, [row.images]) for row in rows]
    for row, inputs in zip(rows, made, strict=True):
        grids = [tuple(grid) for grid in inputs["image_grid_thw"].tolist()]
        if any(image.grid not in ((), own) for image, own in zip(row.images, grids, strict=True)):
            raise InputError(
                f"The processor makes the grids {grids} of images for which the engine's made "
                f"{[image.grid for image in row.images]}.",
                hint="Both need the same model files and limits of pixels.",
                place="images",
            )
    return [inputs["pixel_values"] for inputs in made], [
        inputs["image_grid_thw"] for inputs in made
    ]


def _experts(rows: Sequence[Completion]) -> list[Any] | None:
    """Routed experts of all tokens of each row, as SkyRL's generator has them: zeros for the last
    token, which its engine never computed."""
    found = [row.experts for row in rows if row.experts is not None]
    if not found:
        return None
    if len(found) < len(rows):
        raise InputError(
            "Some rows have routed experts, some do not.",
            hint="--tokens.drop experts_missing leaves such rollouts out.",
            place="experts",
        )
    return [np.pad(table, ((0, 1), (0, 0), (0, 0))).tolist() for table in found]


def _token_rewards(trajectory: Trajectory, row: Completion, *, ends: bool) -> list[float]:
    """The rewards of a row's tokens; over the rows of the trajectory they add up to its reward.

    `ends`: it is the last row, which has the outcome.
    """
    found = [0.0] * len(row.mask)
    for place, reward in turn_rewards(trajectory, row).items():
        found[place] += reward
    if ends:
        rows = completions_of_agent(trajectory, row.agent)
        turns = {
            call: reward
            for sibling in rows
            for call, reward in (
                (sibling.calls[place], reward)
                for place, reward in turn_rewards(trajectory, sibling).items()
            )
        }
        found[-1] += reward_of(trajectory, row.agent) - math.fsum(turns.values())
    return found


def _metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    count = max(1, len(trajectories))
    return {
        "envserver/turns_mean": sum(trajectory.turns for trajectory in trajectories) / count,
        "envserver/truncated_mean": sum(trajectory.truncated for trajectory in trajectories)
        / count,
        "envserver/seconds_mean": sum(trajectory.usage.seconds for trajectory in trajectories)
        / count,
    }
