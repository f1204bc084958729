"""`run`: one question, its readable record in a file; and what is a good record."""

import asyncio
import contextlib
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from envserver_environments.swe.repositories import asked_task
from envserver_records.records import Trajectory, pack
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.commands import typed
from support.engine_stand_in import fake_vllm
from support.extent import examples
from support.terminal import Terminal
from support.trajectories import trajectory
from support.waiting import PATIENCE

from envserver import InputError, Score, main
from envserver.actions import CUT, MAX_FIELD_BYTES, MAX_STEPS, Steps, batch, encode
from envserver.export import problems_of
from envserver.export.unified import unified

CASES = cases_of(__file__)

SIM = "--model sim --sim.latency_seconds 0"
COMMAND = "```bash\nprintf 'new\\n' > note.txt; echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    assert problems_of(document) == []
    return document


def test_a_question_with_its_answer_is_scored_and_kept(tmp_path: Path) -> None:
    line = f"run --env math {SIM} --question 'What is 3 + 4?' --answer 7"
    known = typed(f"{line} --sim.solve_probability 1 -o deep/er/a.traj.json", tmp_path)
    document = read(tmp_path / "deep/er/a.traj.json")
    assert known.stdout == f"{document['final_answer']}\n" == "7\n"
    assert "Reward: 1" in known.stderr
    assert (document["domain"], document["question"]) == ("math", "What is 3 + 4?")
    assert document["metadata"]["reward"] == 1.0
    assert document["actions"][-1]["tool"] in ("finalize", "finish")
    assert {path.name for path in (tmp_path / "deep/er").iterdir()} == {"a.traj.json"}


def test_mistakes_are_told_in_the_words_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for more, wanted in CASES["refused"]:
        assert main(shlex.split(f"run --env math {SIM} {more}")) == 2
        assert wanted in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
async def test_a_repository_is_worked_on_in_a_copy(tmp_path: Path) -> None:
    repository = tmp_path / "repo"
    repository.mkdir()
    (repository / "a.py").write_text("a = 1\n")
    with pytest.raises(InputError, match="--yolo"):
        asked_task("Add a note.", repository, confirm=True)
    line = (
        f"run --env swe --question 'Add a note.' --repo {repository} --steps 1"
        f" -o {tmp_path / 'out.json'} --openai.server_type openai --openai.model_name fake"
    )
    async with fake_vllm(text=COMMAND) as fake:
        line += f" --openai.base_url {fake.url}"
        closed = {"stdin": subprocess.DEVNULL}
        await asyncio.to_thread(lambda: typed(f"{line} --yolo", tmp_path, **closed))
        document = read(tmp_path / "out.json")
        assert "+new" in document["final_answer"]
        assert [one["tool"] for one in document["actions"]] == ["reason", "bash", "finalize"]
        assert document["actions"][1]["output"]["returncode"] == 0
        assert sorted(path.name for path in repository.iterdir()) == ["a.py"]
        await asyncio.to_thread(refuse, line, tmp_path)
        document = read(tmp_path / "out.json")
        assert document["final_answer"] == ""
        refusals = [one["error"] for one in document["actions"] if one["tool"] == "bash"]
        assert refusals == ["the user refuses this command"]


def refuse(line: str, folder: Path) -> None:
    with Terminal(line.replace("'Add a note.'", "Add"), folder) as terminal:
        assert "printf 'new" in terminal.until("[a]ll: ")
        terminal.type("n")
        assert terminal.process.wait(PATIENCE) == 0


def test_what_was_done_before_the_time_was_up_is_kept(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(CASES["slow"])
    said = typed(f"run --env slow.py {SIM} --question ? --answer ! --steps 4", tmp_path).stderr
    assert "hit its limit: time" in said
    assert "Reward: 0.4" in said
    document = json.loads((tmp_path / "runs" / "slow_one.traj.json").read_text())
    assert problems_of(document, domains=["slow"]) == []
    thoughts = [one for one in document["actions"] if one["tool"] == "think"]
    assert [one["input"] for one in thoughts] == [{"number": n, "key": "***"} for n in range(4)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
STEP = st.tuples(st.text("ab ", min_size=1).filter(str.strip), JSON, JSON, st.floats(0, 1e9))


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(STEP, max_size=8), st.integers(1, 3), JSON)
def test_whatever_is_logged_comes_through_as_a_good_record(
    steps: list[tuple[str, Any, Any, float]], at_once: int, output: Any
) -> None:
    taken = Steps()
    encoded = [encode(*step) for step in steps]
    for first in range(0, len(encoded), at_once):
        body = batch(first, encoded[first : first + at_once], 0)
        taken.take(body)
        taken.take(body)  # sent again, as after a broken connection
    actions = taken.taken()
    assert [one["step"] for one in actions] == list(range(1, len(steps) + 1))
    assert [(one["tool"], one["input"], one["output"]) for one in actions] == [
        (tool.strip(), given, gave) for tool, given, gave, _ in steps
    ]
    document = unified(made(actions=actions, output=output), ended_at=10.0, question="?")
    assert problems_of(orjson.loads(orjson.dumps(document))) == []


STEP_SENT = b'{"first":0,"steps":[{"tool":"a","ts":1e300,"input":%b,"output":1}]}'


def test_what_is_too_long_or_too_much_is_cut_off_and_says_so() -> None:
    taken = Steps()
    long = encode("read", {"text": "x" * 2 * MAX_FIELD_BYTES}, "y" * 2 * MAX_FIELD_BYTES, 1.0)
    taken.take(batch(0, [long], 0))
    (action,) = taken.taken()
    assert action["input"]["truncated"]
    assert action["output"].endswith(f"[cut off: {2 * MAX_FIELD_BYTES + 2} bytes]")
    for first in range(1, MAX_STEPS + 11, 100):
        taken.take(batch(first, [encode("a", None, None, 0.0)] * 100, 0))
    *kept, last = taken.taken()
    assert len(kept) == MAX_STEPS
    assert (last["tool"], last["step"]) == (CUT, MAX_STEPS + 1)
    assert last["input"]["steps"] > 0
    for odd in ("\ud800", {1: {"set"}}, 2**70, float("nan"), object()):
        taken.take(batch(0, [encode("a", odd, odd, 0.0)], 0))
    for sent in ("[" * 600 + "]" * 600, str(2**80), '"\\ud800"', '"' + "x" * 40_000 + '"'):
        hostile = Steps()
        with contextlib.suppress(msgspec.DecodeError):  # then the worker is told so
            hostile.take(STEP_SENT % sent.encode())
        pack(hostile.taken())
        orjson.dumps(hostile.taken())
    with pytest.raises(ValueError, match="name of a tool"):
        encode(" ", None, None, 0.0)


def made(**changes: Any) -> Trajectory:
    plain = {"task_id": "one", "messages": [], "output": None, "score": Score(reward=None)}
    return trajectory("r", **(plain | changes))
