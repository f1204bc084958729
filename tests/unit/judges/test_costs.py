"""Each record says what its rollout took and cost, by the prices of each model and of the judge."""

from __future__ import annotations

from pathlib import Path

import pytest
from envserver_records.costs import JudgeUsage, Prices
from hypothesis import given
from hypothesis import strategies as st
from support.commands import envserver, read_jsonl
from support.judging import judge_engine

from envserver import ConfigError, Settings
from envserver.evaluation.folders import View
from envserver.evaluation.group_files import report_of_files
from envserver.judge_config import JudgeConfig
from envserver.rollouts.costs import RolloutPrices, ScoringSpent
from envserver.running.prices import rollout_prices

ENVIRONMENT = """
from envserver import Environment, Score, Task

class Priced(Environment):
    def tasks(self, split):
        yield Task("t", {"question": "?"}, {})

    def demonstration(self, task):
        return [{"role": "assistant", "content": "yes"}]

    async def rollout(self, task, run):
        return (await run.chat([{"role": "user", "content": "?"}])).content

    async def score(self, task, result):
        ask = [{"role": "user", "content": "one"}]
        return Score(reward=float((await self.judge.chat(ask)).content))

    async def score_group(self, task, results, scores):
        for n in range(3):
            await self.judge.chat([{"role": "user", "content": str(n)}])
        return scores
"""


@pytest.mark.thorough
def test_records_hold_the_cost_of_tokens_and_of_the_judge(tmp_path: Path) -> None:
    (tmp_path / "priced.py").write_text(ENVIRONMENT)
    with judge_engine(lambda messages: "0.5") as engine:
        words = ("--env", "priced.py", "--model", "sim", "--env.group_size", 2)
        words = (*words, "--judge.base_url", engine.url, "--judge.prompt_price", 10)
        words = (*words, "--judge.completion_price", 20)
        words = (*words, "--prices.prompt", 1000, "--prices.completion", 5000)
        ran = envserver("process", *words, "--out", "priced.jsonl", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    (group,) = read_jsonl(tmp_path / "priced.jsonl")
    usages = [rollout["usage"] for rollout in group["envserver"]["rollouts"]]
    for usage in usages:
        tokens = usage["prompt_tokens"] * 1000 + usage["completion_tokens"] * 5000
        assert usage["cost"]["models"] == {"": pytest.approx(tokens / 1e6)}
        judged = usage["judge"]["prompt_tokens"] * 10 + usage["judge"]["completion_tokens"] * 20
        assert usage["cost"]["judge"] == pytest.approx(judged / 1e6)
        assert usage["scoring_seconds"] > 0
    # The equal question of both scores is paid once; the group's three questions are shared.
    judges = [usage["judge"] for usage in usages]
    assert sum(judge["calls"] for judge in judges) == 5
    assert sum(judge["cached"] for judge in judges) == 1
    assert sum(judge["prompt_tokens"] for judge in judges) == 4 * 100
    models = sum(usage["cost"]["models"][""] for usage in usages)
    assert f"{models:.4f} USD" in ran.stderr
    (report,) = report_of_files(tmp_path / "priced.jsonl", View())
    costs = report.run.costs
    total = sum(usage["cost"]["models"][""] + usage["cost"]["judge"] for usage in usages)
    assert costs is not None and costs.currency == "USD"
    assert costs.total_cost == pytest.approx(total)
    assert costs.total_judge_tokens == 4 * 110


def test_agents_are_priced_by_their_own_models(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("policy: {prompt: 1, completion: 2}\nuser: {prompt: 3, completion: 4}\n")
    agents = {"agent": None, "user": "user"}
    settings = Settings.model_validate({"prices": {"file": file}})
    prices = rollout_prices(settings, "policy", agents, None).agents
    assert {name: (one.prompt, one.completion) for name, one in prices.items()} == {
        "agent": (1, 2),
        "user": (3, 4),
    }
    flags = Settings.model_validate({"prices": {"prompt": 7, "completion": 8}})
    assert set(rollout_prices(flags, "policy", agents, None).agents) == {"agent"}
    assert rollout_prices(Settings(), "policy", agents, None) == RolloutPrices()
    judge = JudgeConfig(prompt_price=1, completion_price=1, currency="EUR")
    with pytest.raises(ConfigError, match="EUR"):
        rollout_prices(flags, "policy", {}, judge)


@given(
    st.builds(
        JudgeUsage,
        calls=st.integers(0, 99),
        cached=st.integers(0, 99),
        prompt_tokens=st.integers(0, 10**6),
        completion_tokens=st.integers(0, 10**6),
    ),
    st.integers(1, 9),
)
def test_shares_of_a_groups_scoring_add_up(judge: JudgeUsage, count: int) -> None:
    members = [ScoringSpent() for _ in range(count)]
    ScoringSpent(3.0, judge).share_with(members)
    total = JudgeUsage()
    for member in members:
        assert member.judge is not None
        total += member.judge
    assert total == judge
    assert sum(member.seconds for member in members) == pytest.approx(3.0)


def test_a_price_is_a_number_from_zero_on() -> None:
    with pytest.raises(ConfigError):
        Prices(prompt=-1.0, completion=0.0)
