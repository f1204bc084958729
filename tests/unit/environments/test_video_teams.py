"""The environment `video`: how its agents read, answer, disagree and end, alone and in teams."""

import json
from typing import Any

import pytest
from envserver_environments.video.env import Video
from support.cases import cases_of
from support.scripted_run import ScriptedRun, call, calls, played, says

from envserver import LimitReached, Message, Result

CASES = cases_of(__file__)

ROW = CASES["row"]
FINISH = call("finish", answer="B")
"""The right answer."""


def route(to: str, comment: str = "?", **more: str) -> Message:
    return call("route", next=to, comment=comment, **more)


async def play(
    *turns: Message, row: Any = ROW, team: dict[str, list[Message]] | None = None, **settings: Any
) -> tuple[dict[str, Any], float | None, ScriptedRun]:
    """One agent that says `turns`, or the agents of a team: the output, its reward, the run."""
    env = Video(Video.Config(**settings))
    task = env.task_from_row(row)
    run = ScriptedRun(team or turns, max_turns=8)
    output = await played(env, task, run)
    run.assert_histories_only_grow()
    assert set(run.sent) <= (set(env.agents()) or {None})
    return output, env.score(task, Result(output=output)).reward, run


def tools_of(run: ScriptedRun) -> dict[Any, list[str]]:
    """The names of the tools that each agent was offered last."""
    return {
        agent: [tool["function"]["name"] for tool in fields.get("tools") or []]
        for agent, fields in run.fields.items()
    }


async def test_a_single_agent_reads_and_finishes() -> None:
    output, reward, run = await play(
        calls(("get_captions", {"t0": 3, "t1": 12}), ("get_transcript", {})),
        calls(("search_captions", {"query": "the gate"}), ("get_scene_graph", {"t1": 2})),
        call("get_captions", "It is the gate.", max_items=2),
        calls(("finish", {"answer": "B"}), ("get_captions", {})),
        says("never asked for"),
    )
    assert (output["answer"], output["text"], reward) == ("B", "It is the gate.", 1.0)
    assert run.told() == [
        "0:00:00: He walks.\n0:00:10: He opens a gate.",
        "0:00:06: he: Open up!",
        "0:00:10: He opens a gate.",
        "0:00:00: (gate, has color, red)",
        "0:00:00: He walks.\n0:00:10: He opens a gate.\n(1 more; go on from t0 = 15)",
    ]
    assert run.steps == ["load_context", *["reason"] * 4, "finalize"]
    assert run.actions[-1][2] == output["final_answer"] == "B) opens the gate"
    assert tools_of(run)[None][-1] == "finish"


@pytest.mark.parametrize(
    "bad",
    CASES["broken_calls"]
)  # fmt: skip
async def test_broken_calls_are_answered_and_counted(bad: tuple[str, Any]) -> None:
    _, reward, run = await play(calls(bad), says("Answer: B"))
    assert reward == 1.0 and run.metrics == {"tool_errors": 1.0}
    assert run.told()[-1].startswith("Error: ")


@pytest.mark.parametrize(
    ("turns", "asked"),
    [
        ([{**FINISH, "finish": "length"}], 1),  # cut off
        ([call("get_captions")] * 20, 8),  # endless
        ([calls(("no", {}), ("no", {}))] * 20, 5),  # hopeless
    ],
)
async def test_what_is_cut_off_or_endless_is_no_answer(turns: list[Message], asked: int) -> None:
    _, reward, run = await play(*turns)
    assert (reward, len(run.asked)) == (0.0, asked)


async def test_blind_asks_once_with_nothing_but_the_question() -> None:
    _, reward, run = await play(says("Answer: B"), blind=True, mode="report")
    assert (reward, tools_of(run), len(run.asked)) == (1.0, {None: []}, 1)
    assert "gate." not in json.dumps(run.asked) and "0:00" not in json.dumps(run.asked)


async def test_experts_that_agree_need_no_organizer() -> None:
    team = {"captions": [FINISH], "transcript": [FINISH], "scene_graph": [says("\\boxed{B}")]}
    output, reward, run = await play(team=team, mode="report")
    assert reward == 1.0 and run.metrics == {"disagreed": 0.0}
    assert tools_of(run) == {
        "captions": ["get_captions", "search_captions", "finish"],
        "transcript": ["get_transcript", "finish"],
        "scene_graph": ["get_scene_graph", "finish"],
    }
    assert output["experts"] == {
        "captions": "Answer: B", "transcript": "Answer: B", "scene_graph": "\\boxed{B}",
    }  # fmt: skip
    # They are those of what the video has.
    row = {**ROW, "context": "He opens a gate."}
    _, reward, run = await play(row=row, team={"captions": [says("Answer: B")]}, mode="report")
    assert (reward, list(run.sent)) == (1.0, ["captions"])
    with pytest.raises(LimitReached):  # one that fails ends the rollout
        await play(team={**team, "scene_graph": []}, mode="report")


@pytest.mark.parametrize("other", ["A", "cannot tell", "A and B", ""])
@pytest.mark.parametrize("schema", [False, True])
async def test_an_organizer_decides_where_experts_disagree(other: str, schema: bool) -> None:
    team = {
        "captions": [call("finish", "<think>A?</think>At 0:00:10.", answer="B")],
        "transcript": [says(other)],
        "scene_graph": [says("Answer: B")],
        "organizer": [says('{"reasoning": "captions say so", "answer": "Option B"}')],
    }
    _, reward, run = await play(team=team, mode="report", organizer_schema=schema)
    assert reward == 1.0 and run.metrics["disagreed"] == 1.0
    ((_, asked),) = run.sent["organizer"]
    assert "the captions reports:\nAt 0:00:10.\nAnswer: B" in asked["content"]
    assert ("response_format" in run.fields["organizer"]) == schema
    assert run.steps[-2:] == ["organize", "finalize"] and run.steps.count("expert_report") == 3


async def test_the_organizer_of_a_star_asks_experts_again_and_again() -> None:
    team = {
        "organizer": [
            route("captions", "What happens first?"),
            route("transcript", "Who speaks?"),
            route("captions", "And then?"),
            route("FINAL_ANSWER", "Seen.", answer="B"),
        ],
        "captions": [call("finish", answer="He walks."), call("get_captions"), says("A gate.")],
        "transcript": [says("He does.")],
    }
    output, reward, run = await play(team=team, mode="star")
    assert reward == 1.0 and output["experts"] == {"captions": "A gate.", "transcript": "He does."}
    assert tools_of(run)["organizer"] == ["route"]
    assert run.told("organizer") == ["Answer: He walks.", "He does.", "A gate."]
    users = run.told("captions", "user")
    assert users[0].endswith("What happens first?") and users[1] == "And then?"
    assert [step for step in run.steps if step != "reason"] == [
        "load_context", *["organize", "expert_report"] * 3, "organize", "finalize",
    ]  # fmt: skip


async def test_a_star_ends_after_its_rounds() -> None:
    team = {"organizer": [route("captions")] * 20, "captions": [says("B")] * 20}
    _, reward, run = await play(team=team, mode="star", max_rounds=3)
    assert reward == 0.0 and len(run.sent["organizer"]) == 3
    assert run.told("organizer")[-1].endswith("must give the final answer.)")
