"""Environments of rows and reward functions: kinds of files, bad rows, settings, the command."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.commands import envserver, read_jsonl

from envserver import (
    ConfigError,
    InputError,
    NotFoundError,
    Result,
    Split,
    Task,
    from_rows,
)
from envserver.registry import absolute, find
from envserver.running.python_api import reference_of

ROWS = [
    {"question": "What is 2 + 3?", "answer": "5", "level": 1},
    {"question": "What is 20 + 3?", "answer": "23", "level": 2},
    {"question": 'Which line\nbreaks, "here"?', "answer": "this, one", "level": 3},
]


def exact(answer: Any, output: str) -> float:
    return float(output.strip() == str(answer))


def tasks_of(
    data: Path | list[dict[str, Any]] | str, split: Split = "train", **settings: Any
) -> list[Task]:
    given = {"prompt": "question", "shuffle": False, "reward": exact, **settings}
    made = from_rows(data, **given)()
    return list(made.tasks(split))


def write(folder: Path) -> Path:
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    return path


def test_rows_of_a_file_are_tasks(tmp_path: Path) -> None:
    tasks = tasks_of(write(tmp_path))
    assert [task.id for task in tasks] == ["row-0", "row-1", "row-2"]
    for task, row in zip(tasks, ROWS, strict=True):
        assert task.public["messages"] == [{"role": "user", "content": row["question"]}]
        assert row["answer"] == task.hidden["answer"] not in json.dumps(task.public)
        assert task.hidden["columns"]["level"] == row["level"]


def test_a_list_of_rows_templates_systems_and_conversations() -> None:
    tasks = tasks_of(ROWS, prompt="{question} Level {level}.", system="Be brief.")
    assert tasks[0].public["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 3? Level 1."},
    ]
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (task,) = tasks_of([{"talk": talk, "gold": {"right": 7}}], prompt="talk", answer="gold.right")
    assert task.public["messages"] == talk and task.hidden["answer"] == 7


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Stands for a data set on the hub: `datasets` looks for such a folder first."""
    hub = tmp_path / "acme" / "sums"
    hub.mkdir(parents=True)
    (hub / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (hub / "test.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    return hub


def answers(*given: Any, **settings: Any) -> list[Any]:
    return [task.hidden["answer"] for task in tasks_of(*given, **settings)]


@pytest.mark.thorough  # imports `datasets`
def test_data_sets_of_the_hub(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert answers("hub:acme/sums", "test") == ["23"]
    with pytest.raises(ConfigError, match="cannot be loaded"):
        tasks_of("hub:acme/sums", "validation")


def test_names_of_splits_may_differ(hub: Path) -> None:
    assert answers(hub, "validation", splits={"validation": "test"}) == ["23"]


def test_held_out_rows_are_in_one_split_only() -> None:
    many = [{"question": f"{n}?", "answer": str(n)} for n in range(200)]
    splits: tuple[Split, ...] = ("train", "validation", "test")
    parts = [{t.id for t in tasks_of(many, split, held_out=0.5)} for split in splits]
    assert set.union(*parts) == {t.id for t in tasks_of(many)}
    assert sum(map(len, parts)) == 200 and min(map(len, parts)) > 20


BAD = """{"question": "What is 2 + 3?", "answer": "5"}
{"question": "What is 1 + 1?"

["no", "columns"]
{"question": "", "answer": "5"}
{"question": "What is 4?", "answer": null}
"""


def test_bad_rows_are_named_with_their_place_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(BAD)
    with pytest.raises(ConfigError) as raised:
        tasks_of(path)
    first, *lines = raised.value.message.splitlines()
    assert first == "4 of 5 rows cannot become tasks:"
    complaints = {
        2: "not JSON", 4: "not an object", 5: "'question' is empty", 6: "'answer' has no value"
    }  # fmt: skip
    for line, (number, what) in zip(lines, complaints.items(), strict=True):
        assert line.startswith(f"{path}:{number}: ") and what in line
    assert [task.id for task in tasks_of(path, bad_rows="skip")] == ["row-0"]
    for text, complaint in (
        ('question,answer\n"two\nlines",5\nonly one\n', "4: it has 1 values for 2 columns"),
        ("question,question\na,b\n", "1: .* names question twice"),
        ('question,answer\n"never closed,5\n', "2: it cannot be read"),
    ):
        table = tmp_path / "sums.csv"
        table.write_text(text)
        with pytest.raises(ConfigError, match=f"sums.csv:{complaint}"):
            tasks_of(table)


def test_wrong_names_say_what_there_is() -> None:
    missing = "'prompt' is missing; there are question, answer, level"
    for settings, complaint in (
        ({"prompt": "prompt"}, missing),
        ({"promt": "question"}, "no argument 'promt'"),
        ({"held_out": 5}, "held_out: Input should be less than 1"),
        ({"prompt": "{question"}, "braces"),
        ({"reward": None}, "no reward function"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            tasks_of(ROWS, **settings)
    with pytest.raises(NotFoundError, match=r"no data file 'nowhere.jsonl'"):
        from_rows("nowhere.jsonl", reward=exact)
    with pytest.raises(NotFoundError):
        find("nowhere.jsonl")


def test_subclasses_and_rows_of_questions() -> None:
    class Sums(from_rows(ROWS, prompt="question", reward=exact)):  # type: ignore[misc]
        """Has a demonstration of its own."""

        def demonstration(self, task: Task) -> list[dict[str, Any]]:
            return [{"role": "assistant", "content": f" {task.hidden['answer']} "}]

    made = Sums()
    task = next(made.tasks("train"))
    shown = made.demonstration(task)[0]["content"]
    assert Sums.name == "sums" and made.score(task, Result(output=shown)).reward == 1.0
    row = made.task_from_row({"question": "Why?", "answer": "So."})
    assert made.score(row, Result(output="So.")).reward == 1.0
    with pytest.raises(InputError, match="'question' is missing"):
        made.task_from_row({"answer": "So."})


REWARDS = """
def exact(answer, output):
    return output.strip() == answer

async def short(completions, **columns):
    return [1.0 if len(text) < 40 else 0.0 for text in completions]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "own.py").write_text(
        "from envserver import from_rows\n"
        "from my_rewards import exact, short\n"
        "Own = from_rows(\n"
        "    'sums.jsonl', prompt='question', reward=[(exact, 1.0), (short, 0.5)])\n"
    )
    return tmp_path


def test_the_command_takes_rows_and_functions(folder: Path) -> None:
    flags = ["--env", "sums.jsonl", "--env.prompt", "question"]
    rewards = ["--env.reward", "my_rewards.py:exact", "--env.reward", "my_rewards.py:short=0.5"]
    ran = envserver(
        *("process", *flags, *rewards, "--model", "sim", "--sim.solve_probability", 1),
        *("--sim.openers", "false", "--sampling.temperature", 0, "--out", "out.jsonl"),
        folder=folder,
    )
    assert ran.returncode == 0, ran.stderr
    scores = [set(group["scores"]) for group in read_jsonl(folder / "out.jsonl")]
    assert scores == [{1.5}] * 3
    assert absolute("sums.jsonl") == str(Path("sums.jsonl").resolve())


def test_the_python_api_names_the_class_as_its_file_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = find(str(folder / "own.py"))
    assert own.name == "sums_rows"
    reference = reference_of(own)
    assert reference == f"{(folder / 'own.py').resolve()}:Own" and find(reference) is own
    monkeypatch.chdir(folder)
    assert find("own.py") is own
    shutil.copytree(folder, folder / "other")
    monkeypatch.chdir(folder / "other")  # the same words name another file here
    assert find("own.py") is not own


@pytest.mark.thorough
def test_check_is_green_for_a_file_that_names_rows(folder: Path) -> None:
    plain = folder / "exact.py"
    plain.write_text((folder / "own.py").read_text().replace(", (short, 0.5)", ""))
    ran = envserver("check", "--env", "exact.py", folder=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "sums_rows, train: all 3 tasks." in ran.stdout
    ran = envserver("check", "--env", "own.py", folder=folder)  # `short` pays for nothing said
    assert ran.returncode == 1 and "empty text, task row-" in ran.stdout


@pytest.mark.thorough  # five commands
def test_functions_of_the_sampled_tokens_get_them_in_every_command(folder: Path) -> None:
    (folder / "lengths.py").write_text(
        "def right(answer, output):\n    return output.strip() == answer\n\n"
        "def tokens(completion_ids, **columns):\n    return [min(len(completion_ids[0]), 1000)]\n"
    )
    names = ("--env.reward", "lengths.py:right", "--env.reward", "lengths.py:tokens=-0.0001")
    flags = ("--env", "sums.jsonl", "--env.prompt", "question", *names)
    play = ("--model", "sim", "--sim.solve_probability", 1, "--sim.openers", "false")

    def ran(*words: object) -> str:
        done = envserver(*words, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def lengths(path: str) -> list[float]:
        groups = read_jsonl(folder / path)
        told = [one for group in groups for one in group["envserver"]["rollouts"]]
        return [one["components"]["tokens"] for one in told]

    bounds = ("--env.reward_range", "[-10, 1]", "--env.solved_at", 0.9)
    assert "All checks passed." in ran("check", *flags, *bounds, "--plays", 1)
    ran("process", *flags, *bounds, *play, "--env.group_size", 2, "--out", "out.jsonl")
    assert len(lengths("out.jsonl")) == 6 and min(lengths("out.jsonl")) >= 2
    ran("rescore", "out.jsonl", *flags, *bounds, "--out", "again.jsonl")
    assert lengths("again.jsonl") == lengths("out.jsonl")
    told = read_jsonl(folder / "out.jsonl")[0]["envserver"]["rollouts"][0]
    ran("replay", "out.jsonl", "--rollout", told["rollout_id"], *flags, *bounds)
    ran("run", *flags, *bounds, *play, "--task", "row-0", "--debug", "-o", "t.json")
    assert json.loads((folder / "t.json").read_text())["metadata"]["reward"] > 0.9


def test_the_command_says_what_is_wrong(folder: Path) -> None:
    (folder / "bad.jsonl").write_text(BAD)
    flags = ["--env.prompt", "question", "--env.reward", "my_rewards.py:exact"]
    ran = envserver("check", "--env", "bad.jsonl", *flags, folder=folder)
    assert ran.returncode == 2 and "4 of 5 rows cannot become tasks" in ran.stderr
    assert f"{folder.resolve() / 'bad.jsonl'}:2: " in ran.stderr
    reward = f"{folder / 'my_rewards.py'}:exakt"
    made = from_rows(ROWS, prompt="question", reward=reward)()
    with pytest.raises(ConfigError, match="has no function 'exakt'"):
        made.score(next(made.tasks("train")), Result(output="5"))
