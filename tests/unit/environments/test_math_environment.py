"""The environment `math`: its tasks and where they come from."""

from __future__ import annotations

import json
import math
import re
import sys
import types
from collections import Counter
from itertools import combinations, islice, pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from envserver_environments.math import procedural
from envserver_environments.math.data_sets import read_problem
from envserver_environments.math.env import Math
from envserver_environments.math.loading import SAMPLE
from envserver_environments.math.verification import Verdict, compare
from envserver_records.extras import install_command
from envserver_tools.calculator import calculate

from envserver import ConfigError, InputError, NotFoundError, Result, Split, Task


def sample_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]


def test_sample_has_the_documented_tasks() -> None:
    rows = sample_rows()
    assert Counter(row["data_set"] for row in rows) == {
        "gsm8k": 16, "math": 10, "aime": 6, "svamp": 5, "mawps": 3, "mathqa": 4, "aqua": 4,
    }  # fmt: skip
    tasks = list(Math().tasks("train"))
    assert {task.id for task in tasks} == {row["id"] for row in rows}
    assert len({row.get("question", row.get("problem")) for row in rows}) > 35
    assert {read_problem(row).answer for row in rows if row["data_set"] == "aqua"} >= {"E"}


def test_sample_word_problems_compute_to_their_answers() -> None:
    for row in sample_rows():
        answer = read_problem(row).answer
        match row["data_set"]:
            case "gsm8k":
                marks = re.findall(r"<<([^=]+)=([^>]+)>>", row["answer"])
                assert all(calculate(left) == right for left, right in marks), row["id"]
                assert marks[-1][1] == answer, row["id"]
            case "svamp":
                assert calculate(row["Equation"]) == answer
            case "mawps":
                assert math.isclose(
                    float(calculate(row["expression"])), float(calculate(answer)), abs_tol=1e-9
                )


def test_sample_competition_problems_have_the_answers_of_brute_force() -> None:
    computed = [
        pow(3, 2026, 1000),
        sum((n % 6 == 0) != (n % 15 == 0) for n in range(1, 1001)),
        sum(1800 % n == 0 for n in range(1, 1801)),
        sum(n for n in range(1, 51) if (n * n + n + 1) % 7 == 0),
        sum(
            all(b - a > 1 for a, b in pairwise(chosen))
            for size in range(11)
            for chosen in combinations(range(10), size)
        ),
        next(n for n in range(1, 999) if str(math.factorial(n))[::-1].find(next_digit(n)) == 31),
    ]
    golds = [read_problem(row).answer for row in sample_rows() if row["data_set"] == "aime"]
    assert golds == [str(value) for value in computed]


def next_digit(n: int) -> str:
    """The last digit of n! that is not zero: its place counts the zeros behind it."""
    return str(math.factorial(n)).rstrip("0")[-1]


def test_sample_algebra_agrees_with_sympy() -> None:
    sympy = pytest.importorskip("sympy")
    x = sympy.Symbol("x", real=True)
    throws = sum(a + b == 9 for a in range(1, 7) for b in range(1, 7))
    product = sympy.Matrix([[1, 2], [0, 3]]) * sympy.Matrix([[2, 1], [4, 0]])
    computed = [
        sympy.latex(sympy.Rational(throws, 36)),
        sympy.latex(sympy.sqrt(3**2 + 6**2)),
        sympy.latex(sympy.pi * 5**2),
        str(sympy.solve_univariate_inequality(abs(x - 3) < 5, x, relational=False).args[:2]),
        sympy.latex(sympy.FiniteSet(*sympy.solve(x**2 - 5 * x - 14, x))),
        str(tuple(sympy.Matrix([[1, 1], [2, -1]]).solve(sympy.Matrix([11, 4])))),
        sympy.latex(product),
        sympy.latex(sympy.expand((x + 2) * (x**2 - 3))),
        sympy.latex(sympy.expand((2 + 3 * sympy.I) * (1 - sympy.I))),
        sympy.latex(sympy.solve(3 * sympy.Symbol("y") - 7 - x, sympy.Symbol("y"))[0]),
    ]
    golds = [read_problem(row).answer for row in sample_rows() if row["data_set"] == "math"]
    verdicts = {
        (gold, value): compare(gold, value) for gold, value in zip(golds, computed, strict=True)
    }
    assert set(verdicts.values()) == {Verdict.EQUAL}, verdicts


