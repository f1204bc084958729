"""`envserver check`: rewards that can be cheated are found, and sound environments pass."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.commands import envserver

from envserver import KnownResult, Result, Task
from envserver.rollouts.absurd import absurd_results
from envserver.rollouts.checking import differences, task_problems

ENVIRONMENT = '''
import itertools, random
from envserver import Environment, KnownResult, Result, Score, Task

SECRET = "the answer that nobody may see: {}"


class Base(Environment):
    """Say the secret."""

    def tasks(self, split):
        for number in range(4):
            hidden = {"answer": SECRET.format(number)}
            yield Task(f"t{number}", {"question": f"Number {number}?"}, hidden)

    async def rollout(self, task, run):
        return {"said": ""}

    def demonstration(self, task):
        return [{"role": "assistant", "content": task.hidden["answer"]}]

    def score(self, task, result):
        said = result.output
        if isinstance(said, dict):
            said = said.get("said")
        return Score(reward=float(said == task.hidden["answer"]))


class Sound(Base):
    def known_results(self, task):
        answer = task.hidden["answer"]
        yield KnownResult("gold", Result(output={"said": answer}), least=1.0, most=1.0)
        yield KnownResult("another's answer", Result(output={"said": SECRET.format(9)}))


class Endless(Base):
    """Known by its demonstrations only."""

    def tasks(self, split):
        for number in itertools.count():
            yield Task(f"t{number}", {"question": "?"}, {"answer": SECRET.format(number)})


class Substring(Sound):
    """Pays whoever lists every answer, and echoes."""

    def known_results(self, task):
        yield from super().known_results(task)
        everything = " ".join(SECRET.format(number) for number in range(4))
        yield KnownResult("every answer", Result(output={"said": everything}))

    def score(self, task, result):
        said = str(result.output)
        return Score(reward=float(task.hidden["answer"] in said or "Number" in said))


class Raises(Sound):
    def score(self, task, result):
        return Score(reward=float(result.output["said"].strip() == task.hidden["answer"]))


class Strict(Sound):
    """Its gold does not pass."""

    def score(self, task, result):
        return Score(reward=0.5)


class Shows(Sound):
    def tasks(self, split):
        for task in super().tasks(split):
            yield Task(task.id, {"question": f"Is it {task.hidden['answer']}?"}, task.hidden)


class Random(Sound):
    def tasks(self, split):
        for number in range(3):
            hidden = {"answer": SECRET.format(number)}
            yield Task("the same", {"question": str(random.random())}, hidden)


class NoGold(Base):
    def demonstration(self, task):
        return None


class Broken(Sound):
    def known_results(self, task):
        raise KeyError("answer")
'''


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    path = tmp_path / "zoo.py"
    path.write_text(ENVIRONMENT)
    return path


def check(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return envserver("check", *words, folder=folder)


def report(zoo: Path, name: str) -> dict[str, Any]:
    ran = check("--env", f"{zoo}:{name}", "--json", folder=zoo.parent)
    found: dict[str, Any] = json.loads(ran.stdout)
    assert ran.returncode == (0 if found["ok"] else 1), ran.stderr
    return found


def wrong_kinds(found: dict[str, Any]) -> set[str]:
    return {kind["name"] for kind in found["kinds"] if kind["wrong"]}


def test_a_sound_environment_passes(zoo: Path) -> None:
    found = report(zoo, "Sound")
    assert found["ok"] and not found["problems"] and found["whole"]
    kinds = {kind["name"]: kind for kind in found["kinds"]}
    assert (kinds["gold"]["count"], kinds["gold"]["least"], kinds["gold"]["most"]) == (4, 1.0, 1.0)
    assert {"no output", "empty text", "huge text", "wrong type", "question echoed"} <= kinds.keys()
    assert "demonstration" not in kinds


def test_demonstrations_stand_in_for_gold_and_endless_tasks_are_cut(zoo: Path) -> None:
    ran = check("--env", f"{zoo}:Endless", "--tasks", 3, folder=zoo.parent)
    assert ran.returncode == 0, ran.stderr
    assert "demonstration" in ran.stdout
    assert "the first 3 tasks" in ran.stdout
    assert "All checks passed." in ran.stdout


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Substring", {"every answer", "question echoed"}),
        ("Raises", {"no output", "empty text"}),
        ("Strict", {"gold", "no output", "huge text"}),
    ],
)
def test_rewards_that_are_wrong_are_found(zoo: Path, name: str, kinds: set[str]) -> None:
    found = report(zoo, name)
    assert kinds <= wrong_kinds(found)
    assert not found["ok"] and not found["problems"]
    if name == "Raises":
        wrong = next(kind for kind in found["kinds"] if kind["name"] == "no output")["wrong"]
        assert "TypeError" in wrong[0]["error"]
        # No agent leaves such a thing, and a scorer that raises at it pays nothing for it.
        assert "wrong type" not in wrong_kinds(found)
        assert any(kind["name"] == "wrong type" and kind["raised"] for kind in found["kinds"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Shows", "shows hidden text: 'the answer that nobody may see: 0'"),
        ("Random", "tasks differ: 'the same'"),
        ("Random", "have the same id: 'the same'"),
        ("Broken", "cannot be made: KeyError"),
    ],
)
def test_tasks_that_are_not_sound_are_found(zoo: Path, name: str, words: str) -> None:
    found = report(zoo, name)
    assert not found["ok"]
    assert any(words in problem for problem in found["problems"]), found["problems"]


def test_tasks_without_a_known_right_result_are_told_of(zoo: Path) -> None:
    ran = check("--env", f"{zoo}:NoGold", folder=zoo.parent)
    assert ran.returncode == 0
    assert "No correct result is known for 4 tasks." in ran.stdout


def test_a_failed_check_shows_where(zoo: Path) -> None:
    ran = check("--env", f"{zoo}:Substring", folder=zoo.parent)
    assert ran.returncode == 1
    assert "every answer, task t0: reward 1; expected 0" in ran.stdout
    assert "Checks FAILED" in ran.stdout


@pytest.mark.thorough
def test_math_passes(tmp_path: Path) -> None:
    ran = check("--env", "math", "--json", folder=tmp_path)
    found = json.loads(ran.stdout)
    assert ran.returncode == 0, (wrong_kinds(found), found["problems"])
    kinds = {kind["name"]: kind for kind in found["kinds"]}
    assert found["tasks"] == kinds["gold, by finish"]["count"] == 48
    assert {"unevaluated expression", "every option", "gold, only thought"} <= kinds.keys()


def test_absurd_results_come_in_the_form_of_right_ones() -> None:
    made = list(absurd_results({"question": "Why?", "options": ["a"]}, [{"patch": "x"}]))
    assert all((one.least, one.most) == (0.0, 0.0) for one in made)
    assert KnownResult("question echoed", Result(output={"patch": "Why?\na"})) in made
    assert KnownResult("wrong type", Result(output={"patch": [None]})) in made


def test_short_hidden_words_may_stand_in_the_question() -> None:
    assert list(task_problems(Task("t", {"q": "Paris or Rome?"}, {"answer": "Paris"}))) == []
    unsendable = list(task_problems(Task("t", {"q": {1, 2}}, {})))
    assert len(unsendable) == 1 and "cannot be sent" in unsendable[0]


def test_listings_of_different_length_differ() -> None:
    tasks = [Task("a", {}), Task("b", {})]
    assert list(differences(tasks, tasks)) == []
    assert "2 tasks and then 1" in next(differences(tasks, tasks[:1]))
