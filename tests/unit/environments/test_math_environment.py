"""The environment `math`: its tasks and where they come from, and how its agent talks and ends.

For the hub stands a folder with the hub's id as its path: `load_dataset` looks there first.
"""

import json
import re
import sys
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import pytest
from envserver_environments.math import procedural
from envserver_environments.math.data_sets import HUBS, read_problem
from envserver_environments.math.env import Math
from envserver_records.extras import install_command
from envserver_records.tasks import Json
from envserver_tools.calculator import calculate
from support.cases import cases_of
from support.scripted_run import ScriptedRun, call, calls, says

from envserver import ConfigError, InputError, Message, NotFoundError, Result, Split, Task

ROWS = cases_of(__file__)
PUBLISHED, REFUSED = ROWS.pop("published"), ROWS.pop("refused")


def math_of(data_set: str | list[str], **settings: Any) -> Math:
    return Math(Math.Config(data_set=data_set, **settings))


# Where rows come from.


@pytest.mark.parametrize("name", REFUSED)
def test_rows_without_a_question_or_an_answer_say_why(name: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(REFUSED[name]['reason'])}"):
        read_problem(REFUSED[name]["row"])


def test_unusable_rows_are_dropped_and_data_that_does_not_fit_is_a_clear_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps(ROWS["gsm8k"]["row"])
    talk = '[{"value": "q"}, {"ground_truth": {"value": "2"}}]'
    path.write_text(
        f'{good}\n{talk}\n{{"question": "q"}}\nnot json\n\n{good.replace("1,250", "n/a")}\n'
    )
    env = math_of("gsm8k", data_path=path)
    assert {task.id for task in env.tasks("train")} == {"gsm8k-0", "gsm8k-1"}
    assert sum(env.rows.dropped.values()) == 3
    path.write_text('{"a": 1}\n' * 3)
    (tmp_path / "rows.csv").write_text("a,b")
    (tmp_path / "rows.txt").write_text("a,b")
    for name, data_path, error, words in (
        ("gsm8k", path, ConfigError, "no usable row"),
        ("gsm8k", tmp_path / "no.jsonl", NotFoundError, None),
        ("gsm8k", tmp_path / "rows.csv", ConfigError, "it is empty"),
        ("gsm8k", tmp_path / "rows.txt", ConfigError, "not one of"),
    ):
        with pytest.raises(error, match=words):
            next(math_of(name, data_path=data_path).tasks("train"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_of_published_layouts_are_read_and_their_answers_paid(name: str) -> None:
    case = PUBLISHED[name]
    problem = read_problem(case["row"], columns=case.get("columns"))
    assert (problem.answer, problem.kind) == (case["answer"], case["kind"])
    assert case.get("question", problem.question) == problem.question
    assert problem.options == case.get("options", [])
    task = Math(Math.Config(columns=case.get("columns", {}))).task_from_row(case["row"])
    for text, reward in (
        (case.get("said", case["answer"]), 1.0),
        ("J" if problem.options else "-3", 0.0),
    ):
        assert Math().score(task, Result(output={"answer": text, "text": ""})).reward == reward


def test_unknown_fields_are_named_with_what_is_missing() -> None:
    with pytest.raises(InputError, match=r"has its answer or solution .*: puzzle, problem"):
        read_problem({"puzzle": "1", "problem": "p"})
    with pytest.raises(InputError, match="no field 'clue'"):
        read_problem({"question": "q", "answer": "1"}, columns={"question": "clue"})


def test_several_data_sets_are_mixed(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS["svamp"]["row"]) + "\n")
    assert math_of("sample,svamp", data_path=None).config.data_set == ["sample", "svamp"]
    both = math_of(["svamp", "sample"], data_path=tmp_path)
    assert {task.id for task in both.tasks("train")} == {"svamp-0", "chal-1"}


def put_folder(folder: Path, row: Json, configs: tuple[str | None, ...], split: str) -> None:
    """A data set of one row per configuration, declared as the hub's are."""
    declared = ""
    for name in (config or "default" for config in configs):
        data = folder / name / f"{split}.jsonl"
        data.parent.mkdir(parents=True)
        data.write_text(json.dumps(row) + "\n")
        files = f"- split: {split}\n    path: {name}/{split}.jsonl"
        declared += f"- config_name: {name}\n  data_files:\n  {files}\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{declared}---\n")


