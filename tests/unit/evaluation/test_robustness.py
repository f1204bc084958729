"""What reports say beside rewards: how steady results are in other words, and steps."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import read_jsonl
from support.extent import examples
from support.in_process import Run

from envserver.evaluation.perturbations import KINDS, perturbed
from envserver.evaluation.robustness import Asked, robustness
from envserver.evaluation.steps import Action, Steps, steps_of

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


@pytest.mark.thorough
def test_results_in_other_words_stand_in_the_report(evaluate: Run) -> None:
    Path("brittle.py").write_text(BRITTLE)
    paraphrases = (
        ("one", "What of one?"),
        ("two", "Please answer two."),
        ("one", "Please answer one."),
    )
    lines = [orjson.dumps({"task_id": task, "question": text}) for task, text in paraphrases]
    Path("words.jsonl").write_bytes(b"\n".join(lines))
    words = "--env brittle.py --env.group_size 1 --perturb lower_case --out run"
    evaluate(f"{words} --paraphrases words.jsonl")
    asked = {
        group["envserver"]["task_id"]: group["envserver"]["rollouts"][0]["output"]
        for group in read_jsonl(Path("run/groups-paraphrase_1.jsonl"))
    }
    assert asked == dict(paraphrases[:2])
    report = orjson.loads(Path("run/report.json").read_bytes())
    found = report["robustness"]
    assert found["variants"] == ["lower_case", "paraphrase_1", "paraphrase_2"]
    # one: fails in two of its three other ways; two: in one of two; the others are steady.
    assert found["consistency"]["value"] == pytest.approx((1 / 3 + 1 / 2 + 1 + 1) / 4)
    assert found["worst_reward"]["value"] == found["worst_pass"]["value"] == 1 / 4
    assert found["worst_reward"]["low"] <= 1 / 4 <= found["worst_reward"]["high"]
    assert report["differences"]["lower_case"]["value"] == pytest.approx(3 / 4 - 1 / 4)
    assert "asked as lower_case" in Path("run/report.md").read_text()
    assert "paraphrases" in evaluate(f"{words} --resume", status=2)


def test_chances_are_those_of_all_pairs_of_attempts() -> None:
    original, other = {"a": Asked(0.5, 0.5), "b": Asked(1.0, 1.0)}, {"a": Asked(0.25, 0.25)}
    found = robustness(original, {"v": other}, seed=0)
    assert found is not None
    assert (found.consistency.value, found.consistency.tasks) == (0.5 * 0.25 + 0.5 * 0.75, 1)
    assert robustness(original, {"v": {}}, seed=0) is None


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("math --perturb shouting", "no perturbation 'shouting'"),
        ("math --paraphrases bad.jsonl", "bad.jsonl, line 2 is not a paraphrase"),
        ("math --paraphrases none.jsonl", "none.jsonl cannot be read"),
        ("kuhn --perturb typos", "has no question to be perturbed"),
    ],
)
def test_what_cannot_be_asked_is_refused(words: str, why: str, evaluate: Run) -> None:
    Path("bad.jsonl").write_text('{"task_id": "a", "question": "b"}\n{"task_id": 1}\n')
    assert why in evaluate(f"--env {words} --env.total_steps 1 --env.group_size 1 --out run", 2)


WANDERING = '''
from envserver import Environment, Score, Task

class Wandering(Environment):
    """Searches twice for the same, fails once, and opens a page."""

    class Config(Environment.Config):
        directly: bool = False

    def baselines(self):
        return {"directly": {"directly": True}}

    def tasks(self, split):
        yield Task("solved", {}, {"reward": 1.0})
        yield Task("failed", {}, {"reward": 0.0})
        yield Task("silent", {}, {"reward": 1.0})

    async def rollout(self, task, run):
        await run.chat([{"role": "user", "content": "go"}])
        if task.id == "silent":
            return
        run.log_action("open", {"page": 1}, "the page")
        if not self.config.directly:
            run.log_action("search", {"for": "x"}, ["a", "b"])
            run.log_action("search", {"for": "x"}, ["a", "b"])
            run.log_action("search", {"for": "x"}, ["c"])
            run.log_action("open", {"page": 9}, None, error="no such page")
            run.log_action("reason", None, "")
        run.log_action("finalize", {}, "done")

    def score(self, task, result):
        return Score(reward=task.hidden["reward"])
'''


def test_steps_are_measured_against_the_shortest_success(evaluate: Run, run: Run) -> None:
    Path("wandering.py").write_text(WANDERING)
    evaluate("--env wandering.py --env.group_size 2 --out run")
    written = Path("run/report.json").read_bytes()
    report = orjson.loads(written)
    told = {name: (one["value"], one["tasks"]) for name, one in report["run"]["steps"].items()}
    assert told == {
        "steps": (6.0, 2),
        "steps of a success": (6.0, 1),
        "steps beyond the shortest success": (5.0, 1),  # the baseline's success has one
        "share with an error": (pytest.approx(1 / 6), 2),
        "share repeated": (pytest.approx(1 / 6), 2),
        "share useless": (pytest.approx(3 / 6), 2),
    }
    direct = report["baselines"]["directly"]["steps"]
    assert direct["steps beyond the shortest success"]["value"] == 0
    shown = Path("run/report.md").read_text().replace(" [5.00, 5.00]", "")
    assert "| steps beyond the shortest success | 5.000 | 0.000 |" in shown
    run("evaluate report run")
    assert Path("run/report.json").read_bytes() == written


def test_what_others_say_and_what_was_left_out_are_no_steps() -> None:
    said = [Action("user"), Action("finalize"), Action("actions_cut_off"), Action("say")]
    assert steps_of(said) == Steps(steps=1, errors=0, repeated=0, useless=1)
    assert steps_of([]) == Steps(steps=0, errors=0, repeated=0, useless=0)
