"""`envserver replay`: a recorded rollout runs again, and the first difference is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envserver_records.errors import EngineRefused
from envserver_records.records import Call, ServiceCall
from support.commands import envserver, read_jsonl
from support.in_process import Run

from envserver import EngineError, InputError, ServiceError
from envserver.rollouts.replaying import Player, RecordedServices, recorded_calls, told_calls
from envserver.running.replaying import read_record

PAIR = '''
import contextlib, os
from envserver import AgentRole, Environment, InputError, Score, Task

async def clock(arguments, caller):
    if os.environ.get("CLOCK_BROKEN"):
        raise RuntimeError("the clock is not asked again")
    if arguments["zone"] == "mars":
        raise InputError("there is no such zone")
    return {"hour": 11}

class Pair(Environment):
    """Two agents and a clock."""

    class Config(Environment.Config):
        greeting: str = "Hello"

    def agents(self):
        return {"asker": AgentRole(), "helper": AgentRole(trained=False)}

    def services(self):
        return contextlib.nullcontext({"clock": clock})

    def tasks(self, split):
        for n in range(2):
            yield Task(f"pair-{n}", {"question": f"Say {n}."}, {"answer": str(n)})

    def demonstration(self, task):
        said = {"role": "assistant", "content": task.hidden["answer"]}
        return {"asker": [said, said], "helper": [said]}

    async def rollout(self, task, run):
        hour = (await run.call_tool("clock", {"zone": "utc"}))["hour"]
        try:
            await run.call_tool("clock", {"zone": "mars"})
        except InputError as error:
            hour = f"{hour} ({error.message})"
        talk = [{"role": "user", "content": f"{self.config.greeting}, it is {hour}."}]
        for text in (task.public["question"], "Once more."):
            talk.append({"role": "user", "content": text})
            reply = await run.chat(talk, agent="asker")
            talk.append(reply.message)
        hint = await run.chat([{"role": "user", "content": reply.content}], agent="helper")
        return [reply.content, hint.content]

    def score(self, task, result):
        return Score(reward=float(task.hidden["answer"] in result.output[0]))
'''


PLAY = "replay kept.jsonl --env pair.py --rollout"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment, and a file of a rollout whose calls were kept."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "pair.py").write_text(PAIR)
    words = (
        "process --env pair.py --model sim --sim.latency_seconds 0 --env.total_steps 1 "
        "--env.group_size 1 --env.greeting Hi --tokens.keep_calls true --out kept.jsonl"
    )
    ran = envserver(*words.split(), folder=folder)
    assert ran.returncode == 0, ran.stderr
    return folder


def group_in(path: Path) -> Any:
    return read_jsonl(path)[0]["envserver"]


def rollout_id(place: Path) -> str:
    return str(group_in(place / "kept.jsonl")["rollouts"][0]["rollout_id"])


def test_in_the_debugger_all_is_as_it_was(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOCK_BROKEN", "1")
    words = f"{PLAY} {rollout_id(place)} --debug".split()
    ran = envserver(*words, folder=place, input="p task.public\nc\n")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "'question': 'Say" in ran.stdout  # the debugger stood in the agent
    assert "The same: 3 calls, the result and the score." in ran.stdout


def test_what_an_agent_says_otherwise_is_shown(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    rollout = rollout_id(place)
    said = run(f"{PLAY} {rollout} --env.greeting 'Good day'", status=1).out
    assert "DIFFERENT at call 1" in said
    assert "-Hi, it is 11 (there is no such zone)." in said
    assert "+Good day, it is 11 (there is no such zone)." in said
    assert rollout in run(f"{PLAY} nobody", status=2)


def call(agent: str | None, text: str, answer: str, **facts: Any) -> Call:
    ids = np.empty(0, np.int32)
    return Call(
        index=0, model="m", prompt_ids=ids, completion_ids=ids, logprobs=np.empty(0, np.float32),
        versions=[], exact=False, finish_reason="stop", agent=agent,
        messages=[{"role": "user", "content": text}],
        message={"role": "assistant", "content": answer}, **facts,
    )  # fmt: skip


async def ask(player: Player, text: str, line: str = "r") -> str:
    body = {"messages": [{"role": "user", "content": text}]}
    answer = await player.post("/v1/chat/completions", body, rollout_id=line, timeout_seconds=1.0)
    return str(answer["choices"][0]["message"]["content"])


async def test_each_agent_and_each_of_several_calls_at_once_finds_its_own() -> None:
    calls = [
        call("a", "one", "1"),
        call("b", "one", "b1"),
        call("a", "lost", "nobody had it", delivered="none"),
        call("a", "two", "2"),
    ]
    player = Player(recorded_calls(calls, "r", ["a", "b"]), model="m", exact=False)
    assert await ask(player, "two", "r/a") == "2"
    assert await ask(player, "one", "r/b") == "b1"
    assert player.left == 1
    with pytest.raises(EngineRefused, match="first that differs"):
        await ask(player, "three", "r/a")
    assert player.difference is not None
    assert player.difference.call == 3
    assert "-one" in player.difference.diff
    with pytest.raises(EngineError):  # it is over, whatever is asked now
        await ask(player, "one", "r/a")
    player = Player(recorded_calls([call(None, "one", "1")], "r", []), model="m", exact=False)
    assert await ask(player, "one") == "1"
    with pytest.raises(EngineRefused, match="record ends here"):
        await ask(player, "one")


async def test_services_answer_from_the_record() -> None:
    player = Player([], model="m", exact=False)
    asked = [
        ServiceCall(name="web/search", arguments={"q": "herons"}, answer=["a heron"]),
        ServiceCall(name="web/search", arguments={"q": ""}, refused="say what"),
    ]
    service = RecordedServices(asked, player).get("web/search")
    with pytest.raises(InputError, match="say what"):
        await service({"q": ""}, None)  # type: ignore[arg-type]
    assert await service({"q": "herons"}, None) == ["a heron"]  # type: ignore[arg-type]
    assert player.difference is None
    with pytest.raises(ServiceError):
        await service({"q": "herons"}, None)  # type: ignore[arg-type]
    assert player.difference is not None


def test_calls_are_read_off_a_conversation_that_only_grew() -> None:
    talk = [
        {"role": "user", "content": "an example?"},
        {"role": "assistant", "content": "an example"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "now"},
    ]
    (only,) = told_calls(talk, 1, "r")
    assert only.messages == talk[:3]
    assert only.answers[0].message == talk[3]
    with pytest.raises(InputError, match="The record has 2 of 3 calls"):
        told_calls(talk, 3, "r")


def test_where_calls_were_not_kept_each_agent_s_are_read_off_its_own_talk(place: Path) -> None:
    (group,) = read_jsonl(place / "kept.jsonl")
    facts = group["envserver"]
    (rollout,) = facts["rollouts"]
    assert facts["env_config"]["greeting"] == "Hi"
    assert [one["name"] for one in rollout["service_calls"]] == ["clock", "clock"]
    assert json.dumps(rollout["calls"]).count("Say ") == 1  # said once, kept once
    del rollout["calls"], rollout["service_calls"]
    (place / "plain.jsonl").write_text(json.dumps(group) + "\n")
    plain, kept = (
        read_record([str(place / name)], rollout_id(place))
        for name in ("plain.jsonl", "kept.jsonl")
    )
    assert (plain.kept, kept.kept) == (False, True)
    asked, told = (
        [(one.line, one.messages) for one in record.exchanges] for record in (plain, kept)
    )
    assert sorted(line for line, _ in asked) == sorted(line for line, _ in told)
    assert dict(asked) == dict(told)
