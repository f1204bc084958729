"""The live environment `tau`: who sees what, what ends a conversation, what it is worth, which
tasks are used, and what a judge decides."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.tau.domains.loading import find_domain
from envserver_environments.tau.env import Tau
from envserver_environments.tau.episodes import GREETING, STOP
from envserver_environments.tau.evaluation import pass_hat_ks, read_verdicts, verdicts
from envserver_environments.tau.speaking import assistant_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.extent import examples
from support.scripted_run import ScriptedRun, calls, played, says
from support.tau_todo import todo_list

from envserver import (
    ConfigError,
    JudgeError,
    JudgeReply,
    Message,
    Result,
    Score,
    ServiceError,
    Task,
)
from envserver.judges.client import ScorerJudge

CASES = cases_of(__file__)
LINE = {"customer_id": "C21", "line_id": "L21"}


def tasks_of(**config: Any) -> tuple[Tau, dict[str, Task]]:
    environment = Tau(Tau.Config(**config))
    return environment, {task.id: task for task in environment.tasks("train")}


PHONE, PHONE_TASKS = tasks_of(task_split="base", domain="mini_telecom")
DATA_LEFT = PHONE_TASKS["mini_telecom/data_left"]


async def talk(
    environment: Tau, task: Task, agent: list[Message], user: list[Message] | None = None
) -> tuple[dict[str, Any], Score, ScriptedRun]:
    """The output and the score of one live conversation."""
    run = ScriptedRun({"agent": agent, "user": user or []})
    output = await played(environment, task, run)
    return output, environment.score(task, Result(output=output)), run


async def test_an_assistant_may_speak_in_texts() -> None:
    environment, _ = tasks_of(protocol="text", domain="mini_telecom", task_split="base")
    call = json.dumps({"tool": "get_data_usage", "args": LINE})
    turns = [
        says("Hm, let me see."),
        says('TOOL_CALL: {"tool": "x"}'),
        says(f"THOUGHT: 9 gigabyte?\nTOOL_CALL: {call}"),
        says("TOOL_CALL: {"),
        says("FINAL: 4.6 gigabyte."),
    ]
    output, score, run = await talk(environment, DATA_LEFT, turns)
    assert (score.reward, score.metrics["tool_errors"]) == (1.0, 1.0)
    assert output["final_answer"] == "4.6 gigabyte."
    told = run.told("agent", "user")
    assert told[1].startswith("Go on") and told[2].startswith("TOOL RESULT:\nError: Tool 'x'")
    assert "TOOL_CALL: or FINAL:" in told[-1]
    silent, score, _ = await talk(environment, DATA_LEFT, [says("Hm.")] * 3)
    assert (silent["ending"], score.reward) == ("agent_error", 0.0)


async def test_the_assistants_model_sees_nothing_of_the_customers_side() -> None:
    environment, tasks = tasks_of(user="model", domain="mini_telecom", task_split="base")
    for task in tasks.values():
        run = ScriptedRun(environment.demonstration(task))
        await played(environment, task, run)
        told = task.public["task"]["user_scenario"]["instructions"]
        secrets = [told["task_instructions"], told["known_info"]]
        shown = {
            agent: json.dumps([requests, run.fields[agent].get("tools")], ensure_ascii=False)
            for agent, requests in run.sent.items()
        }
        first = json.dumps(run.sent["user"][0], ensure_ascii=False)
        assert all(secret in first for secret in secrets)
        assert not any(secret in shown["agent"] for secret in secrets)
        assert not any(word in shown["user"] for word in ("<policy>", "send_payment_request"))
        assert "toggle_data" not in json.dumps(run.fields["agent"]["tools"])
        messages = run.sent["agent"][-1]
        assert all(m["role"] != "tool" or m["tool_call_id"] for m in messages)
    assert not find_domain("mini_telecom", None, with_tasks=False).tasks  # what a worker reads


@pytest.mark.parametrize("name", CASES["broken"])
async def test_broken_calls_are_answered_and_counted(name: str) -> None:
    tool, begins, deep, expected = CASES["broken"][name]
    turns = [calls((tool, begins + "[" * deep)), *PHONE.demonstration(DATA_LEFT)["agent"]]
    output, score, _ = await talk(PHONE, DATA_LEFT, turns)
    result = next(m for m in output["messages"] if m["role"] == "tool")
    assert result["error"] and expected in result["content"]
    assert (score.reward, score.error, score.metrics["tool_errors"]) == (1.0, None, 1.0)


LOOK = assistant_calls(("get_data_usage", LINE))
SAID = {
    "LOOK": LOOK,
    "LOOK AND SAY": {**LOOK, "content": "4.6 gigabyte left"},
    "CUT OFF": says("You have 4.6 gigabyte", finish="length"),
    "NO TOOL": calls(("x", "{}")),
    "STOP": says(STOP),
}


@pytest.mark.parametrize("name", CASES["ends"])
async def test_how_conversations_end_and_what_they_are_worth(name: str) -> None:
    ending, reward, *told = CASES["ends"][name]
    turns = [SAID.get(text) or says(text) for text, times in told for _ in range(times)]
    output, score, run = await talk(PHONE, DATA_LEFT, turns)
    assert (output["ending"], score.reward, score.error) == (ending, reward, None)
    assert run.metrics == ({"dropped_words_assistant": 1.0} if "beside" in name else {})
    if ending == "user_stop":
        assert output["final_answer"] == run.actions[-1][2] != ""


CALLS = st.tuples(
    st.sampled_from(["get_data_usage", "refuel_data", "suspend_line", "resume_line", "calc", ""]),
    st.one_of(
        st.text(max_size=8),
        st.fixed_dictionaries(
            {}, optional={"customer_id": st.just("C21"), "line_id": st.sampled_from(["L21", 3]),
                          "gb_amount": st.floats(), "reason": st.text(max_size=3)}
        ),
    ),
).map(calls)  # fmt: skip
WORDS = st.builds(says, st.sampled_from(["Yes.", "3 GB", "", "Try to restart, pay, VPN", STOP]))


@given(st.lists(st.one_of(CALLS, WORDS), max_size=12), st.sampled_from([*PHONE_TASKS.values()]))
@settings(max_examples=examples(40), deadline=None)
def test_whatever_a_model_does_the_scorer_finds_the_same(turns: list[Message], task: Task) -> None:
    output, score, _ = asyncio.run(talk(PHONE, task, turns))
    assert score.error is None and score.reward in (0.0, 1.0)
    complete = output["ending"] in ("user_stop", "agent_stop")
    assert score.metrics["complete"] == float(complete)


async def test_a_customers_model_that_says_nothing_is_our_failure() -> None:
    environment, tasks = tasks_of(user="model")
    task = next(iter(tasks.values()))
    with pytest.raises(ServiceError, match="gave no usable answer 3 times"):
        await talk(environment, task, [], [says(""), says("<think>"), says(" ")])
    user = [says("I w", finish="length"), says("Hi."), says(STOP)]
    output, _, _ = await talk(environment, task, [says("Hm")], user)
    assert output["ending"] == "user_stop"


async def test_a_person_may_ask_one_question(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("Shops open at nine.")
    asked = Tau.Question(
        question="When do shops open?", answer="nine", subdomain="telecom", context=notes
    )
    environment = Tau()
    task = environment.task_from_question(asked)
    assert task.public["domain"] in ("telecom", "mini_telecom")
    output, score, run = await talk(environment, task, [says("At nine.")])
    assert (output["final_answer"], score.reward) == ("At nine.", 1.0)
    assert run.steps == ["load_context", "user", "say", "user", "finalize"]
    system, question = run.sent["agent"][0]
    assert "Shops open at nine." in system["content"] and GREETING in system["content"]
    assert question == {"role": "user", "content": "When do shops open?"}
    assert (await talk(environment, task, [says("At ten.")]))[1].reward == 0.0


def test_pass_hat_k_of_many_tasks() -> None:
    rewards = {"a": [1.0, 1.0, 0.0], "b": [1.0, 1.0, 1.0, 1.0], "c": [0.0, 0.5, 0.0]}
    assert pass_hat_ks(rewards) == pytest.approx({1: 5 / 9, 2: 4 / 9, 3: 1 / 3})
    for none in ({}, {"a": []}):
        with pytest.raises(ValueError, match="at least one attempt"):
            pass_hat_ks(none)


# A domain from tau2's files, with a task for a judge.

FINISH = {"name": "update_task_status", "arguments": {"task_id": "t1", "status": "completed"}}
JUDGED = {
    "id": "kind",
    "user_scenario": {"instructions": "Have t1 finished."},
    "evaluation_criteria": {
        "actions": [FINISH],
        "nl_assertions": ["The assistant is kind to the customer."],
        "reward_basis": ["DB", "NL_ASSERTION"],
    },
}
PLAIN = {**JUDGED, "id": "plain", "evaluation_criteria": {"actions": []}}


@pytest.fixture
def tau2(tmp_path: Path) -> Path:
    return todo_list(tmp_path / "tau2", [JUDGED, PLAIN])


async def test_tasks_that_need_a_judge_are_skipped_or_scored_without_him(tau2: Path) -> None:
    environment, tasks = tasks_of(domain="mock", tau2_data=tau2)
    assert list(tasks) == ["mock/plain"]
    assert environment.rows.dropped == {"it needs a judge (nl_assertions)": 1}
    environment, tasks = tasks_of(domain="mock", tau2_data=tau2, nl_assertions="ignore")
    task = tasks["mock/kind"]
    turns = environment.demonstration(task)
    _, score, _ = await talk(environment, task, [*turns["agent"], says("Done.")], turns["user"])
    assert score.reward == 1.0 and "nl_assertion" not in score.components


BASIS = {**JUDGED, "id": 7, "evaluation_criteria": {"reward_basis": ["MOOD"]}}
NUMBERS = {**PLAIN, "id": 8, "evaluation_criteria": {"communicate_info": [12.5]}}
UNSCORED = {**JUDGED, "id": "unscored", "evaluation_criteria": None}


def test_odd_tasks_are_counted_and_files_of_others_refused(tmp_path: Path) -> None:
    folder = todo_list(tmp_path / "odd", [PLAIN, BASIS, NUMBERS, UNSCORED])
    environment, tasks = tasks_of(domain="mock", tau2_data=folder)
    assert set(tasks) == {"mock/plain", "mock/8"}
    causes = sorted(cause.partition(": ")[0] for cause in environment.rows.dropped)
    assert causes == ["This is not a task of tau2-bench", "it has no evaluation_criteria"]
    files: dict[str, list[Any]] = {
        "number 1 has the id 'plain' of another": [PLAIN, PLAIN],
        "number 0 has no id .its fields: instruction, outputs": [
            {"instruction": "You are", "outputs": ["x"]}
        ],
    }
    for place, (reason, rows) in enumerate(files.items()):
        with pytest.raises(ConfigError, match=reason):
            tasks_of(domain="mock", tau2_data=todo_list(tmp_path / str(place), rows))


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
async def test_the_judge_is_asked_when_a_conversation_is_scored(tau2: Path, met: bool) -> None:
    answer = {"results": [{"expectation": "kind", "reasoning": "so", "met": met}]}
    judge = Verdicts("I cannot say.", f"```json\n{json.dumps(answer)}\n```")
    environment, tasks = tasks_of(domain="mock", tau2_data=tau2, nl_assertions="judge")
    environment.judge = judge
    task = tasks["mock/kind"]
    turns = environment.demonstration(task)
    agent = [*turns["agent"], says("It is done.")]
    output, score, run = await talk(environment, task, agent, turns["user"])
    assert score.reward == float(met) and len(judge.asked) == 2
    assert "is kind to the customer" in judge.asked[0] and "update_task_status" in judge.asked[0]
    assert "is kind to" not in json.dumps([task.public, run.asked])
    environment.judge = Verdicts("I cannot say.")
    with pytest.raises(JudgeError, match="3 tries"):
        environment.score(task, Result(output=output))
    # Verdicts that were recorded with a conversation still count, and no judge is asked.
    unfinished = {**output, "messages": output["messages"][:-1]}
    for other, reward in (({**output, "verdicts": [not met]}, not met), (unfinished, 0)):
        assert environment.score(task, Result(output=other)).reward == float(reward)
    assert set(environment.agents()) == {"agent", "user"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"results": [{"met": true}, {"met": false}]}', [True, False]),
        ('Sure: {"results": [{"met": true, "x": 1}, {"met": true}]} so.', [True, True]),
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
    assert verdicts(Verdicts(), [], []) == []  # where nothing is to be judged, nobody is asked


def test_domains_are_mixed_and_a_customer_needs_a_script(tau2: Path) -> None:
    one, again, other = (
        list(tasks_of(domain=["mock", "mini_telecom"], tau2_data=tau2, seed=seed)[1])
        for seed in (0, 0, 1)
    )
    assert one == again != other and set(one) == set(other)
    assert {task_id.partition("/")[0] for task_id in one} == {"mock", "mini_telecom"}
    assert Tau.Config(domain="mock,retail").domain == ["mock", "retail"]
    with pytest.raises(ConfigError, match="has no script"):
        tasks_of(domain="mock", tau2_data=tau2, user="script", nl_assertions="ignore")


def test_the_strict_reward_is_for_training_and_for_domains_of_ours(tau2: Path) -> None:
    for domain, split, more, strict in (
        ("mock", "train", {}, True),
        ("mini_telecom", "test", {}, True),
        ("mock", "test", {}, False),
        ("mock", "train", {"strict": False}, False),
    ):
        environment = Tau(Tau.Config(domain=domain, tau2_data=tau2, **more))
        assert next(environment.tasks(split)).hidden["strict"] is strict  # type: ignore[arg-type]
