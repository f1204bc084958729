"""Domains read from tau2's files: which tasks are used, their splits, and what a judge decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.tau.env import Tau
from envserver_environments.tau.judging import read_verdicts, verdicts
from support.tau_talk import Seat, says, talk, tasks_of

from envserver import ConfigError, JudgeError, JudgeReply, Message, Result
from envserver.judge_config import JudgeConfig
from envserver.judges.client import ScorerJudge
from envserver.running.judging import judge_settings

JUDGED = {
    "id": "kind",
    "user_scenario": {"instructions": "Have t1 finished."},
    "evaluation_criteria": {
        "actions": [
            {"name": "update_task_status", "arguments": {"task_id": "t1", "status": "completed"}}
        ],
        "nl_assertions": ["The assistant is kind to the customer."],
        "reward_basis": ["DB", "NL_ASSERTION"],
    },
}
PLAIN = {**JUDGED, "id": "plain", "evaluation_criteria": {"actions": []}}


@pytest.fixture
def tau2(tmp_path: Path) -> Path:
    folder = tmp_path / "tau2" / "mock"
    folder.mkdir(parents=True)
    task = {"task_id": "t1", "title": "First", "status": "pending"}
    data = {"tasks": {"t1": task}, "users": {"u": {"user_id": "u", "name": "U", "tasks": ["t1"]}}}
    (folder / "db.json").write_text(json.dumps(data))
    (folder / "tasks.json").write_text(json.dumps([JUDGED, PLAIN]))
    (folder / "policy.md").write_text("Be kind.")
    return folder.parent


def test_tasks_that_need_a_judge_are_skipped_or_scored_without_him(tau2: Path) -> None:
    environment, tasks = tasks_of(domain="mock", tau2_data=tau2)
    assert list(tasks) == ["mock/plain"]
    assert environment.dropped == {"it needs a judge (nl_assertions)": 1}
    environment, tasks = tasks_of(domain="mock", tau2_data=tau2, nl_assertions="ignore")
    task = tasks["mock/kind"]
    seat = Seat(environment.demonstration(task))
    seat.says["agent"].append(says("It is done."))
    _, score = talk(environment, task, seat)
    assert score.reward == 1.0 and "nl_assertion" not in score.components
    with pytest.raises(ValueError, match=r"is for --env.nl_assertions judge"):
        Tau.Config(agents={"judge": {"base_url": "http://localhost:1"}})


class Verdicts(ScorerJudge):
    """A judge that says whether the assertions are met."""

    def __init__(self, *texts: str) -> None:
        super().__init__(None)
        self.texts = texts
        self.asked: list[str] = []

    def chat_blocking(self, messages: list[Message], **_: Any) -> JudgeReply:
        self.asked.append(json.dumps(messages))
        return JudgeReply(content=self.texts[min(len(self.asked), len(self.texts)) - 1], model="m")


@pytest.mark.parametrize("met", [True, False])
def test_the_judge_is_asked_when_a_conversation_is_scored(tau2: Path, met: bool) -> None:
    answer = {"results": [{"expectation": "kind", "reasoning": "so", "met": met}]}
    judge = Verdicts("I cannot say.", f"```json\n{json.dumps(answer)}\n```")
    environment, tasks = tasks_of(domain="mock", tau2_data=tau2, nl_assertions="judge")
    environment.judge = judge
    task = tasks["mock/kind"]
    seat = Seat(environment.demonstration(task))
    seat.says["agent"].append(says("It is done."))
    output, score = talk(environment, task, seat)
    assert score.reward == float(met) and len(judge.asked) == 2
    assert "is kind to the customer" in judge.asked[0] and "update_task_status" in judge.asked[0]
    assert "is kind to" not in json.dumps([task.public, [m for _, m, _ in seat.asked]])
    environment.judge = Verdicts("I cannot say.")
    with pytest.raises(JudgeError, match="3 times"):
        environment.score(task, Result(output=output))
    # Verdicts that were recorded with a conversation still count, and no judge is asked.
    old = Result(output={**output, "verdicts": [not met]})
    assert environment.score(task, old).reward == float(not met)
    unfinished = {**output, "messages": output["messages"][:-1]}
    assert environment.score(task, Result(output=unfinished)).reward == 0.0
    assert set(environment.agents()) == {"agent", "user"}


async def test_the_old_name_of_the_judges_settings_still_counts(tau2: Path) -> None:
    old = {"base_url": "http://localhost:1", "model_name": "big", "api_key": "sk-judge"}
    config = Tau.Config(nl_assertions="judge", agents={"judge": old})
    found = judge_settings(JudgeConfig(), config)
    assert (found.base_url, found.model_name) == ("http://localhost:1", "big")
    assert found.api_key.get_secret_value() == "sk-judge"
    new = JudgeConfig(base_url="http://localhost:2")
    assert judge_settings(new, config) is new
    assert set(Tau(config).agents()) == {"agent", "user", "judge"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"results": [{"met": true}, {"met": false}]}', [True, False]),
        ('Sure: {"results": [{"met": true, "x": 1}, {"met": true}]} so.', [True, True]),
        ('{"results": [{"met": true}]}', None),
        ('{"results": [{"met": "true"}, {"met": 1}]}', None),
        ("{" * 99999, None),
        ("", None),
    ],
)
def test_verdicts_are_read_or_not_at_all(text: str, found: Any) -> None:
    if found is None:
        with pytest.raises(ValueError):
            read_verdicts(text, 2)
    else:
        assert read_verdicts(text, 2) == found


def test_where_nothing_is_to_be_judged_nobody_is_asked() -> None:
    assert verdicts(Verdicts(), [], []) == []


def test_domains_are_mixed_and_splits_are_those_of_the_domain(tau2: Path) -> None:
    def ids(**config: Any) -> list[str]:
        return list(tasks_of(domain=["mock", "mini_telecom"], tau2_data=tau2, **config)[1])

    one, again, other = ids(), ids(), ids(seed=1)
    assert one == again != other and set(one) == set(other)
    assert {task_id.partition("/")[0] for task_id in one} == {"mock", "mini_telecom"}
    with pytest.raises(ConfigError, match="has no split 'small'"):
        ids(task_split="small")
    with pytest.raises(ValueError, match="must be of mini_"):
        Tau.Config(domain="mock,nosuch")
    assert Tau.Config(domain="mock,retail").domain == ["mock", "retail"]
    with pytest.raises(ConfigError, match="has no script"):
        tasks_of(domain="mock", tau2_data=tau2, user="script", nl_assertions="ignore")


def test_the_strict_reward_is_for_training_and_for_domains_of_ours(tau2: Path) -> None:
    def strict(domain: str, split: Any, **config: Any) -> bool:
        environment = Tau(Tau.Config(domain=domain, tau2_data=tau2, **config))
        return bool(next(environment.tasks(split)).hidden["strict"])

    assert strict("mock", "train") and strict("mini_telecom", "test")
    assert not strict("mock", "test") and not strict("mock", "train", strict=False)