def test_sample_multiple_choice_answers_are_computed() -> None:
    computed = {
        "sample-mathqa-01": 90 / (75 / 60),
        "sample-mathqa-02": 640 * 85 / 100,
        "sample-mathqa-03": math.lcm(12, 15, 20),
        "sample-mathqa-04": 72 / 8 * 5,
        "sample-aqua-01": 3 * 2.5 / 5,
        "sample-aqua-02": 1 / (1 / 6 - 1 / 10),
        "sample-aqua-03": sum(range(1, 40, 2)),
        "sample-aqua-04": 800 * 0.05 * 3,
    }
    for row in sample_rows():
        if row["id"] in computed:
            problem = read_problem(row)
            numbers = [re.sub(r"[^0-9.]", "", option).strip(".") for option in problem.options]
            near = [
                i for i, n in enumerate(numbers) if n and abs(float(n) - computed[row["id"]]) < 1e-9
            ]
            letter = "ABCDE"[near[0]] if near else "E"
            assert letter == problem.answer and len(near) <= 1, row["id"]


def test_tasks_are_lazy_deterministic_in_the_seed_and_hide_their_answers() -> None:
    first, again, other = (
        [task.id for task in Math(Math.Config(seed=seed)).tasks("train")] for seed in (1, 1, 2)
    )
    assert first == again != other and sorted(first) == sorted(other)
    for task in islice(Math().tasks("test"), 48):
        assert set(task.public) == {"question", "options", "data_set"}
        assert "####" not in json.dumps(task.public) and "boxed" not in json.dumps(task.public)


OPTIONS = "a ) 1 , 000 , b ) 2 , c ) 3 , d ) 4 , e ) none of these"
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "gsm8k": ({"question": "q", "answer": "#1 of 2\n#### -1,250 "}, "-1250"),
    "math": (
        {"problem": "p", "level": "", "solution": r"\boxed{1}, $\boxed{\frac{1}{\sqrt{2}}}$"},
        r"\frac{1}{\sqrt{2}}",
    ),
    "math500": ({"problem": "p", "solution": "s", "answer": "x^2", "unique_id": "u"}, "x^2"),
    "svamp": ({"Body": "b", "Question": "q", "Answer": "100.0", "Equation": "e"}, "100"),
    "mawps": ({"question": "q", "result": "12_000", "chain": ""}, "12000"),
    "mathqa": (
        {"Problem": "p", "options": OPTIONS, "correct": "e"},
        "E",
    ),
    "aqua": ({"question": "q", "options": ["A)1", "B)2", "C)3"], "correct": "C"}, "C"),
    "aime": ({"problem": "p", "answer": "033"}, "33"),
    "deepmath": ({"question": "q", "final_answer": r"\ln 2"}, r"\ln 2"),
    "mathx": ({"problem": "p", "expected_answer": "7", "generated_solution": "s"}, "7"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_recognised_and_their_answers_taken(name: str) -> None:
    row, answer = ROWS[name]
    problem = read_problem(row)
    assert (problem.data_set, problem.answer) == (name, answer)
    assert read_problem(row, name) == problem == read_problem({**row, "source": name})


def test_options_are_read_in_every_spelling() -> None:
    texts = ["1 , 000", "2", "3", "4", "none of these"]
    listed = str([f"{letter} ) {text}" for letter, text in zip("abcde", texts, strict=True)])
    labelled = [f"{letter}){text}" for letter, text in zip("ABCDE", texts, strict=True)]
    for options in (OPTIONS, listed, labelled):
        assert read_problem({**ROWS["mathqa"][0], "options": options}).options == texts


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"text": "x"},
        {"question": "q", "answer": "no mark"},
        {"problem": "p", "solution": "no box"},
        {"problem": "p", "solution": r"\boxed{1"},
        {"Body": "b", "Question": "q", "Answer": "many"},
        {"Body": "b", "Question": "q", "Answer": "NaN"},
        {"Body": "b", "Question": "q", "Answer": "1e999999999"},
        {"Body": "b", "Question": "q", "Answer": "1e-999999999"},
        {"Body": "b", "Question": None, "Answer": "1"},
        {"question": "q", "options": [None, None], "correct": "A"},
        {"problem": "p", "answer": None},
        {"problem": "p", "answer": "9" * 301},
        {"question": "q", "options": ["A)1", "B)2"], "correct": "E"},
        {"Problem": "p", "options": "['a ) 1'", "correct": "a"},
        {"question": "q", "answer": "1", "data_set": "svamp"},
    ],
)
def test_rows_without_a_shape_or_an_answer_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Math().task_from_row(row)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("name", ROWS)
def test_local_files_are_read_in_each_shape(tmp_path: Path, name: str, suffix: str) -> None:
    row, answer = ROWS[name]
    rows = [{**row, "extra": i} for i in range(5)]
    text = json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows)) + "\n"
    (tmp_path / f"train.{suffix}").write_text(text)
    tasks = list(Math(Math.Config(data_set=name, data_path=tmp_path)).tasks("train"))
    assert sorted(task.id for task in tasks) == [f"{name}-{i}" for i in range(5)]
    assert {task.hidden["answer"] for task in tasks} == {answer}


