"""Two evaluations held against each other: the test by brute force, and what is told of tasks."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import orjson
import pytest
from envserver_records.errors import InputError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.commands import read_jsonl
from support.extent import examples
from support.in_process import Run
from support.models_on_disk import floats, read_model, write_model

from envserver import main
from envserver.evaluation import AttemptResult, Rules, TaskResult, report_run
from envserver.evaluation.comparison import Comparison, compare, sign_flip_test
from envserver.evaluation.folders import HarnessRun, harvest, report_harness
from envserver.evaluation.page import comparison_page, report_page
from envserver.evaluation.perturbations import KINDS, perturbed
from envserver.evaluation.report import Asked, Counted, Report, robustness, suite_of
from envserver.evaluation.results import Action, Steps, steps_of
from envserver.evaluation.tables import comparison_markdown, comparison_notes, markdown_of
from envserver.running import evaluating
from envserver.running.evaluating import Evaluation
from envserver.running.mix import RunSpec

CASES = cases_of(__file__)

thirds = st.integers(-3, 3).map(lambda n: n / 3)
# Coarse, so that rounding never decides which of two sums goes as far.
shares = st.integers(-(10**6), 10**6).map(lambda n: n / 10**6)
too_small_to_count = st.sampled_from([1e-9, -1e-10, 1e-300])


@settings(max_examples=examples(60))
@example([0.28125, 1e-09, 1 / 3])
@given(st.lists(st.one_of(thirds, shares, too_small_to_count), min_size=1, max_size=9))
def test_the_p_value_is_the_share_of_all_signs_that_go_as_far(differences: list[float]) -> None:
    telling = [one for one in differences if abs(one) > 1e-9]
    seen = abs(sum(telling))
    sums = [
        abs(sum(sign * one for sign, one in zip(signs, telling, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(telling))
    ]
    expected = sum(one >= seen - 1e-9 for one in sums) / len(sums)
    found = sign_flip_test(differences)
    assert found.exact and found.p_value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (5, 0), (9, 2), (40, 25), (300, 240)])
def test_of_single_attempts_it_is_mcnemars_exact_test(better: int, worse: int) -> None:
    n, tail = better + worse, min(better, worse)
    binomial = 2 * sum(math.comb(n, i) for i in range(tail + 1)) / 2**n
    found = sign_flip_test([1.0] * better + [-1.0] * worse + [0.0] * 50)
    assert found.exact and found.p_value == pytest.approx(min(1.0, binomial))


def test_where_there_are_too_many_signs_random_ones_are_taken() -> None:
    odd = [math.sin(n) / math.pi for n in range(1, 60)]
    found = sign_flip_test(odd, seed=3)
    assert not found.exact and found == sign_flip_test(odd, seed=3)
    spread = math.sqrt(sum(one * one for one in odd))
    assert found.p_value == pytest.approx(math.erfc(abs(sum(odd)) / spread / 2**0.5), abs=0.02)
    assert 0 < sign_flip_test([abs(one) for one in odd]).p_value < 1e-4


def report(
    tasks: dict[str, list[float]],
    lost: int = 0,
    digests: dict[str, str] = {},  # noqa: B006 - nobody changes it
    truncated: tuple[str, ...] = (),
    **facts: Any,
) -> Report:
    """Of an environment; `digests` and `truncated` by task, `lost` attempts of each."""
    results = [
        TaskResult(
            task_id=name,
            attempts=[AttemptResult(reward=one, truncated=name in truncated) for one in rewards],
            lost=lost,
            digest=digests.get(name, "same"),
            labels={"level": "<b>1</b>"},
        )
        for name, rewards in tasks.items()
    ]
    rules = Rules(group_size=max(map(len, tasks.values())))
    told: dict[str, Any] = {"env": "math", "name": "math", "split": "test", "model": "m"}
    told |= {"complete": True, "simulated": False, "created_at": 0.0, "rules": rules}
    told |= {"settings": {"env": {"seed": 0}}, "baselines": {}, "differences": {}}
    return Report(run=report_run(results, rules), **(told | facts))


def compared(a: Report, b: Report, rules: Rules | None = None) -> Comparison:
    return compare({"math": a}, {"math": b}, rules or a.rules, names=("old", "new"))


def test_tasks_are_paired_and_those_that_differ_are_named() -> None:
    old = report({"a": [0.0], "b": [1.0], "gone": [1.0], "other": [0.0]}, digests={"other": "1"})
    new = report({"b": [1.0], "a": [1.0], "new": [1.0], "other": [1.0]}, digests={"other": "2"})
    found = compared(
        old, msgspec.structs.replace(new, complete=False, settings={"env": {"seed": 7}})
    )
    part = found.parts[0]
    assert part.reward is not None and part.fourfold is not None
    assert (part.reward.tasks, part.reward.a, part.reward.b) == (2, 0.5, 1.0)
    assert (part.only_a, part.only_b, part.other_tasks) == (["gone"], ["new"], ["other"])
    four = part.fourfold
    assert (four.both, four.only_a, four.only_b, four.neither) == (1, 0, 1, 0)
    assert [change.task_id for change in found.changes] == ["a"]
    assert found.settings == {"env.seed": (0, 7)}
    words = " ".join(comparison_notes(found)) + comparison_markdown(found)
    for told in ("gone", "1 task (new)", "a different question", "did not finish"):
        assert told in words


@settings(max_examples=examples(20))
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_swapped_sides_give_the_same_the_other_way_round(passed: list[tuple[bool, bool]]) -> None:
    a = report({str(n): [float(one)] for n, (one, _) in enumerate(passed)})
    b = report({str(n): [float(two)] for n, (_, two) in enumerate(passed)})
    there, back = compared(a, b).parts[0].reward, compared(b, a).parts[0].reward
    assert there is not None and back is not None
    assert there.difference.value == pytest.approx(-back.difference.value)
    assert (there.test, there.better, there.worse) == (back.test, back.worse, back.better)


def test_both_are_counted_by_the_same_rules() -> None:
    a = report({"a": [1.0, 1.0], "b": [1.0, 0.0]}, lost=2)
    b = report({"a": [1.0, 1.0], "b": [1.0, 1.0]}, truncated=("b",))

    def means(**rules: Any) -> tuple[float, float, int]:
        found = compared(a, b, Rules(group_size=2, **rules)).parts[0].reward
        assert found is not None
        return found.a, found.b, found.tasks

    assert means() == (0.75, 1.0, 2)
    assert means(failures="zero") == (0.375, 1.0, 2)
    assert means(truncated="zero") == (0.75, 0.5, 2)
    assert means(truncated="drop") == (1.0, 1.0, 1)


def test_pages_need_nothing_else_and_escape_what_stands_in_the_data() -> None:
    evil = "<script>alert(1)</script>\u202e\x1b[31m"
    one = report({evil: [0.0, 1.0], "b": [1.0, 1.0]}, model=evil, env=evil, name=evil)
    other = report({evil: [1.0, 1.0], "b": [1.0, 1.0]})
    found = compare({"x": one}, {"x": other}, one.rules, names=(evil, "new"))
    for page in (report_page(one), report_page(suite_of([one, other])), comparison_page(found)):
        assert "<script" not in page and "&lt;script&gt;" in page
        assert "<b>1</b>" not in page
        assert "[U+202E]" in page and "\u202e" not in page and "\x1b" not in page
        assert "default-src 'none'" in page
        assert not any(word in page for word in ("http://", "https://", "src=", "@import", "url("))
    assert "pass@2" in report_page(one)


def test_pages_draw_rewards_on_the_range_that_the_environment_declares() -> None:
    """A bar with its interval is `left` of the line's length; a shade is from s0 to s5."""
    rules = Rules(group_size=1, worst=-2.0, best=2.0, pass_at=1.0)
    rewards = {-2.0: "s0", -1.5: "s1", -1.0: "s2", -0.25: "s3", 0.5: "s4", 1.0: "s5", 2.0: "s5"}
    page = report_page(report({f"t{reward}": [reward] for reward in rewards}, rules=rules))
    for reward, shade in rewards.items():
        assert f'class="cell {shade}" title="{reward:.3g}"' in page
    same = report_page(report({"a": [1.0], "b": [1.0]}, rules=rules))
    assert "from -2 to 2, with intervals" in same
    assert 'class="dot" style="left:75.0%"' in same
    wide = report({"a": [-3.0], "b": [-3.0]}, rules=rules)  # of an environment that said nothing
    assert "from -3 to 2, with" in report_page(wide)
    better = report({"a": [0.0], "b": [0.0]}, rules=rules)
    page = comparison_page(compare({"x": wide}, {"x": better}, rules, names=("a", "b")))
    assert "from -4 to 4; left" in page
    assert 'class="dot" style="left:87.5%"' in page


