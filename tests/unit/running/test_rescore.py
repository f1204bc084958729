"""`envserver rescore`: stored rollouts with new scores, the old ones kept, nothing lost."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from envserver_records.errors import EngineRefused
from envserver_records.records import Call, ServiceCall
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.commands import envserver, read_jsonl, running
from support.extent import examples, first_of
from support.in_process import Run
from support.trajectories import sequence
from support.trajectories import trajectory as rollout
from support.views import looking_at

from envserver import EngineError, Group, InputError, Score, ServiceError, Trajectory, main
from envserver.export import group_line, group_of
from envserver.models.engine import EngineRequest
from envserver.rollouts.replaying import Player, RecordedServices, calls_from, recorded_calls
from envserver.running.replaying import read_record
from envserver.running.rescoring import rescored_line

CASES = cases_of(__file__)


def trajectory(number: int, output: str, reward: float, rows: int = 1) -> Trajectory:
    row = sequence(range(number, number + 3), [0, 1, 1])
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": output}]
    score = Score(reward=reward, components={"old": reward})
    return rollout(f"r{number}", *[row] * rows, messages=messages, output=output, score=score)


def line_of(
    task_id: str, *trajectories: Trajectory, env: str = "echo", score_range: str = "unit"
) -> bytes:
    names = {"group_id": f"{env}-{task_id}", "env": env, "task_id": task_id, "split": "test"}
    group = Group(index=0, trajectories=list(trajectories), seed=7, **names)
    return group_line(group, include_messages=True, score_range=score_range)


OLD, NEW = Path("old.jsonl"), Path("new.jsonl")
WRONG_0 = line_of("test-7-0", trajectory(0, "0", 0.0))
RUBRIC_WORDS = "--rubric rubric.py:Shy"


@pytest.fixture
def rescore(run: Run) -> Run:
    """Rescores `old.jsonl` to `new.jsonl`."""
    Path("echo.py").write_text(CASES["echo"])
    Path("rubric.py").write_text(CASES["rubric"])
    common = "rescore old.jsonl --env echo.py --out new.jsonl --processes 1"
    return lambda words="", status=0: run(f"{common} {words}", status)


def rewards() -> dict[str, list[Any]]:
    lines = [json.loads(line)["envserver"] for line in NEW.read_text().splitlines()]
    return {line["task_id"]: [one["reward"] for one in line["rollouts"]] for line in lines}


def test_the_environment_scores_again_and_what_it_has_not_is_counted(rescore: Run) -> None:
    wrong = line_of("test-7-0", trajectory(0, "0", 0.0, rows=2), trajectory(1, "9", 0.0))
    right = line_of("test-7-1", trajectory(2, "1", 1.0), score_range="pm1")
    gone = line_of("test-7-99", trajectory(3, "1", 1.0))
    OLD.write_bytes(wrong + right + gone + line_of("x", trajectory(4, "1", 1.0), env="other"))
    said = rescore()
    assert rewards() == {"test-7-0": [1.0, 0.0], "test-7-1": [1.0]}
    for part in ("1 of 3 rewards changed (1 up, 0 down)", "test-7-99", "'other'"):
        assert part in said
    new, before = json.loads(NEW.read_bytes().splitlines()[0]), json.loads(wrong)
    assert new["scores"] == [1.0, 1.0, 0.0]
    assert (new["tokens"], new["messages"]) == (before["tokens"], before["messages"])
    first = new["envserver"]["rollouts"][0]
    assert first["rescored_from"] == {"reward": 0.0, "components": {"old": 0.0}, "metrics": {}}
    assert first["metrics"] == {"new": 1.0}
    assert group_of(new, "here").rollouts[0].reward == 1.0
    assert "--resume" in rescore(status=2)  # it exists
    assert "Shy" in rescore("--rubric rubric.py:Bold --overwrite", status=2)


def test_a_rubric_that_fails_gives_no_zero_and_is_asked_again(rescore: Run) -> None:
    fine = line_of("test-7-1", trajectory(0, "1", 1.0), trajectory(1, "", 0.0))
    OLD.write_bytes(fine + line_of("test-7-2", trajectory(2, "2", 1.0), trajectory(3, "1", 0.0)))
    said = rescore(RUBRIC_WORDS, status=1)
    assert rewards() == {"test-7-1": [0.5]}
    assert "the judge does not answer" in said and "without a reward: 1 rollout" in said
    Path("mended").touch()
    with NEW.open("ab") as file:
        file.write(b'{"tokens"')  # what a killed writer leaves
    assert "1 of them from an earlier run" in rescore(f"{RUBRIC_WORDS} --resume")
    assert rewards() == {"test-7-1": [0.5], "test-7-2": [0.5, 0.0]}


def test_overwrite_keeps_the_old_file_until_a_group_is_scored(rescore: Run) -> None:
    OLD.write_bytes(WRONG_0)
    rescore()
    before = NEW.read_bytes()

    OLD.write_bytes(b"not a group\n" + WRONG_0)
    rescore("--overwrite", status=2)
    OLD.write_bytes(line_of("test-7-2", trajectory(0, "2", 1.0)))
    said = rescore("--overwrite --rubric rubric.py", status=1)
    assert "1 groups that could not be scored" in said
    assert NEW.read_bytes() == before

    others = [line_of(f"test-7-{number}", trajectory(number, "1", 0.0)) for number in (1, 2, 0)]
    OLD.write_bytes(b"".join([*others, b"not a group\n"]))
    rescore("--overwrite", status=2)
    written = NEW.read_bytes()
    OLD.write_bytes(b"".join(others))
    rescore("--resume")
    assert NEW.read_bytes().startswith(written)
    assert list(rewards()) == ["test-7-1", "test-7-2", "test-7-0"]
    names = {"echo.py", "rubric.py", "old.jsonl", "new.jsonl", "__pycache__"}
    assert {path.name for path in Path().iterdir()} <= names


def test_a_killed_overwrite_leaves_the_old_file(rescore: Run, tmp_path: Path) -> None:
    OLD.write_bytes(WRONG_0)
    rescore()
    before = NEW.read_bytes()
    Path("killer.py").write_text(CASES["killer"])
    words = "rescore old.jsonl --env killer.py --out new.jsonl --overwrite"
    with running(*words.split(), folder=tmp_path) as process:
        Path("pid.new").write_text(str(process.pid))
        Path("pid.new").rename("pid")
        assert process.end() == -signal.SIGKILL
    assert NEW.read_bytes() == before


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(1, 3), st.none() | st.floats(0, 1)), min_size=1, max_size=5))
def test_rows_stay_with_their_rollouts(given: list[tuple[int, float | None]]) -> None:
    trajectories = [trajectory(10 * at, "x", 0.5, rows) for at, (rows, _) in enumerate(given)]
    line = json.loads(line_of("t", *trajectories, score_range="pm1"))
    new = rescored_line(line, [Score(reward=reward) for _, reward in given], by="test", at=0.0)
    kept = [(at, rows, reward) for at, (rows, reward) in enumerate(given) if reward is not None]
    if new is None:
        assert not kept
        return
    group = group_of(new, "here")  # checks that rows and rollouts belong together
    found = [
        (one.rows[0].tokens.tolist()[0] // 10, len(one.rows), one.reward) for one in group.rollouts
    ]
    assert found == kept
    told = [2 * reward - 1 for _, rows, reward in kept for _ in range(rows)]
    assert new["scores"] == pytest.approx(told)


# `envserver replay`: a recorded rollout runs again, and the first difference is told --------------

PAIR = CASES["pair"]


PLAY = "replay kept.jsonl --env pair.py --rollout"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment, and a file of a rollout whose calls were kept."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "pair.py").write_text(PAIR)
    words = (
        "process --env pair.py --model sim --sim.latency_seconds 0 --env.total_steps 1 "
        "--env.group_size 1 --env.greeting Hi --env.tone loud "
        "--tokens.keep_calls true --out kept.jsonl"
    )
    ran = envserver(*words.split(), folder=folder)
    assert ran.returncode == 0, ran.stderr
    return folder


def group_in(path: Path) -> Any:
    return read_jsonl(path)[0]["envserver"]


def rollout_id(place: Path) -> str:
    return str(group_in(place / "kept.jsonl")["rollouts"][0]["rollout_id"])


@pytest.mark.thorough
def test_in_the_debugger_all_is_as_it_was(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOCK_BROKEN", "1")
    words = f"{PLAY} {rollout_id(place)} --env.greeting Hi --debug".split()
    ran = envserver(*words, folder=place, input="p task.public\nc\n")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "'question': 'Say" in ran.stdout  # the debugger stood in the agent
    assert "The same: 3 calls, the result and the score." in ran.stdout


def test_what_else_it_says_is_shown(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    rollout = rollout_id(place)
    said = run(f"{PLAY} {rollout} --env.greeting 'Good day'", status=1).out
    assert "DIFFERENT at call 1" in said
    assert "-Hi, it is 11 (there is no such zone)." in said
    assert "+Good day, it is 11 (there is no such zone)." in said
    assert rollout in run(f"{PLAY} nobody", status=2)


# What a record names is data ----------------------------------------------------------------------

TRAPS = ["./snare", "snare.py", "http://snare.invalid/v1", "snare"]
"""A folder, a file, a URL and a module: the texts of a record in turn."""
NEEDED_TO_REPLAY = ("group_id", "task_id", "split", "rollout_id", "rollouts", "messages", "agents")
SPRUNG: list[str] = []


def notice(event: str, arguments: tuple[Any, ...]) -> None:
    looks = ("import", "open", "os.listdir", "os.scandir", "socket.connect", "socket.getaddrinfo")
    if event in looks and "snare" in (about := repr(arguments)) and "traces" not in about:
        SPRUNG.append(f"{event} {about}")  # an export's own files in `traces` have the model's name


sys.addaudithook(notice)


def with_trap(value: Any, trap: str, at: tuple[Any, ...]) -> Any:
    """`value`, in which the text at `at` is `trap`."""
    if not at:
        return trap
    here = dict(value) if isinstance(value, dict) else list(value)
    here[at[0]] = with_trap(value[at[0]], trap, at[1:])
    return here


def texts_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all texts in `value`."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        if isinstance(part, str):
            yield (*at, key)
        elif isinstance(part, (dict, list)):
            yield from texts_in(part, (*at, key))


@pytest.fixture(params=first_of(0, 1, 2, 3))
def trap(request: Any) -> Callable[[], str]:
    return cycle(TRAPS[request.param :] + TRAPS[: request.param]).__next__


def numbered(line: Any, at: tuple[Any, ...]) -> Any:
    """`line` as a group of its own."""
    return with_trap(line, f"g-{'-'.join(map(str, at))}", ("envserver", "group_id"))


@pytest.fixture
def lines_with(place: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Iterator[Any]:
    """Writes `others.jsonl`; beside it is what a trap names."""
    folder = Path.cwd()
    (folder / "pair.py").write_text(PAIR)
    (folder / "snare").mkdir()
    for module in ("snare.py", "snare/env.py", "snare/__init__.py"):
        (folder / module).write_text(PAIR + f"\nPath({str(folder)!r}, 'imported').touch()\n")
    (folder / "snare" / "tokenizer.json").write_text("{}")
    monkeypatch.syspath_prepend(folder)
    (line,) = read_jsonl(place / "kept.jsonl")

    def write(change: Callable[[Any], list[Any]]) -> Any:
        (folder / "others.jsonl").write_text("\n".join(map(json.dumps, change(line))) + "\n")
        SPRUNG.clear()
        return line

    yield write
    assert SPRUNG == [] and not (folder / "imported").exists()


def test_no_text_of_a_record_is_opened_imported_or_asked(lines_with: Any, trap: Any) -> None:
    lines_with(lambda line: [with_trap(numbered(line, at), trap(), at) for at in texts_in(line)])
    for words in (
        "export others.jsonl --to html --out pages --skip_bad",
        "export others.jsonl --to traces --out traces --skip_bad",
        "verify others.jsonl --model sim",
        "rescore others.jsonl --env pair.py --out new.jsonl --processes 1 --skip_bad",
    ):
        assert main(words.split()) in (0, 1), words

    async def view() -> None:
        async with looking_at(Path("view.index"), Path("others.jsonl")) as http:
            page = (await http.get("/v1/groups", params={"limit": 256})).json()
            for group in page["groups"]:
                for part in ("", "/rollouts/0", "/rollouts/0/tokens"):
                    await http.get(f"/v1/groups/{quote(group['group_id'], safe='')}{part}")

    asyncio.run(view())


def test_a_replay_takes_no_text_of_a_record(lines_with: Any, run: Run, trap: Any) -> None:
    def all_but_needed(line: Any) -> list[Any]:
        changed = line
        changed["envserver"]["env_config"] |= {"data_path": "", "unknown": [{"": ""}]}
        for at in texts_in(line):
            if not set(NEEDED_TO_REPLAY) & set(at) and at[-2:] != ("env_config", "tone"):
                changed = with_trap(changed, trap(), at)
        return [changed]

    line = lines_with(all_but_needed)
    rollout = line["envserver"]["rollouts"][0]["rollout_id"]
    words = f"replay others.jsonl --rollout {rollout}"
    assert "not followed" in run(words, status=2)
    again = run(f"{words} --env pair.py --env.greeting Hi")
    assert "settings_differ_from_record" in again and "env.data_path" in again
    assert "The same: 3 calls" in again.out  # also the tone, which is one of the choices


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
    answer = await player.post(EngineRequest("/v1/chat/completions", body, line, 1.0))
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
    talk = CASES["talk"]
    (only,) = calls_from(talk, 1, "r")
    assert only.messages == talk[:3]
    assert only.answers[0].message == talk[3]
    with pytest.raises(InputError, match="The record has 2 of 3 calls"):
        calls_from(talk, 3, "r")


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
