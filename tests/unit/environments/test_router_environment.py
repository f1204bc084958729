"""The environment `router`: its tasks, its agent and the sub-agents, its rewards and commands."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.router.course import as_json, course_of
from envserver_environments.router.env import Router
from envserver_environments.router.known import chain
from envserver_environments.router.loading import SAMPLE, read_problem
from support.cases import write_jsonl
from support.commands import read_jsonl
from support.scripted_run import ScriptedRun, call, played, says

from envserver import InputError, Message, Result, Task


def router(**settings: Any) -> Router:
    return Router(Router.Config(**settings))


def tasks(**settings: Any) -> dict[str, Task]:
    return {task.id: task for task in router(**settings).tasks("train")}


ROWS = read_jsonl(SAMPLE)


async def rolled(
    env: Router, task: Task, **turns: list[Message]
) -> tuple[Result, ScriptedRun, float | None]:
    """The result of what the agents say, the run, and the reward."""
    run = ScriptedRun(turns, max_turns=4)
    result = Result(output=await played(env, task, run))
    return result, run, (await env.score(task, result)).reward


async def test_a_run_is_seven_tenths_of_the_reward() -> None:
    env = router(execute=True)
    task = tasks(execute=True)["sample-two-01"]
    said = env.demonstration(task)
    # A sub-agent that is out of turns leaves the plan standing.
    result, _, reward = await rolled(env, task, router=said["router"])
    assert (result.output["executed"], result.output["answer"]) == (True, None)
    assert reward == pytest.approx(0.3)
    # So does one whose last words were cut off, whatever stands in them.
    cut_off = [says("It is \\boxed{37}", finish="length")]
    result, _, _ = await rolled(env, task, **{**said, "math": cut_off})
    result.truncated = True
    assert (await env.score(task, result)).reward == pytest.approx(0.3)


async def test_a_broken_plan_may_be_repaired_once() -> None:
    env, task = router(), tasks()["sample-three-01"]
    right, no = says(json.dumps(task.hidden["plan"])), says("no")
    _, run, reward = await rolled(env, task, router=[says("search, then math"), right])
    assert reward == pytest.approx(0.8)
    told = run.asked[1][1][-1]
    assert told["role"] == "user" and "(json)" in told["content"]
    assert run.steps == ["plan", "plan", "handoff", "handoff", "finalize"]
    for other, turns, asked, paid in (
        (env, [no, no, right], 2, 0.0),
        (env, [{**right, "finish": "length"}], 1, 0.0),
        (router(repair=False), [no, right], 1, 0.0),
        (router(repair="2"), [no, no, right], 3, 0.8**2),
    ):
        result, run, _ = await rolled(other, task, router=turns)
        assert len(run.asked) == asked
        assert (await env.score(task, result)).reward == pytest.approx(paid)
    for forged in (-3, "no", 0.5):  # a number that is none wins nothing
        output = {**result.output, "repaired": forged}
        assert (await env.score(task, Result(output=output))).reward == pytest.approx(1.0)


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
    write_jsonl(path, [*good, *bad])
    env = router(data_set="coursegpt", data_path=path)
    parts = {split: {task.id for task in env.tasks(split)} for split in ("train", "validation")}
    assert parts["train"].isdisjoint(parts["validation"])
    assert len(parts["train"]) > 30 and 3 <= len(parts["validation"]) <= 4
    assert all("row" in reason for reason in env.rows.dropped)
    task = next(iter(env.tasks("train")))
    assert task.public["profile"] == "coursegpt" and len(task.hidden["target"]) == 10
    as_graph = router(data_set="coursegpt", data_path=path, profile="graph")
    task = next(iter(as_graph.tasks("train")))
    assert (task.public["profile"], task.hidden["target"]) == ("graph", None)
    assert env.demonstration(task)["router"][0]["content"] == json.dumps(task.hidden["plan"])  # type: ignore[index]


def test_only_the_sample_has_the_documents_of_the_sample(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]))
    assert all(task.public["documents"] for task in router().tasks("train"))
    assert [task.public["documents"] for task in router(data_path=path).tasks("train")] == [[]]


def test_rows_are_read_in_all_their_shapes() -> None:
    row = course_row(1)
    tuned = {"prompt": "Route it.\nUser query:\nHow far? ", "completion": json.dumps(row)}
    assert read_problem(tuned).query == "How far?"
    assert read_problem({"gold": as_json(chain(("code",)))}).profile == "graph"
    for answer in ("1,250", 1250):
        found = read_problem({**ROWS[0], "answer": answer}).answer
        assert found == {"kind": "number", "answers": [str(answer)]}
    talk = [{"role": "user", "content": "How far?"}]
    answered = [*talk, {"role": "assistant", "content": f"```json\n{json.dumps(row)}\n```"}]
    as_texts = {key: str(value) for key, value in row.items()}
    for other in (
        {"messages": answered},
        {"prompt": talk, "completion": answered[1:]},
        {"prompt": talk, "reward_model": {"ground_truth": json.dumps(row)}},
        as_texts | {"user_query": "How far?"},
    ):
        assert read_problem(other).query == "How far?"
        assert read_problem(other).target == read_problem(tuned).target
    # As a table of several rows has them: JSON as text, and nulls for what other rows have.
    plan, result = copy.deepcopy(ROWS[0]["plan"]), {"s1": 399.5, "s2": None}
    plan["steps"][0]["args"]["q"] = None
    answer = {**ROWS[0]["answer"], "tests": None}
    table = {**ROWS[0], "plan": plan, "answer": json.dumps(answer), "results": json.dumps(result)}
    assert read_problem(table) == read_problem(ROWS[0])
    with pytest.raises(InputError, match=r"has its query or plan \(its fields: foo\)"):
        read_problem({"foo": 1})
    with pytest.raises(InputError, match="plan lacks tags"):
        read_problem({key: value for key, value in row.items() if key != "tags"})
    for wrong in (
        {"query": "q"},
        {**ROWS[0], "results": ["399.5"]},
        {"prompt": "q", "completion": "no JSON"},
        {**ROWS[0], "documents": ["x"]},
        {**ROWS[0], "answer": {"kind": "mood"}},
    ):
        with pytest.raises(InputError):
            read_problem(wrong)


async def test_a_question_may_bring_documents_and_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"title": "Pell", "text": "Pell has 12 wells."}\n')
    asked = Router.Question(question="How many wells?", answer="12", documents=path)
    env = router(**asked.settings())
    task = env.task_from_question(asked)
    plan = says(json.dumps(as_json(chain(("search",)))))
    finish = [call("finish", answer="12")]
    result, _, reward = await rolled(env, task, router=[plan], search=finish)
    assert reward == 1.0
    assert env.final_answer(result) == "12"
    result.output["answer"] = "13"
    assert (await env.score(task, result)).reward == 0.0
    unknown = env.task_from_question(Router.Question(question="How many wells?"))
    assert (await env.score(unknown, result)).reward is None
    path.write_text("[1]\n")
    with pytest.raises(InputError, match=r"notes.jsonl:1"):
        env.task_from_question(asked)


async def test_answers_to_bare_rows_are_scored() -> None:
    gold = as_json(chain(("search", "math", "code")))
    row = course_row(1)
    target = {key: row[key] for key in course_of(chain(("code",)), "")}
    env, bare = router(), {"query": "q", "plan": gold}
    scores = []
    for given, said in (
        (bare, json.dumps(gold)),
        (bare, f"```json\n{json.dumps(gold)}\n```"),
        (row, json.dumps(target)),
    ):
        result = env.response_from_row(said, [])
        scores.append(await env.score(env.task_from_row(given), result))
    result.truncated = True
    scores.append(await env.score(env.task_from_row(row), result))
    assert [score.reward for score in scores] == pytest.approx([1.0, 0.0, 1.0, 0.0])
    assert scores[1].metrics["invalid_json"] == scores[2].metrics["route_plan_exact"] == 1.0
