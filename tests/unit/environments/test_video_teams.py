"""The environment `video`: how its agents read, answer, disagree and end, alone and in teams."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.video.env import Video
from support.commands import envserver, read_jsonl
from support.waiting import PATIENCE

from envserver import LimitReached, Reply, Result

Message = dict[str, Any]
GRAPH = {"t": 0, "triples": [["gate", "has color", "red"]]}
ROW = {
    "question": "What does he do?",
    "options": ["washes a cup", "opens the gate", "feeds a goose"],
    "answer": 1,
    "context": {
        "captions": [
            {"t0": 5 * place, "t1": 5 * place + 5, "text": text}
            for place, text in enumerate(["He walks.", "He walks.", "He opens a gate.", "A goose."])
        ],
        "transcript": [{"t0": 6, "t1": 8, "speaker": "he", "text": "Open up!"}],
        "scene_graph": [GRAPH],
    },
}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(*calls: tuple[str, Any], text: str = "") -> Message:
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {"id": f"c{place}", "type": "function", "function": {
                "name": name,
                "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
            }}
            for place, (name, arguments) in enumerate(calls)
        ],
    }  # fmt: skip


class Scripted:
    """A `run` whose agents say what they are told to; keeps all that each of them was sent."""

    def __init__(self, turns: dict[str | None, list[Message]], cut: tuple[Any, ...] = ()) -> None:
        self.turns = {name: list(messages) for name, messages in turns.items()}
        self.cut = cut
        self.max_turns = 8
        self.sent: dict[str | None, list[list[Message]]] = defaultdict(list)
        self.tools: dict[str | None, list[str]] = {}
        self.fields: dict[str | None, dict[str, Any]] = {}
        self.actions: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}

    async def chat(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        agent: str | None = None,
        **sampling: Any,
    ) -> Reply:
        self.sent[agent].append([*messages])
        self.tools[agent] = [tool["function"]["name"] for tool in tools or []]
        self.fields[agent] = sampling
        if not self.turns.get(agent):
            raise LimitReached("no more")
        message = self.turns[agent].pop(0)
        reason = "length" if agent in self.cut else "stop"
        return Reply(message["content"], message.get("tool_calls", []), reason, message)

    def log_action(
        self, tool: str, input: Any = None, output: Any = None, *, error: str = ""
    ) -> None:
        json.dumps([input, output])
        self.actions.append({"tool": tool, "input": input, "output": output})

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value

    def assert_histories_only_grow(self) -> None:
        """Each agent's messages begin with those of its call before, and its answer to them."""
        for calls in self.sent.values():
            for before, after in pairwise(calls):
                assert after[: len(before)] == before
                assert after[len(before)]["role"] == "assistant"


async def play(run: Scripted, **settings: Any) -> tuple[dict[str, Any], float | None]:
    env = Video(Video.Config(**settings))
    task = env.task_from_row(ROW)
    output = await env.rollout(task.without_hidden(), run)
    run.assert_histories_only_grow()
    if "agents" not in settings:
        assert set(run.sent) <= (set(env.agents()) or {None})
    return output, env.score(task, Result(output=output)).reward


async def test_a_single_agent_reads_and_finishes() -> None:
    run = Scripted({None: [
        call(("get_captions", {"t0": 3, "t1": 12}), ("get_transcript", {})),
        call(("search_captions", {"query": "the gate"}), ("get_scene_graph", {"t1": 2})),
        call(("get_captions", {"max_items": 2}), text="It is the gate."),
        call(("finish", {"answer": "B"}), ("get_captions", {})),
        said("never asked for"),
    ]})  # fmt: skip
    output, reward = await play(run)
    assert (output["answer"], output["text"], reward) == ("B", "It is the gate.", 1.0)
    told = [message["content"] for message in run.sent[None][-1] if message["role"] == "tool"]
    assert told == [
        "0:00:00: He walks.\n0:00:10: He opens a gate.",
        "0:00:06: he: Open up!",
        "0:00:10: He opens a gate.",
        "0:00:00: (gate, has color, red)",
        "0:00:00: He walks.\n0:00:10: He opens a gate.\n(1 more; go on from t0 = 15)",
    ]
    assert [action["tool"] for action in run.actions] == [
        "load_context", *["reason"] * 4, "finalize",
    ]  # fmt: skip
    assert (
        run.actions[-1]["output"] == output["final_answer"] == "B) opens the gate"
        and run.tools[None][-1] == "finish"
    )


