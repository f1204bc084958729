"""A `rollout_func` for TRL's `GRPOTrainer`: a server runs rollouts of the prompts' tasks.

    rollouts = EnvserverRollouts(url, weights=LocalFull(engine_url, folder, server=client))
    trainer = GRPOTrainer(
        model=..., args=GRPOConfig(temperature=1.0, ...),     # as --sampling.temperature
        train_dataset=Dataset.from_list(task_prompts(url, "math")),
        rollout_func=rollouts, reward_funcs=environment_reward,
    )

Invariants: there is exactly one sequence for each prompt, in order, with the ids and
logprobs that the engine sampled; groups are complete, even across two ranks; before each generation
the engine has the trainer's weights (both score a row of the last batch), and the policy version is
the trainer's step. The reward of a truncated rollout counts, but nothing is learned from it. A
rollout lost without the model's fault becomes a row without trained tokens and without a reward,
which TRL leaves out of the group's mean. Written for TRL 1.16.0 (`GRPOTrainer._generate`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from envserver_records import EnvserverError, Split, Trajectory
from envserver_records.http_errors import Urls

from envserver_clients.http import SyncEnvClient
from envserver_clients.weights import WeightPush

from .completions import (
    Completion,
    RolloutsLost,
    check_text_only,
    check_trajectories,
    completions_of_agent,
    is_trainable,
    loss_mask,
    main_completion,
    masked_logprobs,
)
from .trainers_engines import Versions, check_of, saver
from .trl_prompts import TaskName, task_of


def environment_reward(completions: list[Any], **columns: Any) -> list[float | None]:
    """A reward function for TRL: the environment's reward; None if it is unknown."""
    rewards: list[float | None] = columns["env_reward"]
    return rewards


class EnvserverRollouts:
    """A `rollout_func`. `close` it, or use it as a context manager.

    Args:
        server_url: address of `envserver serve`, or a list of equal servers, best with
            `--rollouts.max_queued_groups 0`.
        weights: transfers the trainer's weights to the server's engine. None: something else
            transfers them (`use_vllm`), and only their version is published.
        token: the server's access token. Default: the environment variable ENVSERVER_TOKEN.
        timeout_seconds: time limit for the rollouts of one batch.
        agent: which of several agents is trained; None: the first of each rollout. TRL takes one
            row for each prompt (`trl_async` has the rows of all agents).
    """

    def __init__(
        self,
        server_url: Urls,
        *,
        weights: WeightPush | None = None,
        token: str | None = None,
        timeout_seconds: float = 3600.0,
        agent: str | None = None,
    ) -> None:
        self._agent = agent
        self._server = (server_url, token)
        self._weights = weights
        self._timeout_seconds = timeout_seconds
        self._client: SyncEnvClient | None = None
        self._versions: Versions | None = None
        self._step: int | None = None
        self._seen: TrlRow | None = None

    def __enter__(self) -> EnvserverRollouts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._client is not None:
            self._client.__exit__(None, None, None)
            self._client = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Runs TRL's `rollout_func` for the `prompts` of this rank.

        In addition to TRL's columns, reward functions get `env_reward` (None: unknown),
        `env_truncated` (the model was cut off), `env_version` (the oldest policy version) and
        `env_components` (the named parts of the reward). Raises RolloutsLost: every rollout failed.
        InputError: rows were sampled at another temperature than the trainer's.
        """
        from accelerate.utils import broadcast_object_list, gather_object

        self._bring_weights(trainer)
        tasks = [task_of(prompt) for prompt in prompts]
        counts = gather_object([len(tasks)])
        all_tasks = gather_object(tasks)
        shared: list[Any] = [None]
        if trainer.accelerator.is_main_process:
            shared = [self._all_rows(all_tasks, _group_size(trainer), trainer.temperature)]
        broadcast_object_list(shared)
        if isinstance(shared[0], EnvserverError):
            raise shared[0]
        before = sum(counts[: trainer.accelerator.process_index])
        return _columns(shared[0][before : before + len(tasks)])

    def _bring_weights(self, trainer: Any) -> None:
        """Transfers the weights of this step to the engine if needed; call on all ranks."""
        step: int = trainer.state.global_step
        if step == self._step:
            return
        save = saver(trainer) if self._weights is not None else None
        if trainer.accelerator.is_main_process:
            client = self._connected()
            if self._versions is None:
                self._versions = Versions(client.status()["policy_version"])
            version = self._versions.of(step)
            if self._weights is not None and save is not None:
                seen = self._seen
                check = None
                if seen is not None:
                    check = check_of(trainer, seen.prompt_ids, seen.completion_ids)
                self._weights.publish(version, save, check)
            client.publish_policy_version(version)
        self._step = step

    def _connected(self) -> SyncEnvClient:
        if self._client is None:
            url, token = self._server
            self._client = SyncEnvClient(url, run=None, token=token).__enter__()
        return self._client

    def _all_rows(
        self, tasks: Sequence[TaskName], group_size: int, temperature: float
    ) -> list[TrlRow] | EnvserverError:
        """The rows of all ranks, or an error for all: else the other ranks would wait."""
        try:
            made = self._trajectories(tasks, group_size)
            check_trajectories(made, temperature, "GRPOConfig(temperature=...)")
            rows = rows_of(made, self._agent)
        except EnvserverError as error:
            return error
        self._seen = rows[0]
        return rows

    def _trajectories(self, tasks: Sequence[TaskName], group_size: int) -> list[Trajectory | None]:
        found: list[Trajectory | None] = [None] * len(tasks)
        kinds: dict[tuple[str, Split, int], list[int]] = defaultdict(list)
        for first, size in grouped(tasks, group_size):
            kinds[tasks[first].environment, tasks[first].split, size].append(first)
        for (environment, split, size), places in sorted(kinds.items()):
            made = self._connected().rollouts(
                environment,
                [tasks[first].task_id for first in places],
                group_size=size,
                split=split,
                timeout_seconds=self._timeout_seconds,
            )
            for first, group in zip(places, made, strict=True):
                found[first : first + size] = group
        return found


def grouped(tasks: Sequence[TaskName], group_size: int) -> list[tuple[int, int]]:
    """(start, rows) of each group: adjacent rows of the same task, at most `group_size`."""
    groups: list[tuple[int, int]] = []
    for index, task in enumerate(tasks):
        if groups and tasks[groups[-1][0]] == task and groups[-1][1] < group_size:
            groups[-1] = (groups[-1][0], groups[-1][1] + 1)
        else:
            groups.append((index, 1))
    return groups


@dataclass(frozen=True)
class TrlRow:
    """One sequence with TRL's names."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    env_reward: float | None
    env_truncated: bool
    env_version: int
    env_components: dict[str, float] = field(default_factory=dict)