def test_unusable_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps(ROWS["gsm8k"][0])
    path.write_text(f'{good}\n{{"question": "q"}}\nnot json\n\n{good.replace("1,250", "n/a")}\n')
    env = Math(Math.Config(data_set="gsm8k", data_path=path))
    assert [task.id for task in env.tasks("train")] == ["gsm8k-0"]
    assert sum(env.dropped.values()) == 3


def test_data_that_does_not_fit_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n' * 3)
    with pytest.raises(ConfigError, match="no usable row"):
        next(Math(Math.Config(data_set="gsm8k", data_path=path)).tasks("train"))
    with pytest.raises(NotFoundError):
        next(Math(Math.Config(data_set="gsm8k", data_path=tmp_path / "no.jsonl")).tasks("train"))
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(ConfigError, match="not one of"):
        next(Math(Math.Config(data_set="gsm8k", data_path=tmp_path / "rows.csv")).tasks("train"))


def test_the_hub_is_asked_for_the_right_data(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((path, config, split, streaming))
        return [{"problem": f"p{i}", "solution": rf"\boxed{{{i}}}"} for i in range(2)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    tasks = list(Math(Math.Config(data_set="math")).tasks("test"))
    assert len(tasks) == len({task.id for task in tasks}) == 14
    assert {call[0] for call in asked} == {"EleutherAI/hendrycks_math"} and len(asked) == 7
    with pytest.raises(ConfigError, match="no split"):
        next(Math(Math.Config(data_set="math500")).tasks("train"))


@pytest.mark.parametrize(
    ("data_set", "module", "extra"),
    [("gsm8k", "datasets", "data"), ("procedural", "reasoning_gym", "procedural")],
)
def test_a_missing_library_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, data_set: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    procedural._library.cache_clear()
    procedural._block.cache_clear()
    with pytest.raises(ConfigError, match=re.escape(install_command(extra))):
        next(Math(Math.Config(data_set=data_set)).tasks("train"))


def test_several_data_sets_are_mixed(tmp_path: Path) -> None:
    for name in ("gsm8k", "svamp"):
        (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[name][0]) + "\n")
    env = Math(Math.Config(data_set="sample,svamp", data_path=None))
    assert env.config.data_set == ["sample", "svamp"]
    both = Math(Math.Config(data_set=["svamp", "sample"], data_path=tmp_path))
    assert {task.id.split("-")[0] for task in both.tasks("train")} == {"svamp", "sample"}


class FakeGenerators(types.SimpleNamespace):
    """Stands for reasoning-gym: generators by size and seed, and scorers that misbehave."""

    @staticmethod
    def create_dataset(name: str, size: int, seed: int) -> list[dict[str, Any]]:
        return [
            {
                "question": f"{name} {seed + i}",
                "answer": str(seed + i),
                "metadata": {"source_dataset": name},
            }
            for i in range(size)
        ]

    @staticmethod
    def get_score_answer_fn(name: str) -> Any:
        def scorer(answer: str, entry: dict[str, Any]) -> float:
            return {"raise": lambda: 1 / 0, "half": lambda: 0.5, "much": lambda: 7.0}.get(
                answer, lambda: float(answer == entry["answer"])
            )()

        return scorer


def test_generated_problems_are_endless_split_and_scored_safely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", FakeGenerators())
    procedural._library.cache_clear()
    procedural._block.cache_clear()
    env = Math(Math.Config(data_set="procedural", procedural=["gcd", "lcm"]))
    tasks = list(islice(env.tasks("train"), 3000))
    assert tasks[:50] == list(islice(env.tasks("train"), 50))
    questions = {task.public["question"] for task in tasks}
    assert len(questions) == len({task.id for task in tasks}) == 3000
    assert not questions & {t.public["question"] for t in islice(env.tasks("test"), 3000)}
    answer = tasks[0].hidden["answer"]
    rewards = [
        env.score(tasks[0], Result(output={"answer": text, "text": ""})).reward
        for text in (answer, "wrong", "raise", "half", "much")
    ]
    assert rewards == [1.0, 0.0, 0.0, 0.0, 1.0]
    with pytest.raises(ConfigError, match="not allowed"):
        next(Math(Math.Config(data_set="procedural", procedural=["coin_flip"])).tasks("train"))
    procedural._library.cache_clear()
    procedural._block.cache_clear()


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("6*x**2 - x*y", 1.0),
        (r"-y*x + 2*x*3*x", 1.0),
        ("6*x^2-x*y", 1.0),
        ("6*x**2 - x*y + 0*z", 1.0),
        ("6*x**2 + x*y", 0.0),
        ("x*(6*x - y)", 0.0),
        ("6 x**2 - x*y", 0.0),
        ("9**9**9", 0.0),
        ("", 0.0),
    ],
)
def test_polynomials_are_compared_term_by_term(answer: str, reward: float) -> None:
    env = Math()
    assert env.score(polynomial_task(env), Result(output=f"\\boxed{{{answer}}}")).reward == reward