@pytest.mark.parametrize(
    "bad",
    [("get_captions", {"t0": -1}), ("get_captions", {"t0": 9, "t1": 3}), ("finish", {}),
     ("get_captions", {"max_items": 61}), ("search_captions", {"query": "x", "top_k": 11}),
     ("get_transcript", {"max_items": 3}), ("open_video", {}), ("finish", "{"),
     ("route", {"next": "captions", "comment": ""})],
)  # fmt: skip
async def test_broken_calls_are_answered_and_counted(bad: tuple[str, Any]) -> None:
    run = Scripted({None: [call(bad), said("Answer: B")]})
    _, reward = await play(run)
    assert reward == 1.0 and run.metrics == {"tool_errors": 1.0}
    assert run.sent[None][-1][-1]["content"].startswith("Error: ")


async def test_what_is_cut_off_or_endless_is_no_answer() -> None:
    cut = Scripted({None: [call(("finish", {"answer": "B"}))]}, cut=(None,))
    assert (await play(cut))[1] == 0.0
    endless = Scripted({None: [call(("get_captions", {}))] * 20})
    assert (await play(endless))[1] == 0.0 and len(endless.sent[None]) == 8
    hopeless = Scripted({None: [call(("no", {}), ("no", {}))] * 20})
    assert (await play(hopeless))[1] == 0.0 and len(hopeless.sent[None]) == 5


async def test_the_text_protocol_does_the_same() -> None:
    run = Scripted({None: [
        said('THOUGHT: I look.\nTOOL_CALL: {"tool": "get_captions", "args": {"t0": 11}}'),
        said("FINAL: B"),
    ]})  # fmt: skip
    output, reward = await play(run, protocol="text")
    assert (output["answer"], reward) == ("B", 1.0) and run.tools[None] == []
    assert run.sent[None][-1][-1]["content"] == (
        "TOOL RESULT:\n0:00:10: He opens a gate.\n0:00:15: A goose."
    )


async def test_blind_asks_once_with_nothing_but_the_question() -> None:
    run = Scripted({None: [said("Answer: B")]})
    _, reward = await play(run, blind=True, mode="report")
    assert reward == 1.0 and run.tools[None] == []
    (messages,) = run.sent[None]
    assert "gate." not in json.dumps(messages) and "0:00" not in json.dumps(messages)


async def test_experts_that_agree_need_no_organizer() -> None:
    answer = call(("finish", {"answer": "B"}))
    run = Scripted(
        {"captions": [answer], "transcript": [answer], "scene_graph": [said("\\boxed{B}")]}
    )
    output, reward = await play(run, mode="report")
    assert reward == 1.0 and run.metrics == {"disagreed": 0.0}
    assert run.tools == {
        "captions": ["get_captions", "search_captions", "finish"],
        "transcript": ["get_transcript", "finish"],
        "scene_graph": ["get_scene_graph", "finish"],
    }
    assert output["experts"] == {
        "captions": "Answer: B", "transcript": "Answer: B", "scene_graph": "\\boxed{B}",
    }  # fmt: skip


