"""Rewards of agents, turns and weighted components: from an environment to a trainer's rows."""

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from envserver_clients.records import ClientGroup
from envserver_records.tasks import outcome, range_as_json, range_from_json, with_totals
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.extent import examples
from support.forests import call

import envserver
from envserver import Group, Result, RewardError, RewardRange, Score, TurnReward, pack, unpack
from envserver.evaluation.report import Report
from envserver.export import group_of
from envserver.export.jsonl import group_line
from envserver.formats.atropos import group_to_atropos
from envserver.rollouts.attempt import answered_calls
from envserver.rollouts.events import GroupDelivered
from envserver.rollouts.rewards import RewardRules, checked_score, with_turn_rewards
from envserver.running.metrics import Tally

CASES = cases_of(__file__)


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("game") / "game.py"
    path.write_text(CASES["game"])
    return str(path)


@pytest.fixture(scope="module")
def played(game: str) -> bytes:
    """A packed group of two games."""
    (group,) = envserver.groups(game, model="sim", env={"group_size": 2, "total_steps": 1})
    return pack(group)


def points_of(numbers: Tally) -> dict[tuple[str, str], float]:
    """The sums of positive and of negative rewards by agent, as /metrics shows them."""
    points = asyncio.run(numbers.read())["reward_points"]
    return {(agent, sign): value for (_, agent, sign), value in points.items()}


def test_each_agent_and_turn_has_its_reward_on_the_native_wire(played: bytes) -> None:
    group = unpack(played, Group)
    numbers = Tally()
    numbers.observer("game")(GroupDelivered(group=group))
    assert points_of(numbers) == {
        ("one", "positive"): 3.0,
        ("one", "negative"): 0.0,
        ("two", "positive"): 0.0,
        ("two", "negative"): 3.0,
    }
    assert group.reward_range == RewardRange(-2.0, 2.0, 1.0)
    first, second = (trajectory.score for trajectory in group.trajectories)
    assert first.rewards == {"one": 1.5, "two": -1.375}
    assert second.rewards == {"one": 1.5, "two": -1.625}
    assert first.reward == pytest.approx((1.5 - 1.375) / 2)
    wire = ClientGroup(
        group_id="g", env="game", format="group", policy_version=-1, body=memoryview(played)
    )
    rows = wire.rows
    assert {row.agent for row in rows} == {"one", "two"}
    for row in rows:
        assert row.reward == group.trajectories[row.trajectory].score.of_agent(row.agent)
        assert len(row.turns) == 2
        assert row.components == {"fair": 1.0}
        assert set(row.calls[row.mask == 1].tolist()) <= set(row.turns)
    atropos = group_to_atropos(group, include_messages=True)
    for row, messages in zip(rows, atropos["messages"], strict=True):
        assert [one["content"] for one in messages[:-1]] == [f"{row.agent} 1"]
    assert atropos["scores"] == [row.reward for row in rows]
    for row, advantages in zip(rows, atropos["advantages"], strict=True):
        assert len(advantages) == len(row.tokens)
        assert not np.any(np.asarray(advantages)[row.calls < 0])
        trained = set(np.asarray(advantages)[row.mask == 1].round(2).tolist())
        # The first player got the same twice; of the second, the first rollout got more.
        assert trained == ({0.0} if row.agent == "one" else {[1.0, -1.0][row.trajectory]})
    one = next(row for row in rows if row.agent == "one")
    two = next(row for row in rows if row.agent == "two")
    assert [one.turn_rewards[call] for call in one.turns] == [0.25, 0.25]
    assert [two.turn_rewards[call] for call in two.turns] == [-0.5, 0.125]


def test_a_written_rollout_keeps_its_talk_without_a_row_of_its_main_agent(played: bytes) -> None:
    group = unpack(played, Group)
    for rollout in group.trajectories:
        rollout.sequences = [row for row in rollout.sequences if row.agent == "two"]
    for shown in (True, False):
        line = group_line(group, include_messages=shown, score_range="unit")
        for again in group_of(orjson.loads(line), "here").rollouts:
            assert [one["content"] for one in again.messages[:-1]] == ["one 1"] * shown
            assert {row.agent for row in again.rows} == {"two"}


