"""Conversations of tau: who speaks, when it ends, what it is worth, and rows of recorded ones.

All on a to-do list of our own in tau2-bench's format; its tasks and what is said are in
tau_talks.json.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.tau import replays
from envserver_environments.tau.domains.loading import tau2_domain
from envserver_environments.tau.domains.world import Domain
from envserver_environments.tau.env import Tau
from envserver_environments.tau.episodes import GREETING, Episode, EpisodeRules
from envserver_environments.tau.evaluation import (
    EVALUATION_TYPES,
    Evaluation,
    EvaluationError,
    MissingVerdicts,
    Strictness,
    evaluate,
    information_given,
    pays_for_nothing,
    same_call,
    unconfirmed_writes,
)
from envserver_environments.tau.replays import play
from envserver_environments.tau.tasks import Action, read_task
from support.cases import cases_of
from support.tau_todo import todo_list

from envserver import InputError, Message, Score

CASES = cases_of(__file__, "tau_talks.json")
DONE, LOOK, WRONG = (CASES["said"][name]["tool_calls"][0] for name in ("DONE", "LOOK", "WRONG"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return todo_list(tmp_path_factory.mktemp("tau2"), CASES["tasks"])


@pytest.fixture(scope="module")
def domain(data: Path) -> Domain:
    return tau2_domain("mock", data)


def episode_of(domain: Domain, task_id: str, **rules: Any) -> Episode:
    return Episode(domain, read_task(domain.tasks[task_id]), EpisodeRules(**rules))


def played(
    domain: Domain, task_id: str, agent: list[Any], user: Any = ("HI", "BYE"), **rules: Any
) -> Episode:
    """A scripted conversation; a name is what is said by it."""
    episode = episode_of(domain, task_id, **rules)
    said = CASES["said"]
    says, answers = ([said.get(one, {"content": one}) for one in turns] for turns in (agent, user))
    play(episode, says, answers)
    return episode


def valued(domain: Domain, episode: Episode, **how: Any) -> Evaluation:
    return evaluate(domain, episode.task, episode.messages, str(episode.ending), **how)


@pytest.mark.parametrize("name", CASES["endings"])
def test_how_conversations_end(domain: Domain, name: str) -> None:
    agent, user, rules, ending = CASES["endings"][name]
    episode = played(domain, "finish", agent, user, **rules)
    assert (episode.ending, episode.speaker) == (ending, None)
    with pytest.raises(RuntimeError, match="over"):
        episode.say("More?")


def test_data_of_a_task_serve_both_sides_as_upstream(domain: Domain) -> None:
    world = episode_of(domain, "prepared").world
    assert world.agent_hash() == world.user_hash() != domain.world().agent_hash()
    error = world.call("user", "check_notifications", {})
    assert error.content == "Error: 'MockDB' object has no attribute 'notifications'"


@pytest.mark.parametrize("name", CASES["worth"])
def test_what_conversations_are_worth(domain: Domain, name: str) -> None:
    task_id, agent, how, components = CASES["worth"][name]
    found = valued(domain, played(domain, task_id, agent), **how)
    assert found.components == components
    assert found.reward == float(all(components.values()))


def test_what_is_not_ended_by_a_stop_or_not_met_is_worth_nothing(domain: Domain) -> None:
    episode = played(domain, "refuse", ["SAY"], max_steps=3)
    found = valued(domain, episode)
    assert (episode.ending, found.reward, found.basis) == ("max_steps", 0.0, None)
    found = valued(domain, played(domain, "asserted", ["SAY"]))
    assert (found.reward, found.env_assertions) == (0.0, [("assert_task_status", False)])
    assert found.upstream_error == "Task t2 not found"
    episode = played(domain, "finish", ["DONE", "SAY"])
    result = next(message for message in episode.messages if message["role"] == "tool")
    result["content"] = result["content"].replace("completed", "pending")
    with pytest.raises(EvaluationError, match="update_task_status"):
        valued(domain, episode)


@pytest.mark.parametrize("evaluation_type", ["all", *EVALUATION_TYPES])
def test_verdicts_of_the_judge_are_never_guessed(domain: Domain, evaluation_type: str) -> None:
    episode = played(domain, "judged", ["DONE", "SAY"])
    if evaluation_type in ("env", "action", "communicate", "all_ignore_basis"):
        assert valued(domain, episode, evaluation_type=evaluation_type).nl is None
        return
    with pytest.raises(MissingVerdicts):
        valued(domain, episode, evaluation_type=evaluation_type)


@pytest.mark.parametrize(("task_id", "agent", "proof"), CASES["proof"])
def test_strictly_doing_nothing_does_not_pay(
    domain: Domain, task_id: str, agent: list[Any], proof: float
) -> None:
    episode = played(domain, task_id, agent)
    found = valued(domain, episode, strictness=Strictness.STRICT)
    assert (found.components["PROOF"], found.reward) == (proof, proof)
    assert pays_for_nothing(domain, episode.task) is (task_id != "finish")


def test_strictly_telling_everything_does_not_pay(domain: Domain) -> None:
    episode = played(domain, "finish", ["DONE", " ".join(map(str, range(6000)))])
    assert valued(domain, episode).reward == 1.0
    assert valued(domain, episode, strictness=Strictness.STRICT).components["BRIEF"] == 0.0


@pytest.mark.parametrize(("info", "said", "upstream", "strict"), CASES["said_info"])
def test_what_counts_as_said(info: str, said: str, upstream: bool, strict: bool) -> None:
    messages = [{"role": "user", "content": info}, {"role": "assistant", "content": said}]
    assert information_given([info], messages) == [upstream]
    assert information_given([info], messages, Strictness.STRICT) == [strict]


@pytest.mark.parametrize(
    ("compare", "arguments", "requestor", "upstream", "strict"), CASES["same_calls"]
)
def test_which_calls_are_the_expected_ones(
    compare: list[str] | None, arguments: Any, requestor: str, upstream: bool, strict: bool
) -> None:
    action = Action(name="f", arguments={"a": 1, "b": 2}, compare_args=compare)
    call = {"name": "f", "arguments": arguments, "requestor": requestor}
    assert same_call(action, call) is upstream
    assert same_call(action, call, Strictness.STRICT) is strict
    assert not same_call(action, {**call, "name": "g"})


@pytest.mark.parametrize(("proposal", "answer", "unconfirmed"), CASES["confirmed"])
def test_changes_without_a_yes_are_counted(
    domain: Domain, proposal: str, answer: str, unconfirmed: int
) -> None:
    agent, user = [proposal, "LOOK", "DONE", "SAY"], ["HI", answer, "BYE"]
    episode = played(domain, "finish", agent, user)
    found = unconfirmed_writes(episode.messages, lambda name: name == DONE["name"])
    assert len(found) == unconfirmed


def openai_shape(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "tool", "tool_call_id": message["id"], "content": message["content"]}
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for call in message.get("tool_calls", ())
    ]
    shaped = {"role": message["role"], "content": message["content"]}
    return {**shaped, "tool_calls": calls} if calls else shaped


def scored(data: Path, row: dict[str, Any], messages: list[Message], **config: Any) -> Score:
    environment = Tau(Tau.Config(tau2_data=data, **config))
    task = environment.task_from_row({"domain": "mock", **row})
    return environment.score(task, environment.response_from_row("", messages))


@pytest.mark.parametrize(("task_id", "calls"), [("finish", 1), ("continued", 2), ("prepared", 1)])
def test_recorded_conversations_are_scored_in_both_shapes(
    domain: Domain, data: Path, task_id: str, calls: int
) -> None:
    user = ["BYE"] if task_id == "continued" else ["HI", "BYE"]
    episode = played(domain, task_id, ["DONE", "SAY"], user)
    reward = valued(domain, episode).reward
    for messages in (episode.messages, [openai_shape(m) for m in episode.messages]):
        score = scored(data, {"task_id": task_id}, messages)
        assert (score.reward, score.error) == (reward, None)
        assert (score.metrics["tool_calls"], score.metrics["tool_errors"]) == (calls, 0)


def test_what_a_row_must_be(domain: Domain, data: Path) -> None:
    row = {"task_id": "finish"}
    messages = played(domain, "finish", ["DONE", "SAY"]).messages
    assert scored(data, row, messages[:-1]).reward == 0.0
    assert scored(data, {"task_id": "judged"}, messages).metrics == {"missing_verdicts": 1.0}
    tampered = [{**m, "content": "{}"} if m["role"] == "tool" else m for m in messages]
    for broken, said in (
        (tampered, "the call returns"),
        ([messages[0], messages[2]], "it is the user's turn"),
        ([*messages, {"role": "assistant", "content": "Bye"}], "it is over"),
    ):
        assert said in str(scored(data, row, broken).error)
    for wrong, match in (({"task_id": "none"}, "no task 'none'"), ({}, "names no task")):
        with pytest.raises(InputError, match=match):
            scored(data, wrong, messages)
    nothing = played(domain, "refuse", ["SAY"]).messages
    assert scored(data, {"task_id": "refuse"}, nothing).reward == 1.0
    assert scored(data, {"task_id": "refuse"}, nothing, strict=True).reward == 0.0


def test_vectors_are_replayed_and_compared(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hi, bye, say, done = (CASES["said"][name] for name in ("HI", "BYE", "SAY", "DONE"))
    vector = {
        "id": "finish-gold",
        "domain": "mock",
        "task_id": "finish",
        "agent_script": [done, say],
        "user_script": [hi, bye],
        "messages": [{"role": "assistant", "content": GREETING}, hi, {}, {}, say, bye],
        "expected": {"termination_reason": "user_stop", "reward": 1.0, "db_match": True},
    }
    file = tmp_path / "vectors.json"
    for vectors, status, said in (
        ([vector], 0, "equal     finish-gold  reward=1"),
        ([vector, {**vector, "expected": {"reward": 0.0}}], 1, "reward: expected 0.0, is 1.0"),
        ([{**vector, "agent_script": []}], 1, "ends before the conversation"),
    ):
        file.write_text(json.dumps({"vectors": vectors}))
        assert replays.main([str(file), "--tau2-data", str(data)]) == status
        assert said in capsys.readouterr().out
    assert replays.main([str(tmp_path / "none")]) == 2