@pytest.mark.parametrize("other", ["A", "cannot tell", "A and B", ""])
@pytest.mark.parametrize("schema", [False, True])
async def test_an_organizer_decides_where_experts_disagree(other: str, schema: bool) -> None:
    run = Scripted({
        "captions": [call(("finish", {"answer": "B"}), text="<think>A?</think>At 0:00:10.")],
        "transcript": [said(other)],
        "scene_graph": [said("Answer: B")],
        "organizer": [said('{"reasoning": "captions say so", "answer": "Option B"}')],
    })  # fmt: skip
    _, reward = await play(run, mode="report", organizer_schema=schema)
    assert reward == 1.0 and run.metrics["disagreed"] == 1.0
    ((_, asked),) = run.sent["organizer"]
    assert "the captions reports:\nAt 0:00:10.\nAnswer: B" in asked["content"]
    assert ("response_format" in run.fields["organizer"]) == schema
    tools = [action["tool"] for action in run.actions]
    assert tools[-2:] == ["organize", "finalize"] and tools.count("expert_report") == 3


async def test_experts_are_those_of_what_the_video_has() -> None:
    env = Video(Video.Config(mode="report"))
    task = env.task_from_row({**ROW, "context": "He opens a gate."})
    run = Scripted({"captions": [said("Answer: B")]})
    output = await env.rollout(task.without_hidden(), run)
    assert env.score(task, Result(output=output)).reward == 1.0 and list(run.sent) == ["captions"]


async def test_an_expert_that_fails_ends_the_rollout() -> None:
    run = Scripted({"captions": [said("Answer: B")], "transcript": [said("Answer: B")]})
    with pytest.raises(LimitReached):
        await play(run, mode="report")


async def test_the_organizer_of_a_star_asks_experts_again_and_again() -> None:
    run = Scripted({
        "organizer": [
            call(("route", {"next": "captions", "comment": "What happens first?"})),
            call(("route", {"next": "transcript", "comment": "Who speaks?"})),
            call(("route", {"next": "captions", "comment": "And then?"})),
            call(("route", {"next": "FINAL_ANSWER", "comment": "Seen.", "answer": "B"})),
        ],
        "captions": [
            call(("finish", {"answer": "He walks."})), call(("get_captions", {})), said("A gate."),
        ],
        "transcript": [said("He does.")],
    })  # fmt: skip
    output, reward = await play(run, mode="star")
    assert reward == 1.0 and output["experts"] == {"captions": "A gate.", "transcript": "He does."}
    assert run.tools["organizer"] == ["route"]
    reports = [m["content"] for m in run.sent["organizer"][-1] if m["role"] == "tool"]
    assert reports == ["Answer: He walks.", "He does.", "A gate."]
    users = [m["content"] for m in run.sent["captions"][-1] if m["role"] == "user"]
    assert users[0].endswith("What happens first?") and users[1] == "And then?"
    assert [a["tool"] for a in run.actions if a["tool"] != "reason"] == [
        "load_context", *["organize", "expert_report"] * 3, "organize", "finalize",
    ]  # fmt: skip


async def test_a_star_ends_after_its_rounds() -> None:
    ask = call(("route", {"next": "captions", "comment": "?"}))
    run = Scripted({"organizer": [ask] * 20, "captions": [said("B")] * 20})
    _, reward = await play(run, mode="star", max_rounds=3)
    assert reward == 0.0 and len(run.sent["organizer"]) == 3
    assert run.sent["organizer"][-1][-1]["content"].endswith("must give the final answer.)")


@pytest.mark.parametrize(
    "last",
    [call(("route", {"next": "FINAL_ANSWER", "comment": "Option B"})), said("Answer: B")],
)
async def test_a_star_may_end_in_other_words(last: Message) -> None:
    bad = call(("route", {"next": "captions", "comment": "?", "answer": "B"}))
    run = Scripted({"organizer": [bad, last]})
    _, reward = await play(run, mode="star")
    assert reward == 1.0 and run.metrics == {"tool_errors_organizer": 1.0}


