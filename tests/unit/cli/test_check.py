"""`envserver check`: rewards that can be cheated are found, and sound environments pass."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases_of, write_jsonl
from support.commands import envserver

from envserver import Task
from envserver.rollouts.checking import task_problems

CASES = cases_of(__file__)

THOROUGH = pytest.mark.thorough


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "zoo.py"
    path.write_text(CASES["environment"])
    return path


def check(zoo: Path, words: str) -> subprocess.CompletedProcess[str]:
    return envserver("check", "--env", *f"zoo.py:{words}".split(), folder=zoo.parent)


def report(zoo: Path, name: str, plays: int = 0) -> dict[str, Any]:
    """The report; rollouts cost most, so only tests about them play."""
    ran = check(zoo, f"{name} --json --plays {plays}")
    assert ran.stdout, (ran.returncode, ran.stderr)
    found: dict[str, Any] = json.loads(ran.stdout)
    assert ran.returncode == (0 if found["ok"] else 1), ran.stderr
    found["kinds"] = {kind["name"]: kind for kind in found["kinds"]}
    found["plays"] = {one["way"]: one for one in found["plays"]}
    assert bool(found["plays"]) == bool(plays)
    return found


@THOROUGH
def test_a_sound_environment_passes(zoo: Path) -> None:
    """With several agents, which play its demonstrations."""
    found = report(zoo, "Pair", plays=2)
    assert found["ok"] and not found["problems"] and found["whole"]
    kinds, plays = found["kinds"], found["plays"]
    assert (kinds["gold"]["count"], kinds["gold"]["least"], kinds["gold"]["most"]) == (4, 1.0, 1.0)
    assert {"no output", "empty text", "huge text", "wrong type", "question echoed"} <= kinds.keys()
    assert found["scoring"]["count"] > 100
    assert plays["demonstration"]["rewards"] == [1.0] * 4 and plays["demonstration"]["turns"] == 4
    assert plays["spoiled"]["rewards"] == [0.0] * 2
    cheats = [one for one in plays.values() if one["cheat"]]
    assert len(cheats) == 6 and not any(one["solved"] for one in cheats)


@THOROUGH
def test_endless_tasks_are_cut_and_a_card_is_made(zoo: Path) -> None:
    ran = check(zoo, "Endless --tasks 3 --plays 1 --card")
    assert ran.returncode == 0, ran.stderr
    assert {
        "| verdict | passes `envserver check` |",
        "| tasks | first 3 of `train` |",
        "| demonstrations, played | 3 of 3 solve their task, mean reward 1, 1.0 turns |",
        "| refusal | 0 of 1 | 0 |",
    } <= {*ran.stdout.splitlines()}


@THOROUGH
def test_faults_that_only_a_rollout_shows_are_found(zoo: Path) -> None:
    found = report(zoo, "Faulty", plays=3)
    problems = "\n".join(found["problems"])
    assert "The prompt of task 't0' shows hidden text: 'the answer that nobody may see" in problems
    assert "A cheat solves 3 of 3 tasks: the prompt again." in problems
    assert "Spoiled demonstrations are rewarded like correct ones" in problems
    for number, wrong in enumerate(("must return a list of", "raised KeyError: 'rank'", "= nan,")):
        line = rf"The group of task 't{number}' cannot be scored: .*{wrong}.*in Faulty.score_group"
        assert re.search(line, problems)
    plays = found["plays"]
    assert "I cannot read this answer" in plays["nothing"]["wrong"][0]["error"]
    assert not found["ok"] and plays["demonstration"]["solved"] == 4


RARE = [pytest.param(name, marks=THOROUGH) for name in CASES["rarely_unsound"]]


@pytest.mark.parametrize("name", [*CASES["unsound"], *RARE])
def test_wrong_rewards_and_tasks_that_are_not_sound_are_found(zoo: Path, name: str) -> None:
    kinds, words = (CASES["unsound"] | CASES["rarely_unsound"])[name]
    found = report(zoo, name)
    wrong = {one: kind["wrong"] for one, kind in found["kinds"].items() if kind["wrong"]}
    assert {*kinds} <= wrong.keys() and not found["ok"]
    problems = "\n".join(found["problems"])
    assert all(part in problems for part in words) and bool(problems) == bool(words)
    if name == "Raises":
        assert "TypeError" in wrong["no output"][0]["error"]
        # No agent leaves such a thing, and a scorer that raises at it pays nothing for it.
        assert "wrong type" not in wrong and found["kinds"]["wrong type"]["raised"]


def test_what_was_found_is_told_in_words(zoo: Path) -> None:
    ran = check(zoo, "NoGold --plays 0")
    assert ran.returncode == 0
    assert "No correct result is known for 4 tasks." in ran.stdout
    ran = check(zoo, "Substring --plays 0")
    assert ran.returncode == 1
    assert "every answer, task t0: reward 1; expected 0" in ran.stdout
    assert "question echoed, task t0" in ran.stdout
    assert "Checks FAILED" in ran.stdout


def rows(folder: Path, name: str, listed: Sequence[Mapping[str, Any]]) -> Path:
    return write_jsonl(folder / name, listed)


def data(folder: Path, *words: object) -> tuple[dict[str, Any], str]:
    """The report of `check` on rows of mathematics, and the page with the same flags."""
    flags = ("check", "--env", "math", "--plays", 0, "--tasks", 1, "--env.data_path", *words)
    found: dict[str, Any] = json.loads(envserver(*flags, "--json", folder=folder).stdout)
    found["kinds"] = {kind["name"].removeprefix("every row: "): kind for kind in found["kinds"]}
    return found, envserver(*flags, "--markdown", folder=folder).stdout


def test_a_report_tells_all_about_a_file(tmp_path: Path) -> None:
    """Fields, dropped and doubtful rows, unfit golds, repeated questions, lengths."""
    rows(tmp_path, "train.jsonl", CASES["rows"])
    rows(tmp_path, "held_out.jsonl", [CASES["rows"][4], {"question": "New?", "answer": "1"}])
    limits = ("--context_tokens", 20, "--evaluation_set", "held_out.jsonl")
    found, page = data(tmp_path, "train.jsonl", *limits)
    about = found["data"]
    assert about["rows"] == 9 and about["whole"] and not found["ok"]
    (counts,) = about["counts"].values()
    assert (counts["read"], counts["used"]) == (10, 9)
    assert [one["first"] for one in counts["dropped"].values()] == ["train.jsonl:7"]
    places = {cause: (one["count"], one["first"]) for cause, one in counts["doubtful"].items()}
    assert places == {cause: (1, first) for cause, first in CASES["doubtful"].items()}
    assert counts["fields"]["question: question"] == 5 and len(counts["layouts"]) > 2
    wrong = {name for name, kind in found["kinds"].items() if kind["wrong"]}
    (unfit,) = found["kinds"]["a word"]["wrong"]
    assert wrong == {"a word"} and unfit["place"] == "train.jsonl:9"
    assert "bad_gold" in unfit["error"]
    assert {one["what"]: one["count"] for one in about["repeats"]} == CASES["repeats"]
    prompts = about["lengths"][0]
    assert prompts["over"]["context_tokens"] == [20, 3] and about["tokenizer"] == ""
    for line in ("10 rows read, 9 used, 1 dropped", "question: question in 5 rows", "Estimated"):
        assert line in page
    assert page.count("\n# ") == 0 and page.count("\n## ") >= 5


def test_no_right_answer_is_called_wrong(tmp_path: Path) -> None:
    """And each gold that is not zero is tried negated, tenfold, with its successor."""
    asked = [{"problem": f"Say {one} now.", "answer": one} for one in CASES["surely_right"]]
    rows(tmp_path, "rows.jsonl", asked)
    found, _ = data(tmp_path, "rows.jsonl")
    assert found["ok"], found
    counts = {name: kind["count"] for name, kind in found["kinds"].items()}
    assert counts["gold"] == len(asked)
    assert counts["negated"] == counts["tenfold"] - 2 and counts["successor"] > counts["zero"]


def test_rows_of_a_table_are_looked_at_too(tmp_path: Path) -> None:
    rows(tmp_path, "sums.jsonl", [{"prompt": "1+1?", "answer": "2"}, {"prompt": "1+1 ?"}] * 2)
    (tmp_path / "own.py").write_text("def exact(completion, answer): return completion == answer")
    words = ("--env.reward", "own.py:exact", "--env.bad_rows", "skip", "--plays", 0, "--json")
    found = json.loads(envserver("check", "--env", "sums.jsonl", *words, folder=tmp_path).stdout)
    assert found["data"]["counts"]["sums_rows"]["fields"] == {
        "prompt: prompt": 4,
        "answer: answer": 2,
    }
    assert found["data"]["repeats"][0]["count"] >= 1


def test_short_hidden_words_may_stand_in_the_question() -> None:
    assert list(task_problems(Task("t", {"q": "Paris or Rome?"}, {"answer": "Paris"}))) == []