def test_of_several_answers_the_one_that_the_agent_went_on_with_is_the_turn() -> None:
    full: Any = {"delivered": "full"}
    calls = [
        call(0, [1], [2], **full),
        call(1, [1], [3], choice=1, **full),
        call(2, [1], [4], choice=2, **full),
        call(3, [1, 4, 9], [5], **full),  # goes on with the third answer
        call(4, [1, 4, 9], [6], choice=1, **full),
        call(5, [7], [8], **full),  # goes on with none
        call(6, [7], [8], choice=1, delivered="none"),
    ]
    assert answered_calls(calls) == {None: [2, 3, 5]}
    both = [*calls, call(7, [1, 2, 9], [5], **full)]  # and later with the first, too
    assert answered_calls(both) == {None: [0, 3, 5, 7]}


@pytest.mark.parametrize(("ask", "says"), CASES["refused"])
def test_a_reward_that_cannot_be_ends_the_run_and_is_not_tried_again(
    game: str, tmp_path: Path, ask: str, says: str
) -> None:
    assert_ends_the_run(game, tmp_path, says, ask=ask, group_size=4)


def assert_ends_the_run(environment: object, folder: Path, says: str, **settings: Any) -> None:
    with pytest.raises(envserver.EnvserverError, match=says):
        out, env = str(folder / "out.jsonl"), {"total_steps": 8, **settings}
        envserver.process(str(environment), model="sim", out=out, env=env)
    lines = (folder / "out.failures.jsonl").read_text().splitlines()
    events = [event for line in lines if (event := orjson.loads(line)).get("attempt")]
    failed = {(event["attempt"], event["kind"], event["blame"]) for event in events}
    assert failed == {(1, "reward_error", "environment")}


@pytest.mark.thorough
def test_a_reward_in_a_sandboxed_worker_ends_the_run_and_has_no_retry(tmp_path: Path) -> None:
    path = tmp_path / "walled.py"
    path.write_text(CASES["sandboxed"])
    assert_ends_the_run(path, tmp_path, r"run\.reward is not available", group_size=2)


def evaluated(environment: str, out: Path, steps: int) -> Report:
    env = {"group_size": 2, "total_steps": steps}
    found = envserver.evaluate(environment, model="sim", env=env, out=out, no_baselines=True)
    assert isinstance(found.report, Report)
    return found.report


def test_an_evaluation_measures_each_agent(game: str, tmp_path: Path) -> None:
    report = evaluated(game, tmp_path / "out", 3)
    by_agent = report.run.by["agent"]
    means = {name: measures.mean_reward.value for name, measures in by_agent.items()}
    # Outcomes, turn rewards, and what score_group takes from the second rollout of a group.
    assert means == {"one": 1.5, "two": -1.375 - 0.125}
    assert (by_agent["one"].tasks, by_agent["one"].rollouts) == (3, 6)
    assert by_agent["one"].pass_at[1].value == 1.0
    overall = report.run.overall
    assert overall is not None and overall.mean_reward.value == 0.0
    assert "agent two" in (tmp_path / "out" / "report.md").read_text()
    assert "agent two" in (tmp_path / "out" / "report.html").read_text()


AGENTS = {"one": True, "two": True, "referee": False}
RULES = RewardRules(
    environment="game",
    range=RewardRange(-math.inf, math.inf, 1.0),
    agents=AGENTS,
    weights={"right": 1.0, "form": 0.1},
)
VALUES = st.floats(-8, 8, width=16)
TURNS = st.lists(
    st.builds(TurnReward, st.integers(0, 2), VALUES, st.sampled_from([*AGENTS, None])), max_size=6
)
RESULT = Result(calls={"one": [0, 3, 6], "two": [1, 4, 7], "referee": [2, 5, 8]})


