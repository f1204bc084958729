"""The environment `router`: its tasks, its agent and the sub-agents, its rewards and commands."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from envserver_environments.router.course import course_of
from envserver_environments.router.env import Router
from envserver_environments.router.known import chain
from envserver_environments.router.loading import SAMPLE, read_problem
from envserver_environments.router.matching import likeness
from envserver_environments.router.plans import Plan, as_json, plan_of
from envserver_environments.router.subagents import Brief, carry_out
from envserver_tools.calculator import calculate
from support.commands import envserver, read_jsonl

from envserver import (
    ConfigError,
    ExecResult,
    InputError,
    LimitReached,
    Message,
    Reply,
    Result,
    SandboxConfig,
    Task,
)
from envserver.sandbox import SandboxService, WatchedSandboxes


def router(**settings: Any) -> Router:
    return Router(Router.Config(**settings))


def tasks(**settings: Any) -> dict[str, Task]:
    return {task.id: task for task in router(**settings).tasks("train")}


def plan_in(task: Task) -> Plan:
    return plan_of(task.hidden["plan"])


def rows() -> list[dict[str, Any]]:
    return read_jsonl(SAMPLE)


class Played:
    """A Rollout whose models say what they are told to; it keeps what they were asked.

    Args:
        said: of each agent its answers, in order.
    """

    max_turns = 4
    rollout_id = "a-rollout"

    def __init__(self, said: dict[str, list[Message]]) -> None:
        self.asked: list[tuple[str, list[Message]]] = []
        self.actions: list[str] = []
        self._said = {agent: iter(answers) for agent, answers in said.items()}

    async def chat(self, messages: list[Message], *, agent: str, tools: Any = None) -> Reply:
        self.asked.append((agent, [*messages]))
        message = next(self._said.get(agent, iter(())), None)
        if message is None:
            raise LimitReached("There are no more turns.", limit="turns")
        cut_off = "length" if message.get("cut_off") else "stop"
        calls = message.get("tool_calls") or []
        return Reply(str(message["content"]), calls, cut_off, message)

    @contextlib.asynccontextmanager
    async def open_sandbox(self) -> AsyncIterator[Played]:
        yield self

    async def run_python(self, program: str) -> ExecResult:
        """Only for programs of the sample."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, {})
        return ExecResult(exit=0, stdout=printed.getvalue().encode())

    def log_metric(self, name: str, value: float) -> None: ...

    def log_action(
        self, tool: str, input: Any = None, output: Any = None, *, error: str = ""
    ) -> None:
        self.actions.append(tool)


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def finishes(answer: str) -> Message:
    function = {"name": "finish", "arguments": json.dumps({"answer": answer})}
    return says("", tool_calls=[{"id": "1", "type": "function", "function": function}])


def right_words(task: Task) -> dict[str, list[Message]]:
    """What each agent says so that the right plan gives the right answer."""
    said: dict[str, list[Message]] = defaultdict(list)
    said["router"].append(says(json.dumps(task.hidden["plan"])))
    for step in plan_in(task).in_order():
        result = task.hidden["results"].get(step.id, "")
        fenced = says(f"```python\n{result}\n```")
        said[step.agent].append(fenced if step.agent == "code" else finishes(result))
    return said


async def rolled(env: Router, task: Task, run: Played) -> Result:
    return Result(output=await env.rollout(task.without_hidden(), run))  # type: ignore[arg-type]


def test_the_sample_has_the_documented_tasks() -> None:
    assert Counter(row["category"] for row in rows()) == {
        "one": 12, "two": 10, "three": 8, "parallel": 4, "twice": 4, "none": 2,
    }  # fmt: skip
    plans = {row["id"]: plan_of(row["plan"]) for row in rows()}
    orders = {name: tuple(s.agent for s in plan.in_order()) for name, plan in plans.items()}
    by_category = defaultdict(list)
    for row in rows():
        by_category[row["category"]].append(orders[row["id"]])
    assert Counter(by_category["one"]) == {("math",): 4, ("code",): 4, ("search",): 4}
    assert set(by_category["two"]) == set(itertools.product(["math", "code", "search"], repeat=2))
    assert len(set(by_category["three"])) >= 6
    assert all(len(set(order)) < len(order) for order in by_category["twice"])
    assert by_category["none"] == [("search",)] * 2
    shapes = Counter((orders[name], len(plan.payloads)) for name, plan in plans.items())
    assert max(shapes.values()) <= 0.15 * len(plans)
    assert all(len(row["query"]) < 200 for row in rows())