def rows_of(trajectories: Sequence[Trajectory | None], agent: str | None = None) -> list[TrlRow]:
    """A row for each trajectory, in order. Raises RolloutsLost: all are lost."""
    found = [None if trajectory is None else _row(trajectory, agent) for trajectory in trajectories]
    made = next((row for row in found if row is not None), None)
    if made is None:
        raise RolloutsLost(
            f"All {len(trajectories)} rollouts failed, none through the model's fault.",
            hint="The server's GET /v1/status shows what failed.",
        )
    empty = TrlRow(made.prompt_ids, made.completion_ids[-1:], [0.0], [0], None, False, -1)
    return [row or empty for row in found]


def _row(trajectory: Trajectory, agent: str | None) -> TrlRow | None:
    if not is_trainable(trajectory) or not completions_of_agent(trajectory, agent):
        return None
    # TRL takes one sequence, even of an agent that forked its history.
    chosen = check_text_only(main_completion(trajectory, agent), "TRL's GRPOTrainer")
    mask = loss_mask(trajectory, chosen)
    return TrlRow(
        prompt_ids=chosen.prompt_ids,
        completion_ids=chosen.completion_ids,
        logprobs=masked_logprobs(chosen, mask),
        env_mask=mask,
        env_reward=trajectory.score.of_agent(chosen.agent),
        env_truncated=trajectory.truncated,
        env_version=_oldest(chosen),
        env_components=trajectory.score.components,
    )


def _oldest(completion: Completion) -> int:
    pairs = zip(completion.versions, completion.mask, strict=True)
    return min(version for version, trained in pairs if trained)


def _columns(rows: Sequence[TrlRow]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in TrlRow.__dataclass_fields__}
    for row in rows:
        for name, value in asdict(row).items():
            columns[name].append(value)
    return columns


def _group_size(trainer: Any) -> int:
    training = trainer.model.training
    size: int = trainer.num_generations if training else trainer.num_generations_eval
    return size