@st.composite
def scores(draw: st.DrawFn) -> Score:
    named = draw(st.sampled_from([(), ("one", "two"), tuple(AGENTS)]))
    reward = draw(VALUES) if not named else draw(st.none() | VALUES)
    return Score(reward=reward, rewards={name: draw(VALUES) for name in named}, turns=draw(TURNS))


@given(scores())
@settings(max_examples=examples(100))
def test_an_agents_reward_is_its_outcome_and_its_turns(score: Score) -> None:
    checked = checked_score(score, RESULT, RULES)
    assert checked_score(checked, RESULT, RULES) == checked, "score_group may return it unchanged"
    final = with_totals(checked, AGENTS)
    assert unpack(pack(final), Score) == final
    single = outcome(checked, ["one", "two"])
    assert single is not None
    for agent in ("one", "two"):
        given_first = checked.rewards.get(agent, single)
        assert final.of_agent(agent) == pytest.approx(given_first + checked.turn_sum(agent))
        calls = final.call_rewards(agent)
        assert set(calls) <= set(RESULT.calls[agent])
        assert sum(calls.values()) == pytest.approx(checked.turn_sum(agent))
    turns = (checked.turn_sum("one") + checked.turn_sum("two")) / 2
    assert final.reward == pytest.approx(single + turns)


@pytest.mark.parametrize(
    ("score", "says"),
    [
        (Score(rewards={"one": 1.0, "two": 0.0, "three": 0.0}), "'three', which it does not"),
        (Score(rewards={"one": 1.0}), "no reward for the trained agent 'two'"),
        (Score(reward=math.nan), "not a finite number"),
        (Score(reward=1.0, turns=[TurnReward(0, 1.0, "four")]), "'four', which it does not"),
        (Score(reward=1.0, turns=[TurnReward(0, math.inf)]), "not a finite number"),
    ],
)
def test_a_reward_that_cannot_be_is_the_environments_error(score: Score, says: str) -> None:
    with pytest.raises(RewardError, match=says) as caught:
        checked_score(score, RESULT, RULES)
    assert caught.value.detail["bug"]


def test_weighted_components_give_the_reward() -> None:
    rules = RewardRules(environment="e", range=RewardRange(), agents={}, weights=RULES.weights)
    score = Score(components={"right": 0.5, "form": 1.0, "length": 900.0})
    assert checked_score(score, Result(), rules).reward == pytest.approx(0.6)
    with pytest.raises(RewardError, match="no component 'form'"):
        checked_score(Score(components={"right": 1.0}), Result(), rules)


def test_a_score_without_a_reward_stays_so_whatever_the_turns_gave() -> None:
    result = Result(turn_rewards=[TurnReward(0, 0.5)])
    rules = RewardRules(environment="e", range=RewardRange(), agents={}, weights={})
    unscorable = with_turn_rewards(Score(reward=None), result, rules)
    assert with_totals(checked_score(unscorable, result, rules), {}).reward is None
    scorable = with_turn_rewards(Score(reward=0.0), result, rules)
    assert with_totals(checked_score(scorable, result, rules), {}).reward == 0.5


RANGES = [
    *(RewardRange(), RewardRange(-1, 1, 1), RewardRange(-1, 1, 0.5)),
    *(RewardRange(-math.inf, math.inf, 3.0), RewardRange(0, math.inf, 10.0)),
]


@given(st.sampled_from(RANGES), st.floats(-20, 20), st.floats(-20, 20))
@settings(max_examples=examples(100))
def test_a_share_rises_up_to_a_solved_task(bounds: RewardRange, one: float, two: float) -> None:
    assert range_from_json(orjson.loads(orjson.dumps(range_as_json(bounds)))) == bounds
    low, high = sorted((one, two))
    assert 0.0 <= bounds.share(low) <= bounds.share(high) <= 1.0
    assert bounds.share(bounds.solved_at) == 1.0
    assert bounds.is_solved(one) == (one >= bounds.solved_at - 1e-8)
    if math.isfinite(bounds.low):
        assert bounds.share(bounds.low) == 0.0
