"""GAIA's tasks: the own ones, local copies in both layouts, and how a copy is fetched."""

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from envserver_environments.gaia.agents import AgentOptions
from envserver_environments.gaia.download import ANNOTATED, RAW, fetch, main, summary
from envserver_environments.gaia.env import Gaia
from envserver_environments.gaia.loading import GaiaQuestion, is_official, read_copy
from envserver_records.tasks import Json
from support.cases import write_jsonl
from support.hub import DataSetHub, serving

from envserver import Caller, ConfigError, NotFoundError, PublicTask


def row_of(task_id: str, answer: Any, level: str = "1", file_name: str = "", **more: Any) -> Any:
    return {
        "task_id": task_id, "Question": f"Question {task_id}?", "Level": level,
        "Final answer": answer, "file_name": file_name, **more,
    }  # fmt: skip


ROWS = [
    row_of("a", "3", **{"Annotator Metadata": {"Steps": "count them"}}),
    row_of("b", "red, blue", "2", "b.txt", **{"Annotator Metadata": {"Steps": "read it"}}),
    row_of("c", "?", "3"),
    row_of("d", "here", "2", "gone.txt"),
    row_of("e", "it", "4"),
    row_of("f", "so", "1", "../../../secret.txt"),
]


def as_parquet(rows: list[Json], file: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow (extra gaia) is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def copy_in(layout: str, root: Path) -> Path:
    """A local copy of ROWS."""
    folder = root / "copy" / "2023" / "validation"
    folder.mkdir(parents=True)
    (folder / "b.txt").write_text("red and blue")
    (root / "secret.txt").write_text("secret")
    (root / "copy" / "secret.txt").write_text("secret")
    if layout == "jsonl":
        write_jsonl(folder / "metadata.jsonl", ROWS)
        return root / "copy"
    rows = [{**row, "file_path": ""} for row in ROWS]
    rows[1]["file_path"] = "2023/validation/b.txt"
    if layout == "parquet":
        as_parquet(rows, folder / "metadata.parquet")
        as_parquet(rows[:1], folder / "metadata.level1.parquet")
    else:
        for level in "123":
            of_level = [row for row in rows if row["Level"] == level]
            as_parquet(of_level, folder / f"metadata.level{level}.parquet")
    return root / "copy"


@pytest.mark.parametrize("layout", ["jsonl", "parquet", "levels"])
def test_a_local_copy_is_read_in_every_layout(layout: str, tmp_path: Path) -> None:
    copy = copy_in(layout, tmp_path)
    found = [item for _, item in read_copy(copy, "validation")]
    items = {task.task_id: task for task in found if isinstance(task, GaiaQuestion)}
    assert set(items) == {"a", "b"}
    assert (items["a"].level, items["a"].attachment, items["a"].solution) == (1, None, None)
    assert items["b"].attachment is not None
    assert items["b"].attachment.read_text() == "red and blue"
    assert {why for why in found if isinstance(why, str)} - {"its level is not one of 1, 2, 3"} == {
        "its file is missing", "its file is outside of the copy", "no answer to compare with",
    }  # fmt: skip
    assert is_official(copy) and is_official(copy / "2023")
    assert is_official(copy / "2023" / "validation")
    for split in ("train", "test"):
        with pytest.raises(NotFoundError, match=split):
            list(read_copy(copy, split))


def test_tasks_of_ones_own_need_no_folder_for_splits(tmp_path: Path) -> None:
    def found(*rows: Json) -> list[GaiaQuestion | str]:
        write_jsonl(tmp_path / "metadata.jsonl", rows)
        return [item for _, item in read_copy(tmp_path, "train")]

    (task,) = found(ROWS[0])
    assert isinstance(task, GaiaQuestion) and task.task_id == "a"
    assert not is_official(tmp_path)
    for name in ("/etc/hostname", "../x"):
        assert found({**ROWS[0], "file_name": name}) == ["its file is outside of the copy"]
    for answer, said in (
        (True, "its answer is true or false: write the word"),
        (["red", "blue"], "its answer is a list: write one text with commas"),
        ({"value": 3}, "its answer is an object: name the field"),
    ):
        (refused,) = found(row_of("g", answer))
        assert str(refused).startswith(said)
    (listed,) = found(row_of("g", ["red"], Question=[{"role": "user", "content": "Which?"}]))
    assert isinstance(listed, GaiaQuestion)
    assert (listed.question, listed.answer) == ("Which?", "red")
    for names in (
        {"Prompt": "Who?", "Answer": "Vell"},
        {"task": "Who?", "golden_answers": ["Vell"]},
    ):
        (other,) = found(names)
        assert isinstance(other, GaiaQuestion)
        assert (other.question, other.answer, other.level) == ("Who?", "Vell", 1)
    unknown = {"ask": "How many?", "truth": 3, "rank": 1.0}
    (refused,) = found(unknown)
    assert "question (its fields: ask, truth, rank)" in str(refused)
    columns = {"question": "ask", "answer": "truth", "level": "rank"}
    env = Gaia(Gaia.Config(data_path=tmp_path / "metadata.jsonl", columns=columns))
    assert [task.hidden["answer"] for task in env.tasks("train")] == ["3"]
    (tmp_path / "metadata.jsonl").write_text('{"task_id": "a"\n')
    with pytest.raises(ConfigError, match="not JSON"):
        list(Gaia(Gaia.Config(data_path=tmp_path)).tasks("train"))
    with pytest.raises(NotFoundError, match=r"environments\.gaia\.download"):
        list(read_copy(tmp_path / "none", "train"))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """What the hub holds: a copy of ROWS in today's layout."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub (extra gaia) is not installed")
    copy = copy_in("parquet", tmp_path / "origin")
    paths = [path for path in copy.glob("2023/**/*") if path.is_file()]
    held = {path.relative_to(copy).as_posix(): path.read_bytes() for path in paths}
    return {**held, "README.md": b"Agree to our terms."}


def test_a_copy_is_fetched_once_checked_mended_and_continued(
    files: dict[str, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    folder, table = tmp_path / "copy", "2023/validation/metadata.parquet"
    with serving(DataSetHub(files)) as hub:
        hub.breaks = {"2023/validation/b.txt"}
        with pytest.raises(ConfigError, match="run it again to continue"):
            fetch(RAW, folder, endpoint=hub.url)
        hub.breaks = set()
        assert fetch(RAW, folder, endpoint=hub.url) == 3
        assert hub.given[table] == 1
        assert "2 tasks" in summary(folder)
    with serving(DataSetHub(files)) as hub:
        arguments = ["--use-raw", "--output-dir", str(tmp_path / "new"), "--endpoint", hub.url]
        assert main(arguments) == 0
        said = capsys.readouterr().out
        assert "3 files of gaia-benchmark/GAIA" in said
        assert "2 tasks with answers (1 of level 1, 1 of level 2), 1 with a file" in said
        assert not (tmp_path / "new" / "README.md").exists()
        assert main(arguments) == 0
        assert set(hub.given.values()) == {1}
        damaged = tmp_path / "new" / table
        damaged.write_bytes(damaged.read_bytes()[:-7] + b"changed")
        assert main(arguments) == 0
        assert damaged.read_bytes() == files[table]


def test_without_access_it_is_told_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub (extra gaia) is not installed")
    with serving(DataSetHub({}, refuses="GatedRepo")) as hub:
        assert main(["--output-dir", str(tmp_path), "--endpoint", hub.url]) == 1
    told = capsys.readouterr().err
    assert f"Agree to its terms at https://huggingface.co/datasets/{ANNOTATED.repo}" in told
    assert "Traceback" not in told


def test_an_agent_is_shown_the_question_and_the_file_and_nothing_else(tmp_path: Path) -> None:
    env = Gaia(Gaia.Config(data_path=copy_in("jsonl", tmp_path), split="validation"))
    tasks = {task.public["question"]: task for task in env.tasks("validation")}
    task = tasks["Question b?"]
    file = {"name": "attachment.txt", "data": base64.b64encode(b"red and blue").decode()}
    assert task.public == {"question": "Question b?", "files": [file]}
    assert task.hidden == {"answer": "red, blue", "level": 2, "task_id": "b", "solution": None}
    assert "count them" not in repr(tasks) and env.rows.dropped.total() == 4
    assert [len(task.id) for task in tasks.values()] == [21, 21]


async def test_the_file_is_in_the_agents_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[PublicTask, AgentOptions, set[str]]] = []

    async def solve(task: PublicTask, run: Any, rules: AgentOptions, tools: Any) -> Json:
        seen.append((task, rules, {tool.name for tool in tools}))
        return {"answer": Path("attachment.txt").read_text(), "state": "answered", "steps": []}

    monkeypatch.setattr("envserver_environments.gaia.env.solve", solve)
    monkeypatch.chdir(tmp_path)
    files = [{"name": "attachment.txt", "data": base64.b64encode(b"42").decode()}]
    given = PublicTask("gaia-1", {"question": "How much?", "files": files})
    settings: Any = {"max_steps": 5, "max_completion_tokens": 700, "agent_seconds": 9}
    for config in (
        Gaia.Config(agent="plain", **settings),
        Gaia.Config(web="replay", documents=False),
    ):
        run: Any = SimpleNamespace(call_tool=None)
        output: Any = await Gaia(config).rollout(given, run)
        assert output["answer"] == "42"
    (task, rules, tools), (_, _, others) = seen
    assert task.public == {"question": "How much?", "files": ["attachment.txt"]}
    assert (rules.agent, rules.max_steps, rules.token_budget) == ("plain", 5, 700)
    assert rules.seconds == 9
    assert tools == {"read_document", "find_in_document"}
    assert others == {"web_search", "visit_page", "find_in_page"}


async def test_the_server_looks_at_the_web_for_agents_only_if_asked_to(tmp_path: Path) -> None:
    async with Gaia().services() as services:
        assert not services
    (tmp_path / "web").mkdir()
    config = Gaia.Config(web="replay", web_folder=tmp_path / "web")
    async with Gaia(config).services() as services:
        caller = Caller("r", "g", PublicTask("t", {"question": "?"}), lambda word: None)
        answer = await services["web_search"]({"query": "skarvik harbour"}, caller)
        assert not answer["ok"] and answer["text"].startswith("Error: ")


def test_gaia_itself_is_for_evaluation_unless_training_is_asked_for(tmp_path: Path) -> None:
    copy = copy_in("jsonl", tmp_path)

    def tasks(split: Any, **settings: bool) -> int:
        return len(list(Gaia(Gaia.Config(data_path=copy, **settings)).tasks(split)))

    with pytest.raises(ConfigError, match="ask not to train"):
        tasks("train")
    with pytest.raises(ConfigError, match="cannot be scored"):
        tasks("test", train_on_gaia=True)
    assert tasks("train", train_on_gaia=True) == tasks("validation") == 2


def test_tasks_are_chosen_by_level_file_and_size(tmp_path: Path) -> None:
    def ids(**settings: Any) -> list[str]:
        return [task.id for task in Gaia(Gaia.Config(**settings)).tasks("train")]

    assert len(ids()) == 30 and ids() != ids(seed=1)
    assert len(ids(levels="1,3")) + len(ids(levels=[2])) == 30
    assert 0 < len(ids(max_file_mb=0.005)) < 30
    # Plans have model calls of their own.
    assert Gaia.Config(max_steps=7).max_turns == 7
    assert Gaia.Config(max_steps=7, planning_interval=3).max_turns == 10
    assert Gaia.Config(max_steps=7, max_turns=20).max_turns == 20
