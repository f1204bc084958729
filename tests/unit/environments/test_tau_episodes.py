"""Conversations of tau: who speaks, when it ends, what it is worth, and rows of recorded ones.

All on a to-do list of our own in tau2-bench's format (its domain `mock`); no data are needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.tau import replay_command
from envserver_environments.tau.domains.kinds import tau2_domain
from envserver_environments.tau.domains.world import Domain
from envserver_environments.tau.env import Tau
from envserver_environments.tau.episodes import GREETING, Episode, EpisodeRules, is_user_stop
from envserver_environments.tau.evaluation import (
    EVALUATION_TYPES,
    Evaluation,
    EvaluationError,
    MissingVerdicts,
    Strictness,
    evaluate,
    information_given,
    same_call,
)
from envserver_environments.tau.evaluation.confirmation import unconfirmed_writes
from envserver_environments.tau.evaluation.rewards import pays_for_nothing
from envserver_environments.tau.replays import play
from envserver_environments.tau.tasks import Action, TauTask, read_task

from envserver import InputError, Message, Score

FINISH = {"name": "update_task_status", "arguments": {"task_id": "t1", "status": "completed"}}
DONE = {"id": "c1", **FINISH}
NOT_DONE = {"id": "c1", **FINISH, "arguments": {"task_id": "t1", "status": "pending"}}
ADDED = {"id": "h", "name": "create_task", "arguments": {"user_id": "u", "title": "T"}}
LOOK = {"id": "c0", "name": "get_users", "arguments": {}}
WRONG = {"id": "c2", "name": "nope", "arguments": {}}
HI, BYE = {"content": "Hi, please finish t1."}, {"content": "Thanks. ###STOP###"}

TASKS: list[dict[str, Any]] = [
    {"id": "finish", "evaluation_criteria": {"actions": [FINISH], "communicate_info": ["1"]}},
    {"id": "refuse", "evaluation_criteria": {"actions": []}},
    {"id": "look", "evaluation_criteria": {"actions": [{"name": "get_users", "arguments": {}}]}},
    {"id": "free", "evaluation_criteria": None},
    {"id": "talk", "evaluation_criteria": {"communicate_info": ["ok"]}},
    {
        "id": "judged",
        "evaluation_criteria": {
            "actions": [FINISH],
            "nl_assertions": ["is kind"],
            "reward_basis": ["DB", "ACTION", "NL_ASSERTION"],
        },
    },
    {
        "id": "asserted",
        "evaluation_criteria": {
            "env_assertions": [
                {
                    "env_type": "assistant",
                    "func_name": "assert_task_status",
                    "arguments": {"task_id": "t2", "expected_status": "completed"},
                }
            ],
            "reward_basis": ["ENV_ASSERTION"],
        },
    },
    {
        "id": "continued",
        "initial_state": {
            "initialization_actions": [
                {
                    "env_type": "user",
                    "func_name": "add_notification",
                    "arguments": {"notification_id": "n1", "message": "t1 is yours"},
                }
            ],
            "message_history": [
                {"role": "user", "content": "Add a task."},
                {"role": "assistant", "tool_calls": [ADDED]},
                {
                    "role": "tool",
                    "id": "h",
                    "content": '{"title":"T","task_id":"task_2","description":null,'
                    '"status":"pending"}',
                },
            ],
        },
        "evaluation_criteria": {"actions": []},
    },
    {
        "id": "prepared",
        "initial_state": {
            "initialization_data": {"agent_data": {"tasks": {"t1": {"status": "completed"}}}}
        },
        "evaluation_criteria": {"actions": []},
    },
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tau2") / "domains" / "mock"
    folder.mkdir(parents=True)
    task = {"task_id": "t1", "title": "First", "status": "pending"}
    user = {"user_id": "u", "name": "Uma", "tasks": ["t1"]}
    contents: dict[str, Any] = {
        "db": {"tasks": {"t1": task}, "users": {"u": user}},
        "tasks": TASKS,
        "split_tasks": {"base": [task["id"] for task in TASKS]},
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "policy.md").write_text("Tasks are finished when their owner says so.")
    return folder.parents[1]


@pytest.fixture(scope="module")
def domain(data: Path) -> Domain:
    return tau2_domain("mock", data)


def task_of(domain: Domain, task_id: str) -> TauTask:
    return read_task(domain.tasks[task_id])


def played(
    domain: Domain,
    task_id: str,
    agent: list[Any],
    user: list[Any] | None = None,
    rules: EpisodeRules | None = None,
) -> Episode:
    """A scripted conversation; calls alone are messages without text."""
    episode = Episode(domain, task_of(domain, task_id), rules)
    says = [said if "content" in said else {"tool_calls": [said]} for said in agent]
    play(episode, says, [HI, BYE] if user is None else user)
    return episode


def valued(domain: Domain, episode: Episode, **how: Any) -> Evaluation:
    return evaluate(domain, episode.task, episode.messages, str(episode.ending), **how)


SAY = {"content": "All 1 done."}
BOTH = {"content": "wait", "tool_calls": [DONE]}
SMALL = {"content": "###stop###"}
STOP = {"content": "###STOP###"}
ENDINGS: dict[str, tuple[list[Any], list[Any], EpisodeRules, str]] = {
    "the customer stops": ([SAY], [HI, BYE], EpisodeRules(), "user_stop"),
    "he is handed over": (
        [SAY],
        [HI, {"content": "x ###TRANSFER###"}],
        EpisodeRules(),
        "user_stop",
    ),
    "it is not his matter": ([], [{"content": "###OUT-OF-SCOPE###"}], EpisodeRules(), "user_stop"),
    "tokens are in capitals": ([SAY], [HI, SMALL], EpisodeRules(max_steps=3), "max_steps"),
    "the assistant cannot stop": ([STOP], [HI, BYE], EpisodeRules(), "user_stop"),
    "unless it may": ([STOP], [HI], EpisodeRules(agent_may_stop=True), "agent_stop"),
    "steps run out": ([DONE, SAY], [HI], EpisodeRules(max_steps=4), "max_steps"),
    "also in the step that stops": ([SAY], [HI, BYE], EpisodeRules(max_steps=3), "max_steps"),
    "steps do not run out before results": ([DONE], [HI], EpisodeRules(max_steps=2), "max_steps"),
    "too many errors": ([WRONG, WRONG], [HI], EpisodeRules(max_errors=2), "too_many_errors"),
    "errors go before steps": (
        [WRONG],
        [HI],
        EpisodeRules(max_steps=2, max_errors=1),
        "too_many_errors",
    ),
    "nothing is said": ([{"content": " "}], [HI], EpisodeRules(), "agent_error"),
    "the customer says nothing": ([], [{"content": None}], EpisodeRules(), "user_error"),
    "text and calls": ([BOTH, SAY], [HI, BYE], EpisodeRules(), "user_stop"),
    "text and calls, if that is validated": (
        [BOTH],
        [HI],
        EpisodeRules(validate=True),
        "agent_error",
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_how_conversations_end(domain: Domain, name: str) -> None:
    agent, user, rules, ending = ENDINGS[name]
    episode = played(domain, "finish", agent, user, rules)
    assert (episode.ending, episode.speaker) == (ending, None)
    with pytest.raises(RuntimeError, match="over"):
        episode.say("More?")


def test_calls_are_carried_out_for_who_makes_them(domain: Domain) -> None:
    episode = Episode(domain, task_of(domain, "continued"))
    assert episode.speaker == "assistant"
    assert episode.world.user_hash() != domain.world().user_hash()
    his = {**LOOK, "name": "check_notifications"}
    results = episode.say(None, [LOOK, {**WRONG, "arguments": "{"}, his])
    assert [result["error"] for result in results] == [False, True, True]
    assert results[1]["content"] == "Error: The arguments are not a JSON object."
    assert results[2]["content"] == "Error: Tool 'check_notifications' not found."
    assert episode.speaker == "assistant"
    episode.say("Look at your notifications.")
    (seen,) = episode.say(None, [his])
    assert '"message": "t1 is yours"' in seen["content"]
    assert episode.speaker == "user"
    assert (episode.steps, episode.errors) == (5, 2)


def test_data_of_a_task_serve_both_sides_as_upstream(domain: Domain) -> None:
    world = Episode(domain, task_of(domain, "prepared")).world
    assert world.agent_hash() == world.user_hash() != domain.world().agent_hash()
    error = world.call("user", "check_notifications", {})
    assert error.content == "Error: 'MockDB' object has no attribute 'notifications'"


def parts(**components: float) -> dict[str, float]:
    return components


YES: dict[str, Any] = {"nl_verdicts": [True]}
NO: dict[str, Any] = {"nl_verdicts": [False]}
HUNDREDS = {"content": "2,100"}
WORTH: dict[str, tuple[str, list[Any], dict[str, Any], dict[str, float]]] = {
    "done and said": ("finish", [DONE, SAY], {}, parts(DB=1, COMMUNICATE=1)),
    "done": ("finish", [DONE, {"content": "ok"}], {}, parts(DB=1, COMMUNICATE=0)),
    "said": ("finish", [SAY], {}, parts(DB=0, COMMUNICATE=1)),
    "part of a number": ("finish", [DONE, HUNDREDS], {}, parts(DB=1, COMMUNICATE=1)),
    "done twice": ("finish", [DONE, DONE, SAY], {}, parts(DB=1, COMMUNICATE=1)),
    "only the data": ("finish", [DONE, STOP], {"evaluation_type": "env"}, parts(DB=1)),
    "only calls": ("finish", [SAY], {"evaluation_type": "action"}, parts(ACTION=0)),
    "only words": ("finish", [SAY], {"evaluation_type": "communicate"}, parts(COMMUNICATE=1)),
    "only the judge": (
        "judged",
        [SAY],
        {"evaluation_type": "nl_assertions", **YES},
        parts(NL_ASSERTION=1),
    ),
    "whatever the basis": (
        "judged",
        [NOT_DONE, SAY],
        {"evaluation_type": "all_ignore_basis"},
        parts(DB=0, ACTION=0, COMMUNICATE=1),
    ),
    "the judge agrees": ("judged", [DONE, SAY], YES, parts(DB=1, ACTION=1, NL_ASSERTION=1)),
    "the judge does not": ("judged", [DONE, SAY], NO, parts(DB=1, ACTION=1, NL_ASSERTION=0)),
    "no data are expected": ("talk", [{"content": "Ok!"}], {}, parts(COMMUNICATE=1)),
    "nothing is expected": ("free", [SAY], {}, parts()),
    "doing nothing": ("refuse", [{"content": "No."}], {}, parts(DB=1, COMMUNICATE=1)),
}


@pytest.mark.parametrize("name", WORTH)
def test_what_conversations_are_worth(domain: Domain, name: str) -> None:
    task_id, agent, how, components = WORTH[name]
    found = valued(domain, played(domain, task_id, agent), **how)
    assert found.components == components
    assert found.reward == float(all(components.values()))


def test_only_what_ended_by_a_stop_is_worth_anything(domain: Domain) -> None:
    episode = played(domain, "refuse", [SAY], rules=EpisodeRules(max_steps=3))
    found = valued(domain, episode)
    assert (episode.ending, found.reward, found.basis) == ("max_steps", 0.0, None)


def test_an_assertion_that_raises_is_not_met(domain: Domain) -> None:
    found = valued(domain, played(domain, "asserted", [SAY]))
    assert found.reward == 0.0
    assert found.env_assertions == [("assert_task_status", False)]
    assert found.upstream_error == "Task t2 not found"


@pytest.mark.parametrize("evaluation_type", ["all", *EVALUATION_TYPES])
def test_verdicts_of_the_judge_are_never_guessed(domain: Domain, evaluation_type: str) -> None:
    episode = played(domain, "judged", [DONE, SAY])
    if evaluation_type in ("env", "action", "communicate", "all_ignore_basis"):
        assert valued(domain, episode, evaluation_type=evaluation_type).nl is None
        return
    with pytest.raises(MissingVerdicts):
        valued(domain, episode, evaluation_type=evaluation_type)


@pytest.mark.parametrize(
    ("task_id", "agent", "proof"),
    [
        ("refuse", [{"content": "No."}], 0.0),
        ("refuse", [WRONG, {"content": "No."}], 0.0),
        ("refuse", [LOOK, {"content": "No."}], 1.0),
        ("look", [{"content": "No."}], 0.0),
        ("look", [LOOK, {"content": "No."}], 1.0),
        ("finish", [DONE, SAY], 1.0),
    ],
)
def test_strictly_doing_nothing_does_not_pay(
    domain: Domain, task_id: str, agent: list[Any], proof: float
) -> None:
    episode = played(domain, task_id, agent)
    found = valued(domain, episode, strictness=Strictness.STRICT)
    assert (found.components["PROOF"], found.reward) == (proof, proof)
    assert pays_for_nothing(domain, episode.task) is (task_id != "finish")


def test_strictly_telling_everything_does_not_pay(domain: Domain) -> None:
    flood = {"content": " ".join(map(str, range(6000)))}
    episode = played(domain, "finish", [DONE, flood])
    assert valued(domain, episode).reward == 1.0
    assert valued(domain, episode, strictness=Strictness.STRICT).components["BRIEF"] == 0.0


@pytest.mark.parametrize(
    ("info", "said", "upstream", "strict"),
    [
        ("1000", "It is $1,000.", True, True),
        ("1,000", "It is $1,000.", False, True),
        ("5", "It is 50.", True, False),
        ("5", "It is 5.", True, True),
        ("5", "It is 5.50.", True, False),
        ("5", "It is 0.5", True, False),
        ("gold", "You are a GOLD member", True, True),
        ("gold", "marigolds", True, False),
        ("54.04", "$54.04, or less", True, True),
        ("a, b", "a, b", False, True),
    ],
)
def test_what_counts_as_said(info: str, said: str, upstream: bool, strict: bool) -> None:
    messages = [{"role": "user", "content": info}, {"role": "assistant", "content": said}]
    assert information_given([info], messages) == [upstream]
    assert information_given([info], messages, Strictness.STRICT) == [strict]


@pytest.mark.parametrize(
    ("compare", "arguments", "requestor", "upstream", "strict"),
    [
        (None, {"a": 1, "b": 2}, "assistant", True, True),
        (None, {"a": 1.0, "b": 2}, "assistant", True, True),
        (None, {"a": 1}, "assistant", True, False),
        (None, {}, "assistant", True, False),
        (None, {"a": 1, "b": 3}, "assistant", False, False),
        (None, {"a": 1, "b": 2}, "user", True, False),
        ([], {"x": 1}, "assistant", True, True),
        (["a"], {"a": 1, "b": 9}, "assistant", True, True),
        (["a"], {"b": 2}, "assistant", False, False),
    ],
)
def test_which_calls_are_the_expected_ones(
    compare: list[str] | None, arguments: Any, requestor: str, upstream: bool, strict: bool
) -> None:
    action = Action(name="f", arguments={"a": 1, "b": 2}, compare_args=compare)
    call = {"name": "f", "arguments": arguments, "requestor": requestor}
    assert same_call(action, call) is upstream
    assert same_call(action, call, Strictness.STRICT) is strict
    assert not same_call(action, {**call, "name": "g"})


@pytest.mark.parametrize(
    ("proposal", "answer", "unconfirmed"),
    [
        ("I will finish t1. Is that right?", "Yes, go ahead.", 0),
        ("I will finish it. Is that right?", "Yes.", 1),
        ("I will finish t1. Is that right?", "No, wait.", 1),
        ("I will finish t1.", "Why?", 1),
    ],
)
def test_changes_without_a_yes_are_counted(
    domain: Domain, proposal: str, answer: str, unconfirmed: int
) -> None:
    user = [HI, {"content": answer}, BYE]
    episode = played(domain, "finish", [{"content": proposal}, LOOK, DONE, SAY], user)
    found = unconfirmed_writes(episode.messages, lambda name: name == DONE["name"])
    assert len(found) == unconfirmed


def test_stop_tokens_do_not_count_beside_calls() -> None:
    assert is_user_stop({"content": "###STOP###", "tool_calls": None})
    assert not is_user_stop({"content": "###STOP###", "tool_calls": [LOOK]})
    assert not is_user_stop({"content": None})


def test_results_that_calls_cannot_have_are_seen(domain: Domain) -> None:
    episode = played(domain, "finish", [DONE, SAY])
    result = next(message for message in episode.messages if message["role"] == "tool")
    result["content"] = result["content"].replace("completed", "pending")
    with pytest.raises(EvaluationError, match="update_task_status"):
        valued(domain, episode)


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
    user = [BYE] if task_id == "continued" else [HI, BYE]
    episode = played(domain, task_id, [DONE, SAY], user)
    reward = valued(domain, episode).reward
    for messages in (episode.messages, [openai_shape(m) for m in episode.messages]):
        score = scored(data, {"task_id": task_id}, messages)
        assert (score.reward, score.error) == (reward, None)
        assert (score.metrics["tool_calls"], score.metrics["tool_errors"]) == (calls, 0)


def test_what_a_row_must_be(domain: Domain, data: Path) -> None:
    messages = played(domain, "finish", [DONE, SAY]).messages
    assert scored(data, {"task_id": "finish"}, messages[:-1]).reward == 0.0
    assert scored(data, {"task_id": "judged"}, messages).metrics == {"missing_verdicts": 1.0}
    tampered = [{**m, "content": "{}"} if m["role"] == "tool" else m for m in messages]
    assert "the call returns" in str(scored(data, {"task_id": "finish"}, tampered).error)
    out_of_turn = [messages[0], messages[2]]
    assert "it is the user's turn" in str(scored(data, {"task_id": "finish"}, out_of_turn).error)
    too_long = [*messages, {"role": "assistant", "content": "Bye"}]
    assert "it is over" in str(scored(data, {"task_id": "finish"}, too_long).error)
    with pytest.raises(InputError, match="no task 'none'"):
        scored(data, {"task_id": "none"}, messages)
    with pytest.raises(InputError, match="names no task"):
        scored(data, {}, messages)
    nothing = played(domain, "refuse", [SAY]).messages
    assert scored(data, {"task_id": "refuse"}, nothing).reward == 1.0
    assert scored(data, {"task_id": "refuse"}, nothing, strict=True).reward == 0.0


def test_vectors_are_replayed_and_compared(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vector = {
        "id": "finish-gold",
        "domain": "mock",
        "task_id": "finish",
        "agent_script": [{"tool_calls": [DONE]}, SAY],
        "user_script": [HI, BYE],
        "messages": [{"role": "assistant", "content": GREETING}, HI, {}, {}, SAY, BYE],
        "expected": {"termination_reason": "user_stop", "reward": 1.0, "db_match": True},
    }
    file = tmp_path / "vectors.json"

    def run(*vectors: Any) -> tuple[int, str]:
        file.write_text(json.dumps({"vectors": vectors}))
        status = replay_command.main([str(file), "--tau2-data", str(data)])
        return status, capsys.readouterr().out

    status, out = run(vector)
    assert status == 0
    assert "equal     finish-gold  reward=1" in out
    status, out = run(vector, {**vector, "expected": {"reward": 0.0}})
    assert status == 1
    assert "reward: expected 0.0, is 1.0" in out
    status, out = run({**vector, "agent_script": []})
    assert status == 1
    assert "ends before the conversation" in out
    assert replay_command.main([str(tmp_path / "none")]) == 2