def test_several_environments_count_alike_in_their_mean() -> None:
    suite = suite_of([report({"a": [1.0]}), report({str(n): [0.0] for n in range(9)}, name="code")])
    assert suite.average is not None and suite.average_pass is not None
    assert (suite.average.value, suite.average.tasks) == (0.5, 10)
    assert (suite.totals.tasks, suite.totals.cost) == (10, None)
    text = markdown_of(suite)
    assert "| mean | 10 |" in text and "## code" in text


def harness_wrote(folder: Path, accs: dict[str, list[float]], told: float | None = None) -> Path:
    """Files as the harness writes them: one task, its filters with the values of documents."""
    (folder / "model").mkdir(parents=True)
    facts = {"metrics": ["acc"], "doc_hash": "h"}
    lines = [
        msgspec.json.encode({"doc_id": number, "filter": name, "acc": acc, **facts})
        for name, values in accs.items()
        for number, acc in enumerate(values)
    ]
    (folder / "model" / "samples_sums_now.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    values: dict[str, Any] = {"alias": "sums"}
    for name, of_documents in accs.items():
        mean = sum(of_documents) / len(of_documents)
        values |= {f"acc,{name}": mean if told is None else told, f"acc_stderr,{name}": 0.1}
    of_task = {"results": values, "versions": 1.0, "n-shot": 5, "higher_is_better": {"acc": True}}
    results = {name: {"sums": value} for name, value in of_task.items()} | {"lm_eval_version": "0"}
    (folder / "model" / "results_now.json").write_bytes(msgspec.json.encode(results))
    return folder


def test_a_task_of_the_harness_is_a_report_like_others(tmp_path: Path) -> None:
    raw = harness_wrote(tmp_path / "raw", {"strict": [1.0, 0.0, 0.0], "loose": [1.0, 1.0, 0.0]})
    first = harvest(raw, metric=None, requests=3)[0]
    assert (first.facts.metric, first.facts.filter, first.documents) == ("acc", "strict", 3)
    loose = harvest(raw, metric="acc,loose", requests=3)[0]
    run = HarnessRun(
        task="sums", model="m", simulated=False, settings={}, facts=loose.facts, prompt_tokens=10,
        completion_tokens=7, seconds=1.0, documents=3, finished_at=0.0,
    )  # fmt: skip
    (tmp_path / "samples.jsonl").write_bytes(loose.samples.read_bytes())
    found = report_harness(tmp_path, "sums", run, Counted())
    overall, costs = found.run.overall, found.run.costs
    assert overall is not None and costs is not None
    assert overall.mean_reward.value == pytest.approx(loose.facts.values["acc,loose"])
    assert (costs.total_prompt_tokens, costs.total_completion_tokens) == (10, 7)
    assert found.run.components == pytest.approx({"acc,loose": 2 / 3, "acc,strict": 1 / 3})
    assert "5 examples in each prompt" in markdown_of(found)


def test_numbers_of_the_harness_that_are_no_mean_of_rewards_are_refused(tmp_path: Path) -> None:
    odd = harness_wrote(tmp_path / "odd", {"none": [0.5, 7.5]})
    wrong = harness_wrote(tmp_path / "wrong", {"none": [0.5, 0.5]}, told=0.9)
    nothing = tmp_path / "nothing"
    for place, why in ((odd, "lacks a metric"), (wrong, "lacks a metric"), (nothing, "no results")):
        with pytest.raises(InputError, match=why):
            harvest(place, metric=None, requests=0)


# What reports say beside rewards: how steady results are in other words, and steps

QUESTION = (
    "Anna has 12 apples. Her brother Max takes `some_list[3]` and $x^2 + abcd$ away, "
    'says "Keep This". How many apples remain with Anna at config/file.yaml?'
)


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
    Path("brittle.py").write_text(CASES["brittle"])
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


def test_steps_are_measured_against_the_shortest_success(evaluate: Run, run: Run) -> None:
    Path("wandering.py").write_text(CASES["wandering"])
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


# `envserver sweep`: what it finds and draws, and that nothing is done twice. The engine is the
# simulated one, better with a larger alpha; tests/peers/test_factory.py has real ones

WORDS = [
    *("--env", "math", "--env.total_steps", "3", "--env.group_size", "2", "--no_baselines"),
    *("--sim.latency_seconds", "0", "--sim.openers", "false", "--env.mode", "single"),
]


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were evaluated, in order."""
    real, names = evaluating.evaluate_members, []

    async def simulated(members: Sequence[RunSpec[Any]], *given: Any, **more: Any) -> Evaluation:
        for member in members:
            name = Path(member.settings.model).name
            alpha = float(name.removeprefix("alpha-")) if "alpha" in name else 0.0
            member.settings.model = "sim"
            member.settings.sim.solve_probability = alpha
        names.append(name)
        return await real(members, *given, **more)

    monkeypatch.setattr(evaluating, "evaluate_members", simulated)
    return names


@pytest.mark.thorough
def test_a_sweep_merges_evaluates_and_draws_once(
    tmp_path: Path, evaluated: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, name in enumerate(("base", "tuned")):
        write_model(tmp_path / name, {"model.norm.weight": ("F32", np.full(4, seed, np.float32))})
    out = tmp_path / "out"
    models = ["--base", str(tmp_path / "base"), "--tuned", str(tmp_path / "tuned")]
    words = ["sweep", *models, *WORDS, "--out", str(out)]
    assert main([*words, "--alpha", "0,0.5", "--keep", "best"]) == 0
    assert evaluated == ["base", "alpha-0.5"]
    assert main([*words, "--alpha", "1,0.5", "--keep", "best"]) == 0
    assert evaluated[2:] == ["alpha-1.0"]
    assert [path.name for path in (out / "models").iterdir()] == ["alpha-1.0"]
    merged = read_model(out / "models" / "alpha-1.0")["model.norm.weight"]
    assert floats(merged).tolist() == [1.0] * 4
    card = (out / "models" / "alpha-1.0" / "README.md").read_text()
    assert "type: envserver/math" in card and "| math | test | 3 | 6 | 1.000 |" in card

    found = json.loads((out / "sweep.json").read_text())
    rewards = {one["alpha"]: one["rewards"]["math"]["value"] for one in found["points"]}
    assert list(rewards) == [0.0, 0.5, 1.0] and (rewards[0.0], rewards[1.0]) == (0.0, 1.0)
    circles = ElementTree.parse(out / "sweep.svg").getroot().findall("{*}circle")
    heights = [float(one.attrib["cy"]) for one in circles]
    assert len(circles) == 3 and heights[0] > heights[1] > heights[2]
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == str(out / "sweep.svg")
    assert "1 *" in told.err and "Best: alpha 1" in told.err

    os.utime(tmp_path / "tuned" / "model.safetensors", (1, 1))  # other weights, as far as told
    assert main([*words, "--alpha", "1"]) == 2
    assert "a sweep of other models" in capsys.readouterr().err
    assert main([*words, "--alpha", "1,1"]) == 2
    assert main([*words, "--model", "sim"]) == 2
    assert len(evaluated) == 3
