"""Two evaluations held against each other: the test by brute force, and what is told of tasks."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from envserver_records.errors import InputError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.extent import examples

from envserver.evaluation import AttemptResult, Rules, TaskResult, report_run
from envserver.evaluation.comparison import Comparison, compare
from envserver.evaluation.comparison_tables import comparison_markdown, comparison_notes
from envserver.evaluation.harness import HarnessRun, harvest, report_harness
from envserver.evaluation.page import comparison_page, report_page
from envserver.evaluation.report import Counted, Report
from envserver.evaluation.signs import sign_flip_test
from envserver.evaluation.suite import suite_of
from envserver.evaluation.tables import markdown_of

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
    for told in ("gone", "1 task (new)", "ask something else", "did not come to its end"):
        assert told in words


@settings(max_examples=examples(20))
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_the_other_way_round_it_is_the_same_the_other_way_round(
    passed: list[tuple[bool, bool]],
) -> None:
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
