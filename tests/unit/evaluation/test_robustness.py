"""`evaluate --perturb`: the same tasks in other words, and how steady the results are."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import envserver, read_jsonl
from support.extent import examples

from envserver.evaluation.perturbations import KINDS, perturbed
from envserver.evaluation.robustness import Asked, robustness

SIM = ("--model", "sim", "--sim.latency_seconds", 0, "--workers.processes", 1)
QUESTION = (
    "Anna has 12 apples. Her brother Max takes `some_list[3]` and $x^2 + abcd$ away, "
    'says "Keep This". How many apples remain with Anna at config/file.yaml?'
)
BRITTLE = '''
from envserver import Environment, Score, Task

class Brittle(Environment):
    """Passes where the question is as it knows it; the third task always, the fourth never."""

    def tasks(self, split):
        for name in ("one", "two", "always", "never"):
            yield Task(name, {"question": f"Please answer question {name} now."}, {"name": name})

    async def rollout(self, task, run):
        await run.chat([{"role": "user", "content": task.public["question"]}])
        return task.public["question"]

    def score(self, task, result):
        name = task.hidden["name"]
        known = "answer" in result.output and result.output.startswith("Please")
        return Score(reward=float(name == "always" or (name != "never" and known)))
'''


@settings(max_examples=examples(40))
@given(st.sampled_from(KINDS), st.integers(0, 1000))
def test_a_perturbation_keeps_what_the_answer_needs(kind: str, seed: int) -> None:
    text = perturbed(QUESTION, kind, str(seed))
    assert text == perturbed(QUESTION, kind, str(seed)) != QUESTION
    for part in ("12", "`some_list[3]`", "$x^2 + abcd$", '"Keep This"', "config/file.yaml"):
        assert part in text
    assert sorted(text.lower().replace(" ", "")) == sorted(QUESTION.lower().replace(" ", ""))


def test_each_perturbation_does_what_it_says() -> None:
    told = {kind: perturbed("The first one. Where is Anna?", kind, "1") for kind in KINDS}
    assert told["lower_case"] == "the first one. where is anna?"
    assert told["sentences"] == "Where is Anna? The first one."
    assert told["typos"].split()[0] == "The" and told["typos"] != "The first one. Where is Anna?"
    assert perturbed("a b", "typos", "1") == "a b"


def test_results_in_other_words_stand_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "brittle.py").write_text(BRITTLE)
    paraphrases = [
        {"task_id": "one", "question": "What of one?"},
        {"task_id": "two", "question": "Please answer two."},
        {"task_id": "one", "question": "Please answer one."},
    ]
    lines = b"".join(orjson.dumps(one) + b"\n" for one in paraphrases)
    (tmp_path / "words.jsonl").write_bytes(lines)
    words = ("--env.group_size", 1, "--perturb", "lower_case", "--paraphrases", "words.jsonl")
    command = ("evaluate", "--env", "brittle.py", *SIM, *words, "--out", "run")
    ran = envserver(*command, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    run = tmp_path / "run"
    asked = {
        group["envserver"]["task_id"]: group["envserver"]["rollouts"][0]["output"]
        for group in read_jsonl(run / "groups-paraphrase_1.jsonl")
    }
    assert asked == {"one": "What of one?", "two": "Please answer two."}
    report = orjson.loads((run / "report.json").read_bytes())
    found = report["robustness"]
    assert found["variants"] == ["lower_case", "paraphrase_1", "paraphrase_2"]
    # one: fails in two of its three other ways; two: in one of two; the others are steady.
    assert found["consistency"]["value"] == pytest.approx((1 / 3 + 1 / 2 + 1 + 1) / 4)
    assert found["worst_reward"]["value"] == found["worst_pass"]["value"] == 1 / 4
    assert found["worst_reward"]["low"] <= 1 / 4 <= found["worst_reward"]["high"]
    assert report["differences"]["lower_case"]["value"] == pytest.approx(3 / 4 - 1 / 4)
    assert "asked as lower_case" in (run / "report.md").read_text()
    again = envserver(*command[:-4], *command[-2:], "--resume", folder=tmp_path)
    assert again.returncode == 2 and "paraphrases" in again.stderr


def test_chances_are_those_of_all_pairs_of_attempts() -> None:
    original, other = {"a": Asked(0.5, 0.5), "b": Asked(1.0, 1.0)}, {"a": Asked(0.25, 0.25)}
    found = robustness(original, {"v": other}, seed=0)
    assert found is not None
    assert (found.consistency.value, found.consistency.tasks) == (0.5 * 0.25 + 0.5 * 0.75, 1)
    assert robustness(original, {"v": {}}, seed=0) is None


@pytest.mark.parametrize(
    ("env", "words", "why"),
    [
        ("math", ("--perturb", "shouting"), "no perturbation 'shouting'"),
        ("math", ("--paraphrases", "bad.jsonl"), "bad.jsonl, line 2 is not a paraphrase"),
        ("math", ("--paraphrases", "none.jsonl"), "none.jsonl cannot be read"),
        ("kuhn", ("--perturb", "typos"), "has no question to be perturbed"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    env: str, words: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"task_id": "a", "question": "b"}\n{"task_id": 1}\n')
    more = ("--env.total_steps", 1, "--env.group_size", 1, "--out", "run")
    ran = envserver("evaluate", "--env", env, *SIM, *words, *more, folder=tmp_path)
    assert ran.returncode == 2 and why in " ".join(ran.stderr.split()), ran.stderr