WORDS = {
    "math": "proved|sum|solve|Calculate|inequality",
    "code": "[Pp]ython|program",
    "search": "search",
}


def test_key_words_of_an_agent_mislead() -> None:
    misleading = [row for row in rows() if "decoy" in row]
    assert len(misleading) == 8
    for row in misleading:
        assert re.search(WORDS[row["decoy"]], row["query"]), row["id"]
        assert row["decoy"] not in {step["agent"] for step in row["plan"]["steps"]}


async def test_results_of_the_sample_are_right_and_can_be_found() -> None:
    for task in tasks().values():
        results = task.hidden["results"]
        for step in plan_in(task).in_order():
            handed = [results[name] for name in step.depends_on]
            if step.tool == "calculate" and not re.search("[a-z]{3}|x", step.args["expression"]):
                assert calculate(step.args["expression"]) == results[step.id]
            if step.agent == "search" and step.id in results:
                run = Played({"search": [finishes("")]})
                words = "\n".join([step.args["q"], *map(printed_last, handed)])
                brief = Brief(task.id, words, task.public["documents"])
                await carry_out("search", brief, run)  # type: ignore[arg-type]
                shown = run.asked[0][1][-1]["content"]
                for fact in re.findall(r"\d+(?:[.,]\d+)*|[A-Z]\w+", results[step.id]):
                    spelled = "three quarters" if fact in ("3", "4") else fact
                    assert fact in shown or spelled in shown, (task.id, fact)


def printed_last(result: str) -> str:
    """What an agent hands over: of a program the last line that it prints."""
    if "print(" not in result:
        return result
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(result, {})
    return printed.getvalue().splitlines()[-1]


async def test_right_plans_of_the_sample_run_to_their_answers() -> None:
    env = router(execute=True)
    async with SandboxService(SandboxConfig(concurrent=2)) as service:
        env.sandboxes = WatchedSandboxes(service.address)
        for task in env.tasks("train"):
            run = Played(right_words(task))
            score = await env.score(task, await rolled(env, task, run))
            assert score.reward == 1.0, (task.id, score)
            if task.hidden["answer"] is None:
                assert [agent for agent, _ in run.asked] == ["router"]
                continue
            steps = [step.agent for step in plan_in(task).in_order()]
            assert [agent for agent, _ in run.asked] == ["router", *steps]
            handoffs = len(plan_in(task).payloads)
            assert run.actions == ["plan", *["handoff"] * handoffs, "finalize"]
            # A sub-agent sees its step and what was handed over, not the query.
            for _, messages in run.asked[1:]:
                assert task.public["query"] not in json.dumps(messages)


def test_no_plan_for_all_queries_pays() -> None:
    golds = [plan_in(task) for task in tasks().values()]
    for length in (1, 2, 3):
        for agents in itertools.product(["math", "code", "search"], repeat=length):
            scores = [likeness(chain(agents), gold).score for gold in golds]
            assert sum(scores) / len(scores) < 0.45, agents
            assert sum(score == 1.0 for score in scores) <= 6, agents


@pytest.mark.parametrize("profile", ["graph", "coursegpt"])
async def test_known_results_have_the_rewards_that_are_said(profile: str) -> None:
    env = router(profile=profile)
    for task in list(env.tasks("train"))[::3]:
        known = list(env.known_results(task))
        assert len(known) > 25
        for one in known:
            reward = (await env.score(task, one.result)).reward
            assert reward is not None
            assert one.least - 1e-9 <= reward <= one.most + 1e-9, (task.id, one.name, reward)


