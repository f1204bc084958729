"""verl: an agent loop that gets its rollouts from a server.

In: a row of verl's data set whose `extra_info` (or a separate column) names `task_id` and, if it
varies, `environment`. Out: verl's `AgentLoopOutput`: `prompt_ids` up to the
first sampled token, `response_ids` from there on with `response_mask` 1 where the policy sampled,
`response_logprobs` 0.0 at other tokens. verl pads; no text is tokenised again.

Images of a row are `multi_modal_data`, from which verl makes pixels as the engine did; verl needs
Pillow for them, and a response that is cut is cut before an image that would lose tokens.

Routed experts, if the server records them, are `routed_experts` (for verl's router replay, R3).

Rewards of turns are verl's `turn_scores`. Its trainers with a TransferQueue also get them for each
token: at the last one of their turn, and the rest of the reward at the end of the row, so that the
tokens add up to `reward_score`. Its default trainer has one number for a row, and puts it at its
end: `AgentLoopOutput` has no other place, and no estimator of verl reads `turn_scores`.

For verl's `agent_loop_config_path`, with `agent_name: envserver` in the data set:

    - name: envserver
      _target_: envserver_clients.adapters.verl.EnvserverLoop
      url: http://127.0.0.1:8000      # default: `envserver.url` of verl's settings
      environment: math

Sampling settings are those of the server. Tested with verl 0.9.1: its registry, its padding, and
its trainer's batch.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final, Literal

from envserver_records import InputError, Split, Trajectory
from envserver_records.http_errors import Urls
from envserver_records.tasks import Json

from envserver_clients.http import EnvClient
from envserver_clients.records import opened

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

Rows = Literal["one", "all"]
_UNKNOWN: Final = -1


class EnvserverLoop:
    """Runs one rollout; verl creates an instance for each. Further arguments are ignored.

    Args:
        trainer_config: verl's; has the maximum lengths of prompt and response.
        url: the server's address; several equal servers: a list, or a text with commas. None:
            `envserver.url` of verl's settings, as for `verl_training`.
        environment: default for rows that do not name one.
        rows: "one": the row with the most trained tokens, if the agent forked its history (verl's
            default trainer takes one for each row of its batch); "all": a list of all rows, for
            trainers with a TransferQueue.
        agent: which of several agents is trained; None: the first of each trajectory. With "all",
            verl compares all rows of a task, so leave one agent.
        split: of rows that do not name one; default: the one that the server serves.
        tries: how often to order a rollout that is lost without the model's fault.
    """

    def __init__(
        self,
        trainer_config: Any,
        *,
        url: Urls | None = None,
        environment: str | None = None,
        rows: Rows = "one",
        agent: str | None = None,
        split: Split | None = None,
        token: str | None = None,
        tries: int = 3,
        timeout_seconds: float = 3600.0,
        **_: Any,
    ) -> None:
        rollout = trainer_config.config.actor_rollout_ref.rollout
        self._prompt_length = int(rollout.prompt_length)
        self._response_length = int(rollout.response_length)
        self._temperature = float(getattr(rollout, "temperature", 1.0))
        self._url: Urls = trainer_config.config.envserver.url if url is None else url
        self._environment = environment
        self._rows = rows
        self._agent = agent
        self._split: Split | None = split
        self._token = token
        self._tries = tries
        self._timeout_seconds = timeout_seconds

    async def run(self, sampling_params: Json, **fields: Any) -> Any:
        """Runs the row's task; returns verl's `AgentLoopOutput`, or a list of them.

        Raises InputError: the row does not name a task, the prompt is too long for verl's settings,
        or the tokens were sampled at another temperature than verl's. RolloutsLost: the rollout
        failed without the model's fault, after all tries.
        """
        columns = dict(fields.get("extra_info") or {}) | fields
        environment, task_id = named(columns, self._environment, "extra_info")
        wish = GroupOrder(environment, [task_id], split=columns.get("split") or self._split)
        async with EnvClient(self._url, run=None, token=self._token) as client:
            ((trajectory,),) = await complete_groups(
                client, wish, tries=self._tries, timeout_seconds=self._timeout_seconds
            )
        setting = "actor_rollout_ref.rollout.temperature"
        check_trajectories([trajectory], self._temperature, setting)
        from verl.experimental.agent_loop.agent_loop import (  # type: ignore[import-not-found, unused-ignore]
            AgentLoopOutput,
        )

        kind = with_token_rewards(AgentLoopOutput)
        outputs = [
            kind(**output)
            for output in outputs_of(
                trajectory,
                self._rows,
                prompt_length=self._prompt_length,
                response_length=self._response_length,
                agent=self._agent,
            )
        ]
        return outputs if self._rows == "all" else outputs[0]


@functools.cache
def with_token_rewards(output: type[Any]) -> type[Any]:
    """Adds `token_rewards` to verl's `AgentLoopOutput`: its `rm_scores` for a TransferQueue."""

    class Output(output):  # type: ignore[misc]
        token_rewards: list[float] | None = None

        def as_dict(self) -> Json:
            fields: Json = super().as_dict()
            rewards = fields.pop("token_rewards", None)
            if rewards is not None:
                fields["rm_scores"] = fields["rm_scores"].new_tensor(rewards)
            return fields

    return Output


