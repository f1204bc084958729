"""Tasks, results and scores: what workers, environments and scorers exchange, without numpy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

CompactionRewards = Literal["same", "last", "length"]
"""How rows that follow each other by compaction get the reward of their rollout: all of it each,
only the last one (the others are not trained), or its advantage shared by their trained tokens."""

#     an agent's reward = its outcome + the sum of its turn rewards
#     its outcome       = `rewards[agent]`, or `reward` if `rewards` does not name the agent
#
# `Score.reward` is the single number to show, filter and estimate with: the outcome (without
# `reward`, the mean of the trained agents' outcomes) plus the mean of the trained agents' sums of
# turn rewards. A scorer gives outcomes; the score of a `Trajectory` has the sums (`with_totals`),
# so a reader of `reward` alone reads all of it.


class TurnReward(msgspec.Struct, frozen=True):
    """The reward of one turn of an agent: one model call that it received an answer to.

    Args:
        turn: number of the turn among those of its agent, from 0.
        value: any finite number.
        agent: name of the agent; None: the only one, or the main agent.
        call: index of the recorded call (`Call.index`); the server sets it. -1: unknown.
    """

    turn: int
    value: float
    agent: str | None = None
    call: int = -1


class Score(msgspec.Struct, kw_only=True):
    """The score of one rollout; the module's docstring says how rewards add up.

    Args:
        reward: a number in the environment's `reward_range`; of several agents, the reward of each
            that `rewards` does not name. None without `rewards`, `turns` and weighted `components`:
            not scorable, so the rollout is dropped and never trained on.
        rewards: rewards by agent; every trained agent needs one if `reward` is None.
        turns: rewards of single turns, in addition to those of `run.reward`.
        components: named parts of the reward. Without `reward` and `rewards`, the reward is their
            sum weighted by `Environment.component_weights`.
        metrics: other numbers to average.
        error: set if scoring failed without the model's fault; then the rewards are ignored and the
            rollout is retried, then dropped.
    """

    reward: float | None = None
    components: dict[str, float] = {}
    metrics: dict[str, float] = {}
    error: str | None = None
    rewards: dict[str, float] = {}
    turns: list[TurnReward] = []

    def of_agent(self, agent: str | None) -> float | None:
        """Returns the reward (of a trajectory's score) or outcome (of a scorer's) of `agent`."""
        return self.rewards.get(agent or "", self.reward)

    def turn_sum(self, agent: str | None) -> float:
        return math.fsum(turn.value for turn in self.turns if turn.agent == agent)

    def call_rewards(self, agent: str | None) -> dict[int, float]:
        """Returns the turn rewards of `agent` by the index of their call, summed for each."""
        rewards: dict[int, float] = {}
        for turn in self.turns:
            if turn.agent == agent:
                rewards[turn.call] = rewards.get(turn.call, 0.0) + turn.value
        return rewards


class RewardRange(msgspec.Struct, frozen=True):
    """The rewards that an environment can give.

    Args:
        low, high: bounds of every agent's reward; may be infinite.
        solved_at: the least reward of a solved task; finite.
    """

    low: float = 0.0
    high: float = 1.0
    solved_at: float = 1.0

    def holds(self, reward: float) -> bool:
        """Returns whether `reward` is finite and within the bounds, up to rounding of sums."""
        ends = [abs(end) for end in (self.low, self.high) if math.isfinite(end)]
        slack = 1e-9 * max([1.0, *ends])
        return math.isfinite(reward) and self.low - slack <= reward <= self.high + slack

    def is_solved(self, reward: float) -> bool:
        """Returns whether `reward` is that of a solved task, up to rounding."""
        return reward >= self.solved_at - 1e-9 * max(1.0, abs(self.solved_at))

    def share(self, reward: float) -> float:
        """Returns how far `reward` is from `low` (0) to `solved_at` (1), clipped; without a finite
        lower bound 1 for a solved task, else 0."""
        if self.low == 0.0 and self.solved_at == 1.0:
            return min(max(reward, 0.0), 1.0)
        if not math.isfinite(self.low) or self.solved_at <= self.low:
            return float(self.is_solved(reward))
        return min(max((reward - self.low) / (self.solved_at - self.low), 0.0), 1.0)

    @property
    def axis(self) -> tuple[float, float]:
        """Both ends of an axis for rewards: the finite bounds, else `worst` and `solved_at`."""
        low = self.worst
        high = self.high if math.isfinite(self.high) else self.solved_at
        return low, high if high > low else low + 1.0

    @property
    def worst(self) -> float:
        """The reward of an answer that cannot be scored through the model's fault."""
        return self.low if math.isfinite(self.low) else min(0.0, self.high)


UNIT_RANGE = RewardRange()


def range_as_json(bounds: RewardRange) -> dict[str, float | None]:
    """Returns the range with null for infinite ends, which JSON lacks."""
    return {
        name: value if math.isfinite(value) else None
        for name, value in msgspec.structs.asdict(bounds).items()
    }