@pytest.mark.parametrize("data_set", sorted(HUBS))
def test_rows_of_the_hub_become_tasks_that_their_answers_solve(
    tmp_path: Path, data_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source, row, answer = HUBS[data_set], ROWS[data_set]["row"], ROWS[data_set]["answer"]
    split: Split = "train" if "train" in source.splits else "test"
    if data_set == "mathqa":  # it comes in a zip
        with zipfile.ZipFile(tmp_path / "MathQA.zip", "w") as file:
            for name in ("train", "dev", "test"):
                file.writestr(f"{name}.json", json.dumps([row]))
        files = source.arguments["data_files"]
        for name, address in list(files.items()):
            inside, _, _ = address.partition("::")
            monkeypatch.setitem(files, name, f"{inside}::{tmp_path / 'MathQA.zip'}")
    else:
        put_folder(tmp_path / source.path, row, source.configs, source.splits[split])
    environment = math_of(data_set)
    tasks = list(environment.tasks(split))
    assert len(tasks) == len({task.id for task in tasks}) == len(source.configs)
    for task in tasks:
        assert answer not in json.dumps(task.public.get("answer", ""))
        for text, reward in ((answer, 1.0), ("A" if answer != "A" else "B", 0.0)):
            result = Result(output={"answer": text, "text": ""})
            assert environment.score(task, result).reward == reward


# Problems that are generated.


@pytest.fixture
def fresh() -> Iterator[None]:
    """The library of generators is looked for anew."""
    procedural._library.cache_clear()
    procedural._block.cache_clear()
    yield
    procedural._library.cache_clear()
    procedural._block.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("data_set", "module", "extra"),
    [("gsm8k", "datasets", "data"), ("procedural", "reasoning_gym", "procedural")],
)
def test_a_missing_library_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, data_set: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=re.escape(install_command(extra))):
        next(math_of(data_set).tasks("train"))


class Generators:
    """Stands for reasoning-gym: generators by size and seed, and scorers that misbehave."""

    @staticmethod
    def create_dataset(name: str, size: int, seed: int) -> list[Json]:
        numbers, metadata = range(seed, seed + size), {"source_dataset": name}
        return [
            {"question": f"{name} {n}", "answer": str(n), "metadata": metadata} for n in numbers
        ]

    @staticmethod
    def get_score_answer_fn(name: str) -> Any:
        odd = {"raise": lambda: 1 / 0, "half": lambda: 0.5, "much": lambda: 7.0}
        return lambda answer, entry: odd.get(answer, lambda: float(answer == entry["answer"]))()


@pytest.mark.usefixtures("fresh")
def test_generated_problems_are_endless_split_and_scored_safely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", Generators())
    env = math_of("procedural", procedural=["gcd", "lcm"])
    tasks = list(islice(env.tasks("train"), 3000))
    assert tasks[:50] == list(islice(env.tasks("train"), 50))
    questions = {task.public["question"] for task in tasks}
    assert len(questions) == len({task.id for task in tasks}) == 3000
    assert not questions & {t.public["question"] for t in islice(env.tasks("test"), 3000)}
    rewards = [
        env.score(tasks[0], Result(output={"answer": text, "text": ""})).reward
        for text in (tasks[0].hidden["answer"], "wrong", "raise", "half", "much")
    ]
    assert rewards == [1.0, 0.0, 0.0, 0.0, 1.0]
    with pytest.raises(ConfigError, match="not allowed"):
        next(math_of("procedural", procedural=["coin_flip"]).tasks("train"))