async def test_a_run_is_seven_tenths_of_the_reward() -> None:
    env = router(execute=True)
    task = tasks(execute=True)["sample-two-01"]
    for known in env.known_results(task):
        reward = (await env.score(task, known.result)).reward
        assert reward == pytest.approx(known.least) and known.least == known.most
    # A sub-agent that is out of turns leaves the plan standing.
    run = Played({"router": right_words(task)["router"]})
    result = await rolled(env, task, run)
    assert (result.output["executed"], result.output["answer"]) == (True, None)
    assert (await env.score(task, result)).reward == pytest.approx(0.3)
    # So does one whose last words were cut off, whatever stands in them.
    said = right_words(task)
    said["math"] = [says("It is \\boxed{37}", cut_off=True)]
    result = await rolled(env, task, Played(said))
    result.truncated = True
    assert (await env.score(task, result)).reward == pytest.approx(0.3)


async def test_a_broken_plan_may_be_repaired_once() -> None:
    env, task = router(), tasks()["sample-three-01"]
    right = says(json.dumps(task.hidden["plan"]))
    run = Played({"router": [says("search, then math"), right]})
    result = await rolled(env, task, run)
    assert (await env.score(task, result)).reward == pytest.approx(0.8)
    told = run.asked[1][1][-1]
    assert told["role"] == "user" and "(json)" in told["content"]
    assert run.actions == ["plan", "plan", "handoff", "handoff", "finalize"]

    twice = Played({"router": [says("no"), says("no"), right]})
    assert (await env.score(task, await rolled(env, task, twice))).reward == 0.0
    cut_off = Played({"router": [says(right["content"], cut_off=True)]})
    assert (await env.score(task, await rolled(env, task, cut_off))).reward == 0.0
    never = Played({"router": [says("no"), right]})
    assert (await env.score(task, await rolled(router(repair=False), task, never))).reward == 0.0
    thrice = Played({"router": [says("no"), says("no"), right]})
    result = await rolled(router(repair="2"), task, thrice)
    assert (await env.score(task, result)).reward == pytest.approx(0.8**2)
    for forged in (-3, "no", 0.5):  # a number that is none wins nothing
        output = {**result.output, "repaired": forged}
        counted = await env.score(task, msgspec.structs.replace(result, output=output))
        assert counted.reward == pytest.approx(1.0)
    assert (len(twice.asked), len(cut_off.asked), len(never.asked)) == (2, 1, 1)


def course_row(number: int) -> dict[str, Any]:
    plan = chain(("search", "math") if number % 2 else ("code",))
    return {
        "id": f"router_{number:04}",
        "user_query": f"Query number {number}",
        "task_summary": "A query.",
        **course_of(plan, "a query"),
        "quality_score": 90.5,
        "requires_browse": True,
    }


def test_rows_of_the_router_data_are_divided_and_bad_ones_dropped(tmp_path: Path) -> None:
    path = tmp_path / "output.jsonl"
    good = [course_row(number) for number in range(40)]
    bad = [{**course_row(90), "route_plan": ["/browser(x)"]}, {"user_query": "no plan"}]
    path.write_text("\n".join(map(json.dumps, [*good, *bad])))
    env = router(data_set="coursegpt", data_path=path)
    parts = {split: {task.id for task in env.tasks(split)} for split in ("train", "validation")}
    assert parts["train"].isdisjoint(parts["validation"])
    assert len(parts["train"]) > 30 and 3 <= len(parts["validation"]) <= 4
    assert all("The row" in reason for reason in env.dropped)
    task = next(iter(env.tasks("train")))
    assert task.public["profile"] == "coursegpt" and len(task.hidden["target"]) == 10
    as_graph = router(data_set="coursegpt", data_path=path, profile="graph")
    task = next(iter(as_graph.tasks("train")))
    assert (task.public["profile"], task.hidden["target"]) == ("graph", None)
    assert env.demonstration(task)["router"][0]["content"] == json.dumps(task.hidden["plan"])  # type: ignore[index]
    path.write_text('{"user_query": "no plan"}')
    with pytest.raises(ConfigError, match="no usable row"):
        list(env.tasks("train"))


