"""What one rollout took to score, and what it cost, without failed attempts. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from envserver_records.costs import Cost, JudgeUsage, Prices
from envserver_records.records import Call, Usage


class ScoringSpent(msgspec.Struct):
    """What scoring took, retries included. `judge`: None if it asked no judge."""

    seconds: float = 0.0
    judge: JudgeUsage | None = None

    def add(self, seconds: float, judge: JudgeUsage | None) -> None:
        self.seconds += seconds
        if judge is not None:
            self.judge = judge if self.judge is None else self.judge + judge

    def share_with(self, members: list[ScoringSpent]) -> None:
        judged = list(self.judge.shared(len(members))) if self.judge is not None else None
        for k, member in enumerate(members):
            member.add(self.seconds / len(members), judged[k] if judged is not None else None)


class RolloutPrices(msgspec.Struct, frozen=True, kw_only=True):
    """The prices of a run, all in one currency: of each agent whose model has prices ("": the only
    agent), and of the judge."""

    agents: dict[str, Prices] = {}
    judge: Prices | None = None


def tokens_of(calls: Iterable[Call]) -> tuple[int, int]:
    """Returns the prompt and completion tokens of `calls`; a prompt counts once for all choices."""
    prompt = completion = 0
    for call in calls:
        if call.choice == 0:
            prompt += len(call.prompt_ids) + call.told_tokens[0]
        completion += len(call.completion_ids) + call.told_tokens[1]
    return prompt, completion


def with_scoring(
    usage: Usage, calls: list[Call], spent: ScoringSpent, prices: RolloutPrices
) -> Usage:
    return msgspec.structs.replace(
        usage,
        scoring_seconds=spent.seconds,
        judge=spent.judge,
        cost=cost_of(calls, spent.judge, prices),
    )


def cost_of(calls: list[Call], judge: JudgeUsage | None, prices: RolloutPrices) -> Cost | None:
    models = {
        agent: known.cost(*tokens_of(call for call in calls if (call.agent or "") == agent))
        for agent, known in prices.agents.items()
    }
    judged = None
    if judge is not None and prices.judge is not None:
        judged = prices.judge.cost(judge.prompt_tokens, judge.completion_tokens)
    if not models and judged is None:
        return None
    known = [*prices.agents.values(), *([prices.judge] if prices.judge else [])]
    return Cost(currency=known[0].currency, models=models, judge=judged)
