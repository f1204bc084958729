"""The live environment `tau`: who sees what, what ends a conversation, what it is worth."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.tau.domains.kinds import OWN, find_domain
from envserver_environments.tau.env import Tau
from envserver_environments.tau.episodes import GREETING, STOP
from envserver_environments.tau.evaluation import pass_hat_ks
from envserver_environments.tau.users import MAX_REPEATS, ScriptedCustomer
from envserver_environments.tau.wire import assistant_calls, calls_of
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import read_jsonl
from support.extent import examples
from support.tau_talk import Seat, says, talk, tasks_of

from envserver import InputError, Message, ServiceError
from envserver.cli.settings import load_settings
from envserver.running import ProcessSettings, RunSpec, alone, process_run

LINE = {"customer_id": "C21", "line_id": "L21"}


def raw_call(name: str, arguments: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    return says("", tool_calls=[{"id": "c", "type": "function", "function": function}])


@pytest.mark.parametrize("domain", OWN)
@pytest.mark.parametrize("user", ["script", "model"])
def test_every_task_of_ours_can_be_solved_by_talking(domain: str, user: Any) -> None:
    environment, tasks = tasks_of(domain=domain, user=user, task_split="base")
    assert len(tasks) >= 4
    for task in tasks.values():
        demonstrated = environment.demonstration(task)
        seat = Seat(demonstrated)
        output, score = talk(environment, task, seat)
        if (
            score.reward != 1.0
        ):  # the closing words of a demonstration may stand beside its last call
            seat = Seat({**demonstrated, "agent": [*demonstrated["agent"], _again(demonstrated)]})
            output, score = talk(environment, task, seat)
        assert (score.reward, score.error) == (1.0, None), (task.id, output)
        steps = [tool for tool, _, _ in seat.actions]
        assert steps[0] == "load_context" and steps[-1] == "finalize"
        assert {"user", "say"} <= set(steps)


def _again(demonstrated: Mapping[str, list[Message]]) -> Message:
    return says(demonstrated["agent"][-1]["content"])


def test_an_assistant_may_speak_in_texts() -> None:
    environment, tasks = tasks_of(protocol="text", domain="mini_telecom", task_split="base")
    for task in tasks.values():
        seat = Seat(environment.demonstration(task))
        _, score = talk(environment, task, seat)
        assert (score.reward, score.error) == (1.0, None), task.id
        assert all(tools is None for _, _, tools in seat.asked)
    task = tasks["mini_telecom/data_left"]
    call = json.dumps({"tool": "get_data_usage", "args": LINE})
    turns = [
        says("Hm, let me see."),
        says('TOOL_CALL: {"tool": "x"}'),
        says(f"THOUGHT: 9 gigabyte?\nTOOL_CALL: {call}"),
        says("TOOL_CALL: {"),
        says("FINAL: 4.6 gigabyte."),
    ]
    seat = Seat({"agent": turns})
    output, score = talk(environment, task, seat)
    assert (score.reward, score.metrics["tool_errors"]) == (1.0, 1.0)
    assert output["final_answer"] == "4.6 gigabyte."
    told = [message["content"] for message in seat.asked[-1][1] if message["role"] == "user"]
    assert told[1].startswith("Go on") and told[2].startswith("TOOL RESULT:\nError: Tool 'x'")
    assert "TOOL_CALL: or FINAL:" in told[-1]
    silent, score = talk(environment, task, Seat({"agent": [says("Hm.")] * 3}))
    assert (silent["ending"], score.reward) == ("agent_error", 0.0)


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_known_of_tasks_is_what_they_are_worth(strict: bool) -> None:
    environment, tasks = tasks_of(strict=strict)
    worth: Counter[str] = Counter()
    for task in tasks.values():
        for known in environment.known_results(task):
            score = environment.score(task, known.result)
            assert score.error is None
            assert known.least <= (score.reward or 0.0) <= known.most, (task.id, known.name)
            worth[known.name] += int(score.reward or 0)
    assert worth["gold"] == len(tasks) >= 9
    assert not strict or set(+worth) == {"gold"}


def test_the_assistants_model_sees_nothing_of_the_customers_side() -> None:
    environment, tasks = tasks_of(user="model", domain="mini_telecom", task_split="base")
    for task in tasks.values():
        seat = Seat(environment.demonstration(task))
        talk(environment, task, seat)
        told = task.public["task"]["user_scenario"]["instructions"]
        secrets = [told["task_instructions"], told["known_info"]]
        for agent, messages, tools in seat.asked:
            text = json.dumps([messages, tools], ensure_ascii=False)
            if agent == "user":
                assert all(secret in text for secret in secrets)
                assert "<policy>" not in text and "send_payment_request" not in text
            else:
                assert not any(secret in text for secret in secrets)
                assert "toggle_data" not in json.dumps(tools)
                assert all(m["role"] != "tool" or m["tool_call_id"] for m in messages)
        # Each side's conversation only grows: one training sequence.
        for name in ("agent", "user"):
            asked = [messages for agent, messages, _ in seat.asked if agent == name]
            for earlier, later in pairwise(asked):
                assert later[: len(earlier)] == earlier
    assert not find_domain("mini_telecom", None, with_tasks=False).tasks  # what a worker reads
    public = json.dumps([task.public for task in tasks.values()])
    assert "evaluation_criteria" not in public and "env_assertions" not in public


BROKEN: dict[str, tuple[Message, str]] = {
    "no JSON": (raw_call("get_data_usage", "{"), "not a JSON object"),
    "no object": (raw_call("get_data_usage", "[1]"), "not a JSON object"),
    "not a number": (raw_call("get_data_usage", '{"customer_id": NaN}'), "not a JSON object"),
    "half a letter": (raw_call("get_details_by_id", '{"id": "\\ud800"}'), "not a JSON object"),
    "a key twice": (raw_call("get_details_by_id", '{"id": 1, "id": 2}'), "not a JSON object"),
    "deep": (raw_call("get_details_by_id", '{"id":' + "[" * 9999), "not a JSON object"),
    "too few": (raw_call("get_data_usage", '{"customer_id": "C21"}'), "missing 1 required"),
    "too many": (raw_call("get_details_by_id", '{"id": "C21", "x": 1}'), "unexpected keyword"),
    "a huge number": (raw_call("get_details_by_id", '{"id": 1' + "0" * 99 + "}"), "Error"),
    "of the customer": (raw_call("toggle_data", "{}"), "Tool 'toggle_data' not found"),
    "unknown": (raw_call("x", "{}"), "Tool 'x' not found"),
    "without a name": (raw_call("", ""), "Tool '' not found"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_calls_are_answered_and_counted(name: str) -> None:
    message, expected = BROKEN[name]
    environment, tasks = tasks_of(task_split="base", domain="mini_telecom")
    task = tasks["mini_telecom/data_left"]
    seat = Seat({"agent": [message, *environment.demonstration(task)["agent"]]})
    output, score = talk(environment, task, seat)
    result = next(m for m in output["messages"] if m["role"] == "tool")
    assert result["error"] and expected in result["content"]
    assert (score.reward, score.error, score.metrics["tool_errors"]) == (1.0, None, 1.0)


LOOK = assistant_calls(("get_data_usage", LINE))
THINKS = "<think>Is it 9 gigabyte?</think> You have 4.6 gigabyte left."
ENDS: dict[str, tuple[list[Message], str, float]] = {
    "right": ([LOOK, says("You have 4.6 gigabyte left.")], "user_stop", 1.0),
    "thoughts are not heard": ([LOOK, says(THINKS)], "user_stop", 1.0),
    "only thought": ([LOOK, says("<think>4.6 gigabyte"), says("")], "agent_error", 0.0),
    "nothing said": ([LOOK, says(" ")], "agent_error", 0.0),
    "cut off": ([LOOK, says("You have 4.6 gigabyte", finish="length")], "cut_off", 0.0),
    "no more turns": ([LOOK], "limit", 0.0),
    "words beside a call": ([{**LOOK, "content": "4.6 gigabyte left"}], "limit", 0.0),
    "within a number": ([LOOK, says("You have 14.6 gigabyte left.")], "user_stop", 0.0),
    "it stops by itself": ([LOOK, says(STOP)], "limit", 0.0),
    "too many errors": ([raw_call("x", "{}")] * 10, "too_many_errors", 0.0),
    "too many words": ([LOOK] * 60, "max_steps", 0.0),
    "the customer gives up": ([LOOK, *[says("Hm.")] * 9], "user_stop", 0.0),
}


@pytest.mark.parametrize("name", ENDS)
def test_how_conversations_end_and_what_they_are_worth(name: str) -> None:
    turns, ending, reward = ENDS[name]
    environment, tasks = tasks_of(task_split="base", domain="mini_telecom")
    task = tasks["mini_telecom/data_left"]
    seat = Seat({"agent": turns})
    output, score = talk(environment, task, seat)
    assert (output["ending"], score.reward, score.error) == (ending, reward, None)
    assert seat.metrics == ({"dropped_words_assistant": 1.0} if "beside" in name else {})
    if ending == "user_stop":
        assert output["final_answer"] == seat.actions[-1][2] != ""


def test_whole_numbers_are_taken_for_integers_and_worlds_are_fresh() -> None:
    environment, tasks = tasks_of(task_split="base", domain="mini_telecom")
    task = tasks["mini_telecom/data_used_up"]
    for _ in range(2):
        seat = Seat(environment.demonstration(task))
        assert talk(environment, task, seat)[1].metrics["tool_errors"] == 0


CALLS = st.builds(
    raw_call,
    st.sampled_from(["get_data_usage", "refuel_data", "suspend_line", "resume_line", "calc", ""]),
    st.one_of(
        st.text(max_size=8),
        st.fixed_dictionaries(
            {}, optional={"customer_id": st.just("C21"), "line_id": st.sampled_from(["L21", 3]),
                          "gb_amount": st.floats(), "reason": st.text(max_size=3)}
        ).map(json.dumps),
    ),
)  # fmt: skip
WORDS = st.builds(says, st.sampled_from(["Yes.", "3 GB", "", "Try to restart, pay, VPN", STOP]))


@given(st.lists(st.one_of(CALLS, WORDS), max_size=12), st.integers(0, 11))
@settings(max_examples=examples(40), deadline=None)
def test_whatever_a_model_does_the_scorer_finds_the_same(turns: list[Message], place: int) -> None:
    environment, tasks = TASKS
    task = list(tasks.values())[place]
    output, score = talk(environment, task, Seat({"agent": turns}))
    assert score.error is None and score.reward in (0.0, 1.0)
    complete = output["ending"] in ("user_stop", "agent_stop")
    assert score.metrics["complete"] == float(complete)


TASKS = tasks_of(task_split="base", domain="mini_telecom")


def test_scripted_customers_follow_the_first_rule_that_fits() -> None:
    script = [
        {"if": "pin|code", "calls": [{"name": "look", "arguments": {}}], "say": "It is {result}."},
        {"if": "always", "say": "Hello?"},
    ]
    customer = ScriptedCustomer(script, [{"role": "assistant", "content": GREETING}])
    assert customer.say().content == "Hello?"
    customer.hear("Your PIN?")
    (call,) = customer.say().calls
    assert (call["name"], call["arguments"]) == ("look", {})
    customer.receive([{"role": "tool", "content": "42"}])
    assert customer.say().content == "It is 42."
    customer.hear("Well.")
    said = [customer.say().content or "" for _ in range(MAX_REPEATS)]
    assert said[:-1] == ["Hello?"] * (MAX_REPEATS - 1) and STOP in said[-1]


def test_a_customers_model_that_says_nothing_is_our_failure() -> None:
    environment, tasks = tasks_of(user="model")
    task = next(iter(tasks.values()))
    with pytest.raises(ServiceError, match="gave no usable answer 3 times"):
        talk(environment, task, Seat({"user": [says(""), says("<think>"), says(" ")]}))
    cut = Seat(
        {"user": [says("I w", finish="length"), says("Hi."), says(STOP)], "agent": [says("Hm")]}
    )
    assert talk(environment, task, cut)[0]["ending"] == "user_stop"


def test_a_person_may_ask_one_question(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Shops open at nine.")
    asked = Tau.Question(
        question="When do shops open?", answer="nine", subdomain="telecom",
        context=tmp_path / "notes.txt",
    )  # fmt: skip
    environment = Tau()
    task = environment.task_from_question(asked)
    assert task.public["domain"] in ("telecom", "mini_telecom")
    seat = Seat({"agent": [says("At nine.")]})
    output, score = talk(environment, task, seat)
    assert (output["final_answer"], score.reward) == ("At nine.", 1.0)
    assert [tool for tool, _, _ in seat.actions] == [
        "load_context", "user", "say", "user", "finalize",
    ]  # fmt: skip
    system, question = seat.asked[0][1]
    assert "Shops open at nine." in system["content"] and GREETING in system["content"]
    assert question == {"role": "user", "content": "When do shops open?"}
    assert talk(environment, task, Seat({"agent": [says("At ten.")]}))[1].reward == 0.0
    with pytest.raises(InputError, match="There is no domain"):
        environment.task_from_question(Tau.Question(question="?", subdomain="nosuch"))
    with pytest.raises(InputError, match="cannot be read"):
        environment.task_from_question(
            Tau.Question(question="?", subdomain="mini_telecom", context=tmp_path / "none")
        )


def test_what_a_model_calls_can_be_read_again() -> None:
    message = assistant_calls(("f", {"a": 1.5, "b": ["ä"]}), ("g", {}))
    assert [(call["name"], call["arguments"]) for call in calls_of(message["tool_calls"])] == [
        ("f", {"a": 1.5, "b": ["ä"]}),
        ("g", {}),
    ]


def test_pass_hat_k_of_many_tasks() -> None:
    rewards = {"a": [1.0, 1.0, 0.0], "b": [1.0, 1.0, 1.0, 1.0], "c": [0.0, 0.5, 0.0]}
    assert pass_hat_ks(rewards) == pytest.approx({1: 5 / 9, 2: 4 / 9, 3: 1 / 3})
    for none in ({}, {"a": []}):
        with pytest.raises(ValueError, match="at least one attempt"):
            pass_hat_ks(none)


@pytest.mark.parametrize("user", ["script", "model"])
async def test_process_gives_rows_of_the_assistant_only(tmp_path: Path, user: str) -> None:
    output = tmp_path / "out.jsonl"
    words = [
        *("--env", "tau", "--model", "sim", "--sim.latency_seconds", "0", "--env.user", user),
        *("--sim.solve_probability", "1", "--env.group_size", "2", "--env.total_steps", "2"),
        *("--env.include_actions", "--env.data_path_to_save_groups", str(output)),
    ]
    loaded = load_settings(words, settings_class=ProcessSettings, environ={}, folder=tmp_path)
    line = RunSpec(loaded, "tau", Tau)
    await process_run([alone(line)]).run()
    groups = read_jsonl(output)
    assert [group["scores"] for group in groups] == [[1.0, 1.0]] * 2
    for rollout in (one for group in groups for one in group["envserver"]["rollouts"]):
        assert rollout["agents"] == ["agent"] and rollout["flags"] == []
        assert [one["agent"] for one in rollout["others"]] == (["user"] if user == "model" else [])
        assert rollout["actions"][0]["tool"] == "load_context"
        assert rollout["actions"][-1]["tool"] == "finalize"