def test_polynomials_are_compared_term_by_term_and_never_evaluated(tmp_path: Path) -> None:
    env = Math()
    metadata = {"source_dataset": "polynomial_multiplication"}
    row = {"question": "x*(6*x - y)", "answer": "6*x**2 - x*y", "metadata": metadata}
    task = env.task_from_row(row)

    def paid(*answers: str) -> list[str]:
        return [
            answer
            for answer in answers
            if env.score(task, Result(output=f"\\boxed{{{answer}}}")).reward != 0.0
        ]

    right = ["6*x**2 - x*y", r"-y*x + 2*x*3*x", "6*x^2-x*y", "6*x**2 - x*y + 0*z"]
    assert paid(*right) == right
    assert paid("6*x**2 + x*y", "x*(6*x - y)", "6 x**2 - x*y", "9**9**9", "") == []
    answer = f'__import__("pathlib").Path("{tmp_path}/hole").touch()'
    assert env.score(task, Result(output={"answer": answer, "text": ""})).reward == 0.0
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("reasoning_gym", "fresh")
def test_generators_of_the_real_library_score_their_own_answers() -> None:
    env = math_of("procedural")
    for task in islice(env.tasks("train"), 60):
        task = Task(task.id, task.public, json.loads(json.dumps(task.hidden)))
        for text, expected in ((task.hidden["answer"], 1.0), ("0.123456", 0.0)):
            got = env.score(task, Result(output={"answer": text, "text": ""})).reward
            assert got == expected, (task, text)


def test_arithmetic_and_sorting_have_every_problem_once_in_one_split_only() -> None:
    def of(split: Split, name: str = "arithmetic", **config: Any) -> dict[str, Task]:
        tasks = list(math_of(name, **config).tasks(split))
        found = {task.id: task for task in tasks}
        assert len(found) == len(tasks)
        return found

    splits = [of(split) for split in get_args(Split)]
    everything = {task_id: task for tasks in splits for task_id, task in tasks.items()}
    assert len(everything) == sum(map(len, splits)) == 100 + 55
    for task in everything.values():
        assert calculate(task.hidden["expression"]) == task.hidden["answer"]
        assert task.hidden["expression"] in task.public["question"]
    endless = math_of("arithmetic", max_operand=10**12).tasks("train")
    assert len({task.id for task in islice(endless, 50)}) == 50

    splits = [of(split, "sorting") for split in get_args(Split)]
    assert len(set().union(*splits)) == sum(map(len, splits)) == 9**5
    for task in islice(splits[0].values(), 100):
        number = task.public["question"].removeprefix("Sort ")
        assert task.hidden["answer"] == "".join(sorted(number))


# The agent.


async def play(*turns: Message, **settings: Any) -> tuple[ScriptedRun, Any]:
    """What an agent whose model says `turns` was sent, and what it returned."""
    run = ScriptedRun(turns, max_turns=12)
    env = Math(Math.Config(**settings))
    task = env.task_from_row({"question": "What is 6 times 7?", "answer": "#### 42"})
    return run, await env.rollout(task.without_hidden(), run)  # type: ignore[arg-type]


FINISH, BOXED = call("finish", answer="42"), says(r"\boxed{42}")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("calculate", "{"),
        ("calculate", '{"expression": 1}'),
        ("finish", "{}"),
        ("finish", json.dumps({"answer": "1" * 501})),
        ("shell", "{}"),
    ],
)
async def test_broken_calls_are_answered_and_counted(name: str, arguments: str) -> None:
    run, output = await play(calls((name, arguments)), FINISH)
    assert output["answer"] == "42"
    assert run.told()[-1].startswith("Error: ")
    assert run.metrics["tool_errors"] == 1


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ('```bash\npython -c "print(6*7)"\n```', "42"),
        ("```\npython3 -c 'print(6*7)'\n```", "42"),
        ('```bash\npython -c "print(open(1))"\n```', "error: call"),
        ("```bash\nrm -rf /\n```", "Error: "),
        ('```bash\npython -c "import os"\n```', "Error: "),
        ('```bash\npython -c "print(1)"; ls\n```', "Error: "),
        ('```bash\npython -c "print(1)\n```', "Error: "),
        ("```bash\na\n```\n```bash\nb\n```", "Error: "),
        ("```python\nprint(6*7)\n```", "Error: "),
        ("```bash\n" + "a " * 500_000 + "\n```", "Error: the command is too long"),
    ],
)
async def test_seed0_commands_are_calculated_never_run(text: str, output: str) -> None:
    run, ended = await play(says(text), BOXED, mode="seed0")
    assert ended["text"] == BOXED["content"]
    assert run.told(role="user")[-1].startswith(f"Output:\n{output}")