def test_rows_are_read_in_all_their_shapes() -> None:
    row = course_row(1)
    tuned = {"prompt": "Route it.\nUser query:\nHow far? ", "completion": json.dumps(row)}
    assert read_problem(tuned).query == "How far?"
    assert read_problem({"gold": as_json(chain(("code",)))}).profile == "graph"
    assert read_problem({**rows()[0], "answer": "1,250"}).answer == {
        "kind": "number",
        "answers": ["1,250"],
    }
    for wrong in (
        {"query": "q"},
        {"prompt": "q", "completion": "no JSON"},
        {**rows()[0], "documents": ["x"]},
        {**rows()[0], "answer": {"kind": "mood"}},
    ):
        with pytest.raises(InputError):
            read_problem(wrong)


async def test_a_question_may_bring_documents_and_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"title": "Pell", "text": "Pell has 12 wells."}\n')
    asked = Router.Question(question="How many wells?", answer="12", documents=path)
    env = router(**asked.settings())
    task = env.task_from_question(asked)
    plan = as_json(chain(("search",)))
    run = Played({"router": [says(json.dumps(plan))], "search": [finishes("12")]})
    result = await rolled(env, task, run)
    assert (await env.score(task, result)).reward == 1.0
    assert env.final_answer(result) == "12"
    result.output["answer"] = "13"
    assert (await env.score(task, result)).reward == 0.0
    unknown = env.task_from_question(Router.Question(question="How many wells?"))
    assert (await env.score(unknown, result)).reward is None
    path.write_text("[1]\n")
    with pytest.raises(InputError, match="no documents"):
        env.task_from_question(asked)


def test_bare_rows_are_scored(tmp_path: Path) -> None:
    gold, single = as_json(chain(("search", "math", "code"))), as_json(chain(("search",)))
    row = course_row(1)
    target = {key: row[key] for key in course_of(chain(("code",)), "")}
    lines = [
        {"task": {"query": "q", "plan": gold}, "response": json.dumps(gold)},
        {"task": {"query": "q", "plan": gold}, "response": f"```json\n{json.dumps(gold)}\n```"},
        {"task": row, "response": json.dumps(target)},
        {"task": row, "response": json.dumps(target), "finish_reason": "length"},
        {"task": "sample-none-01", "messages": [says("?"), says(json.dumps(single))]},
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ran = envserver(
        "score", "--env", "router", "--input", "rows.jsonl", "--out", "scores.jsonl",
        folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    scores = read_jsonl(tmp_path / "scores.jsonl")
    assert [score["reward"] for score in scores] == pytest.approx([1.0, 0.0, 1.0, 0.0, 0.8])
    assert scores[1]["metrics"]["invalid_json"] == 1.0
    assert scores[2]["metrics"]["route_plan_exact"] == 1.0


@pytest.mark.thorough
def test_plans_are_run_by_agents_that_are_trained_or_not(tmp_path: Path) -> None:
    ran = envserver(
        "process", "--env", "router", "--model", "sim", "--sim.solve_probability", 1,
        "--env.execute", "true", "--env.agents.search.trained", "true", "--env.seed", 3,
        "--env.include_actions", "true", "--env.group_size", 1, "--env.total_steps", 5,
        "--env.data_path_to_save_groups", "out.jsonl", folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    known = tasks()
    for group in read_jsonl(tmp_path / "out.jsonl"):
        (rollout,) = group["envserver"]["rollouts"]
        assert group["scores"][0] == 1.0
        task = known[group["envserver"]["task_id"]]
        steps = [s.agent for s in plan_in(task).in_order() if task.hidden["answer"]]
        assert rollout["agents"] == ["router", *[agent for agent in steps if agent == "search"]]
        others = {one["agent"]: one["trained"] for one in rollout["others"]}
        assert others == {agent: agent == "search" for agent in steps}
        assert [action["tool"] for action in rollout["actions"]][-1] == "finalize"