def range_from_json(values: Mapping[str, float | None]) -> RewardRange:
    """Returns the range that `range_as_json` wrote; without entries, [0, 1]."""
    low, high = values.get("low", 0.0), values.get("high", 1.0)
    solved_at = values.get("solved_at", 1.0)
    return RewardRange(
        low=-math.inf if low is None else low,
        high=math.inf if high is None else high,
        solved_at=1.0 if solved_at is None else solved_at,
    )


def outcome(score: Score, trained: Collection[str]) -> float | None:
    """Returns the single number of a scorer's score without turn rewards; None: not scorable.

    `trained`: names of the trained agents; of all agents if none is trained.
    """
    if score.reward is not None:
        return score.reward
    named = [score.rewards[name] for name in trained if name in score.rewards]
    named = named or list(score.rewards.values())
    if named:
        return math.fsum(named) / len(named)
    return 0.0 if score.turns else None


def with_totals(score: Score, agents: Mapping[str, bool]) -> Score:
    """Returns the score to deliver: turn rewards added to the rewards of their agents.

    `agents`: whether each declared agent is trained; empty: a single agent without a name.
    """
    trained = [name for name, is_trained in agents.items() if is_trained] or list(agents)
    single = outcome(score, trained)
    if single is None:
        return score
    if not score.turns:
        return msgspec.structs.replace(score, reward=single)
    sums = [score.turn_sum(name) for name in trained] or [score.turn_sum(None)]
    names = [name for name in agents if name in score.rewards or score.reward is not None]
    totals = {
        name: math.fsum((score.rewards.get(name, single), score.turn_sum(name)))
        for name in (names or agents)
    }
    return msgspec.structs.replace(
        score, reward=math.fsum((single, math.fsum(sums) / len(sums))), rewards=totals
    )


Split = Literal["train", "validation", "test"]

Json = dict[str, Any]
"""A JSON object."""

Message = dict[str, Any]
"""A chat message in OpenAI's format."""


def text_of(message: Message) -> str:
    """Returns the text of a message, whatever the form of its content."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


class PublicTask(msgspec.Struct, frozen=True):
    """The part of a task that a worker gets; `public` is what a rollout needs."""

    id: str
    public: Json

    def __post_init__(self) -> None:
        if isinstance(self.id, str) and not self.id.isprintable():
            # UTF-8 cannot hold half of a surrogate pair, and PostgreSQL no NUL character.
            printable = self.id.encode(errors="backslashreplace").decode().replace("\0", "\\x00")
            msgspec.structs.force_setattr(self, "id", printable)


class Task(PublicTask, frozen=True):
    """A task to solve.

    Args:
        id: unique and stable within its environment and split; any text.
        public: JSON-like; sent to the worker (the model sees only what the agent sends it).
        hidden: JSON-like (answers, tests); never leaves the server and the scorer.
    """

    hidden: Json = {}

    def without_hidden(self) -> PublicTask:
        return PublicTask(self.id, self.public)


class Result(msgspec.Struct, kw_only=True):
    """A finished rollout, as the scorer sees it.

    Args:
        output: the return value of the environment's `rollout` (JSON-like).
        messages: the last conversation that the agent sent, with the model's last answer.
        finish_reason: the last call's ("length": cut off), None without a call.
        truncated: the model was cut off: by the length of its last call, by the limits "tokens",
            "time" or "context", or by "crash". After "turns" and "record" its last answer is
            complete.
        limit: the limit that ended the rollout: "turns", "tokens", "time", "context", "record" (its
            requests hold too much memory), "crash" (code of the model ended its agent's process) or
            None.
        turns: number of model calls.
        completion_tokens: number of tokens sampled in all calls.
        metrics: numbers that the agent logged with `run.log_metric`.
        flags: labels from services (`Caller.flag`), and how `output` was cut or cleaned.
        actions: steps that the agent logged with `run.log_action`, each {"step", "tool", "input",
            "output", "ts"} with `step` from 1 and `ts` in seconds. For readers: rewards must not
            depend on them.
        turn_rewards: those that the rollout gave with `run.reward`.
        calls: for each agent ("": without a name) the indices of the calls that it received an
            answer to, turn by turn.
        completion_ids: the ids of all trained tokens, in order, for an environment with
            `scores_token_ids`; None: they are unknown, or it does not ask for them.

    Turns, tokens, messages and ends are those of the trained agents, if there are any.
    """

    output: Any = None
    messages: list[Message] = []
    finish_reason: str | None = None
    truncated: bool = False
    limit: str | None = None
    turns: int = 0
    completion_tokens: int = 0
    metrics: dict[str, float] = {}
    flags: list[str] = []
    actions: list[Json] = []
    turn_rewards: list[TurnReward] = []
    calls: dict[str, list[int]] = {}
    completion_ids: list[int] | None = None