async def test_a_star_speaks_the_text_protocol_too() -> None:
    route = '{"tool": "route", "args": {"next": "captions", "comment": "?"}}'
    run = Scripted({
        "organizer": [said(f"TOOL_CALL: {route}"), said("FINAL: B")],
        "captions": [said('TOOL_CALL: {"tool": "get_captions"}'), said("FINAL: a gate")],
    })  # fmt: skip
    _, reward = await play(run, mode="star", protocol="text")
    assert reward == 1.0
    assert run.sent["organizer"][-1][-1]["content"] == "TOOL RESULT:\nAnswer: a gate"


def test_agents_are_named_where_there_are_several() -> None:
    assert Video().agents() == {}
    assert Video(Video.Config(mode="star", blind=True)).agents() == {}
    team = Video(Video.Config(mode="report")).agents()
    assert list(team) == ["organizer", "captions", "transcript", "scene_graph"]
    assert all(role.trained for role in team.values())


@pytest.mark.parametrize("protocol", ["tools", "text"])
@pytest.mark.parametrize("mode", ["single", "report", "star"])
async def test_demonstrations_solve_every_task(mode: str, protocol: str) -> None:
    env = Video(Video.Config(mode=mode, protocol=protocol))
    decided = set()
    for task in env.tasks("train"):
        turns = env.demonstration(task)
        run = Scripted(dict(turns) if isinstance(turns, Mapping) else {None: turns})
        output = await env.rollout(task.without_hidden(), run)
        run.assert_histories_only_grow()
        assert env.score(task, Result(output=output)).reward == 1.0, task.id
        left = {name for name, messages in run.turns.items() if messages}
        assert left <= ({"organizer"} if mode == "report" else set())
        assert not any(name.startswith("tool_errors") for name in run.metrics)
        decided.add(bool(left))
        sent = json.dumps([*run.sent.values()])
        assert not any(word in sent for word in ("evidence", "golds", "hidden"))
    assert decided == ({True, False} if mode == "report" else {False})


def test_a_team_runs_with_the_simulated_engine_and_an_untrained_organizer(tmp_path: Path) -> None:
    ran = envserver(
        "process", "--env", "video", "--env.mode", "report", "--model", "sim",
        "--sim.solve_probability", 1, "--sim.latency_seconds", 0, "--env.total_steps", 6,
        "--env.group_size", 2, "--env.agents.organizer.trained", "false",
        "--env.include_actions", "true", "--env.data_path_to_save_groups", "out.jsonl",
        folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(tmp_path / "out.jsonl")
    rollouts = [rollout for group in groups for rollout in group["envserver"]["rollouts"]]
    assert len(rollouts) == 12 and {rollout["reward"] for rollout in rollouts} == {1.0}
    for rollout in rollouts:
        untrained = [other["agent"] for other in rollout["others"] if not other["trained"]]
        disagreed = rollout["agent_metrics"]["disagreed"] == 1.0
        assert untrained == (["organizer"] if disagreed else [])
        assert len(set(rollout["agents"])) == len(rollout["agents"]) >= 1
        assert "organizer" not in rollout["agents"]
        assert rollout["actions"][-1]["output"] == rollout["output"]["final_answer"] != ""
    assert {rollout["agent_metrics"]["disagreed"] for rollout in rollouts} == {0.0, 1.0}


def test_one_question_about_a_file_is_written_down(tmp_path: Path) -> None:
    (tmp_path / "talk.txt").write_text("0:05: a woman cuts bread\n0:12: she laughs\n")
    ran = subprocess.run(
        [sys.executable, "-m", "environments.video", "run", "--video_ctx", "talk.txt",
         "--question", "What is cut?", "--answer", "bread", "--model", "sim", "--env.mode", "star",
         "--sim.solve_probability", "1", "-o", "runs/video.traj.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = json.loads((tmp_path / "runs/video.traj.json").read_text())
    assert (told["domain"], told["final_answer"], told["metadata"]["reward"]) == (
        "video", "bread", 1.0,
    )  # fmt: skip
    tools = [action["tool"] for action in told["actions"]]
    assert tools[0] == "load_context" and tools[-1] == "finalize"
    assert {"reason", "organize", "expert_report"} <= set(tools)