def test_a_generated_problem_never_evaluates_its_answer(tmp_path: Path) -> None:
    answer = f'__import__("pathlib").Path("{tmp_path}/hole").touch()'
    env = Math()
    score = env.score(polynomial_task(env), Result(output={"answer": answer, "text": ""}))
    assert score.reward == 0.0 and not list(tmp_path.iterdir())


def polynomial_task(env: Math) -> Task:
    metadata = {"source_dataset": "polynomial_multiplication"}
    row = {"question": "x*(6*x - y)", "answer": "6*x**2 - x*y", "metadata": metadata}
    return env.task_from_row(row)


@pytest.mark.usefixtures("reasoning_gym")
def test_generators_of_the_real_library_score_their_own_answers() -> None:
    procedural._library.cache_clear()
    procedural._block.cache_clear()
    env = Math(Math.Config(data_set="procedural"))
    for task in islice(env.tasks("train"), 60):
        task = Task(task.id, task.public, json.loads(json.dumps(task.hidden)))
        for text, expected in ((task.hidden["answer"], 1.0), ("0.123456", 0.0)):
            got = env.score(task, Result(output={"answer": text, "text": ""})).reward
            assert got == expected, (task, text)


def test_arithmetic_has_every_small_problem_once_in_one_split_only() -> None:
    def of(split: Split, **config: Any) -> dict[str, Task]:
        tasks = list(Math(Math.Config(data_set="arithmetic", **config)).tasks(split))
        assert len({task.id for task in tasks}) == len(tasks)
        return {task.id: task for task in tasks}

    splits = [of(split) for split in get_args(Split)]
    everything = {task_id: task for tasks in splits for task_id, task in tasks.items()}
    assert len(everything) == sum(map(len, splits)) == 100 + 55
    assert 0.7 < len(splits[0]) / len(everything) < 0.9
    for task in everything.values():
        assert calculate(task.hidden["expression"]) == task.hidden["answer"]
        assert task.hidden["expression"] in task.public["question"]
    assert splits[0].keys() == of("train", seed=1).keys()
    assert list(splits[0]) != list(of("train", seed=1))
    assert of("test").keys() <= of("test", max_operand=12).keys()
    endless = Math(Math.Config(data_set="arithmetic", max_operand=10**12)).tasks("train")
    assert len({task.id for task in islice(endless, 50)}) == 50


def test_sorting_has_every_number_once_in_one_split_only() -> None:
    splits = [list(Math(Math.Config(data_set="sorting")).tasks(s)) for s in get_args(Split)]
    everything = {task.id: task for tasks in splits for task in tasks}
    assert len(everything) == sum(map(len, splits)) == 9**5
    assert len(splits[0]) > 40_000
    for task in islice(everything.values(), 100):
        number = task.public["question"].removeprefix("Sort ")
        assert task.hidden["answer"] == "".join(sorted(number))