def outputs_of(
    trajectory: Trajectory,
    rows: Rows,
    *,
    prompt_length: int,
    response_length: int,
    agent: str | None = None,
) -> list[Json]:
    """Returns the fields of an `AgentLoopOutput` for each row.

    A prompt longer than `prompt_length` is an error, because cutting it would change what the model
    saw; longer responses are cut, as in verl's loops. Raises InputError: a prompt is too long, or
    the trajectory has no trained token or no reward.
    """
    if rows == "all":
        taken = completions_of_agent(trajectory, agent)
    else:
        taken = [main_completion(trajectory, agent)]
    for row in taken:
        if len(row.prompt_ids) > prompt_length:
            raise InputError(
                f"A prompt of {len(row.prompt_ids)} tokens is longer than {prompt_length}.",
                hint="Raise data.max_prompt_length, or lower the environment's limits.",
                place="prompt_length",
            )
    return [_output(trajectory, row, response_length) for row in taken]


def _output(trajectory: Trajectory, row: Completion, length: int) -> Json:
    length, images = _within(row, length)
    mask = loss_mask(trajectory, row)
    reward, usage = reward_of(trajectory, row.agent), trajectory.usage
    turns = turn_rewards(trajectory, row)
    versions = [version for version in row.versions if version != _UNKNOWN]
    return {
        "prompt_ids": row.prompt_ids,
        "response_ids": row.completion_ids[:length],
        "response_mask": mask[:length],
        "response_logprobs": masked_logprobs(row, mask)[:length],
        "reward_score": reward,
        "num_turns": trajectory.turns,
        "metrics": {
            "generate_sequences": usage.model_seconds,
            "tool_calls": max(0.0, usage.seconds - usage.model_seconds),
        },
        "extra_fields": {
            # verl needs the same keys in every row of a batch.
            "reward_extra_info": {"truncated": float(trajectory.truncated)},
            "min_global_steps": min(versions, default=None),
            "max_global_steps": max(versions, default=None),
            "rollout_id": trajectory.rollout_id,
            "turn_scores": list(turns.values()),
            "tool_rewards": [],
        },
        **({"token_rewards": _token_rewards(reward, turns, len(mask[:length]))} if turns else {}),
        **({"multi_modal_data": {"images": images}} if images else {}),
        **(
            {"routed_experts": row.experts[: len(row.prompt_ids) + length]}
            if row.experts is not None
            else {}
        ),
    }


def _within(row: Completion, length: int) -> tuple[int, list[Any]]:
    """How much of a response of at most `length` tokens has its images whole, and these images."""
    begin = len(row.prompt_ids)
    for place, image in enumerate(row.images):
        if image.offset + image.length > begin + length:
            return max(0, min(length, image.offset - begin)), [
                opened(image) for image in row.images[:place]
            ]
    return length, [opened(image) for image in row.images]


def _token_rewards(reward: float, turns: dict[int, float], length: int) -> list[float]:
    """The reward of each token of a row; they add up to `reward`."""
    found = [turns.get(place, 0.0) for place in range(length)]
    found[-1] += reward - math.fsum(found)
    return found
