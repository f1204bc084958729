"""GAIA's tasks: the own ones, local copies in both layouts, and how a copy is fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from envserver_environments.gaia.agents import AgentOptions
from envserver_environments.gaia.download import ANNOTATED, RAW, fetch, main, summary
from envserver_environments.gaia.env import Gaia
from envserver_environments.gaia.loading import (
    GaiaQuestion,
    Refusal,
    copy_items,
    is_official,
    own_items,
)
from envserver_environments.gaia.scoring import is_usable_truth, question_scorer
from support.waiting import PATIENCE

from envserver import Caller, ConfigError, NotFoundError, PublicTask

SOLVED = "\nimport sys\nsys.stdout.write(str(answer))\n"


def item(task: GaiaQuestion | Refusal) -> GaiaQuestion:
    assert isinstance(task, GaiaQuestion), task
    return task


def test_thirty_own_tasks_have_files_of_ten_kinds() -> None:
    items = [item(task) for task in own_items()]
    kinds = Counter(task.attachment.suffix for task in items if task.attachment)
    assert kinds == dict.fromkeys(
        (".txt", ".csv", ".xlsx", ".pdf", ".docx", ".pptx", ".png", ".py", ".jsonl", ".zip"), 3
    )
    assert len({task.task_id for task in items}) == len({task.question for task in items}) == 30
    assert set(Counter(task.level for task in items)) == {1, 2, 3}
    assert all(is_usable_truth(task.answer) for task in items)


@pytest.mark.parametrize(
    "task", [item(task) for task in own_items()], ids=lambda task: task.task_id
)
def test_every_own_answer_follows_from_its_file_alone(task: GaiaQuestion, tmp_path: Path) -> None:
    assert task.attachment is not None and task.solution is not None
    assert task.answer not in task.question and task.answer not in task.solution
    (tmp_path / f"attachment{task.attachment.suffix}").write_bytes(task.attachment.read_bytes())
    ran = subprocess.run(
        [sys.executable, "-I", "-X", "utf8", "-c", task.solution + SOLVED],
        cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=PATIENCE,
    )  # fmt: skip
    assert question_scorer(ran.stdout, task.answer), (ran.stdout, ran.stderr[-500:])


ROWS: list[dict[str, Any]] = [
    {"task_id": "a", "Question": "How many?", "Level": "1", "Final answer": "3",
     "file_name": "", "Annotator Metadata": {"Steps": "count them"}},
    {"task_id": "b", "Question": "Which?", "Level": "2", "Final answer": "red, blue",
     "file_name": "b.txt", "Annotator Metadata": {"Steps": "read it"}},
    {"task_id": "c", "Question": "Who?", "Level": "3", "Final answer": "?", "file_name": ""},
    {"task_id": "d", "Question": "Where?", "Level": "2", "Final answer": "here",
     "file_name": "gone.txt"},
    {"task_id": "e", "Question": "What?", "Level": "4", "Final answer": "it", "file_name": ""},
    {"task_id": "f", "Question": "Why?", "Level": "1", "Final answer": "so",
     "file_name": "../../../secret.txt"},
]  # fmt: skip


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_parquet(rows: list[dict[str, Any]], file: Path) -> None:
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
        (folder / "metadata.jsonl").write_bytes(as_jsonl(ROWS))
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
    found = list(copy_items(copy, "validation"))
    items = {task.task_id: task for task in found if isinstance(task, GaiaQuestion)}
    assert set(items) == {"a", "b"}
    assert (items["a"].level, items["a"].attachment, items["a"].solution) == (1, None, None)
    assert items["b"].attachment is not None
    assert items["b"].attachment.read_text() == "red and blue"
    reasons = {task.task_id: task.reason for task in found if isinstance(task, Refusal)}
    assert reasons["c"] == "no answer to compare with" and reasons["d"] == "its file is missing"
    assert "f" in reasons
    assert is_official(copy) and is_official(copy / "2023")
    assert is_official(copy / "2023" / "validation")
    for split in ("train", "test"):
        with pytest.raises(NotFoundError, match=split):
            list(copy_items(copy, split))


def refused(row: GaiaQuestion | Refusal) -> str:
    assert isinstance(row, Refusal)
    return row.reason


def test_tasks_of_ones_own_need_no_folder_for_splits(tmp_path: Path) -> None:
    (tmp_path / "metadata.jsonl").write_bytes(as_jsonl(ROWS[:1]))
    assert not is_official(tmp_path)
    assert [item(task).task_id for task in copy_items(tmp_path, "train")] == ["a"]
    outside = [{**ROWS[0], "file_name": name} for name in ("/etc/hostname", "../x")]
    (tmp_path / "metadata.jsonl").write_bytes(as_jsonl(outside))
    reasons = {refused(row) for row in copy_items(tmp_path, "train")}
    assert reasons == {"its file is outside of the copy"}
    (tmp_path / "metadata.jsonl").write_text('{"task_id": "a"\n')
    with pytest.raises(ConfigError, match="line 1"):
        list(copy_items(tmp_path, "train"))
    with pytest.raises(NotFoundError, match=r"environments\.gaia\.download"):
        list(copy_items(tmp_path / "none", "train"))


COMMIT = "5" * 40


class Hub:
    """A hub of one data set that counts what it gives.

    Args:
        refuses: the error code with which every request is refused.
    """

    def __init__(self, files: dict[str, bytes], refuses: str | None = None) -> None:
        self.files = files
        self.large = {name for name in files if name.endswith(".parquet")}
        self.refuses = refuses
        self.breaks: set[str] = set()
        self.given: Counter[str] = Counter()
        self.url = ""

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        path, _, _ = path.partition("?")
        if self.refuses:
            status = 404 if self.refuses == "RevisionNotFound" else 403
            return status, {"X-Error-Code": self.refuses}, b"{}"
        _, found, name = path.partition("/resolve/")
        if found:
            name = name.partition("/")[2]
            headers = {"ETag": f'"{self.digest(name)}"', "X-Repo-Commit": COMMIT}
            if method == "GET":
                self.given[name] += 1
                if name in self.breaks:
                    return 500, {}, b""
            return 200, headers, self.files[name]
        if "/tree/" in path:
            rows = [{"type": "file", "path": name, **self.facts(name)} for name in self.files]
            return 200, {}, json.dumps(rows).encode()
        siblings = [{"rfilename": name, **self.facts(name)} for name in self.files]
        body = {"id": "x/y", "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}
        return 200, {}, json.dumps(body).encode()

    def digest(self, name: str) -> str:
        data = self.files[name]
        if name in self.large:
            return hashlib.sha256(data).hexdigest()
        header = f"blob {len(data)}\0".encode()
        return hashlib.sha1(header + data, usedforsecurity=False).hexdigest()

    def facts(self, name: str) -> dict[str, Any]:
        size = len(self.files[name])
        facts: dict[str, Any] = {"size": size, "blobId": "0" * 40, "oid": "0" * 40}
        if name in self.large:
            digest = self.digest(name)
            facts["lfs"] = {"sha256": digest, "oid": digest, "size": size, "pointerSize": 130}
        return facts


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            status, headers, body = hub.answer(self.command, self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = reply

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """What the hub holds: a copy of ROWS in today's layout."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub (extra gaia) is not installed")
    copy = copy_in("parquet", tmp_path / "origin")
    held = {
        path.relative_to(copy).as_posix(): path.read_bytes()
        for path in copy.glob("2023/**/*") if path.is_file()
    }  # fmt: skip
    return {**held, "README.md": b"Agree to our terms."}


def test_a_copy_is_fetched_once_checked_and_mended(
    files: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    with serving(Hub(files)) as hub:
        arguments = ["--use-raw", "--output-dir", str(folder), "--endpoint", hub.url]
        assert main(arguments) == 0
        said = capsys.readouterr().out
        assert "3 files of gaia-benchmark/GAIA" in said
        assert "2 tasks with answers (1 of level 1, 1 of level 2), 1 with a file" in said
        assert not (folder / "README.md").exists()
        assert main(arguments) == 0
        assert set(hub.given.values()) == {1}
        damaged = folder / "2023" / "validation" / "metadata.parquet"
        damaged.write_bytes(damaged.read_bytes()[:-7] + b"changed")
        assert main(arguments) == 0
        assert damaged.read_bytes() == files["2023/validation/metadata.parquet"]


def test_a_fetch_that_broke_goes_on_where_it_was(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with serving(Hub(files)) as hub:
        hub.breaks = {"2023/validation/b.txt"}
        with pytest.raises(ConfigError, match="run it again to continue"):
            fetch(RAW, tmp_path / "copy", endpoint=hub.url)
        hub.breaks = set()
        assert fetch(RAW, tmp_path / "copy", endpoint=hub.url) == 3
        assert hub.given["2023/validation/metadata.parquet"] == 1
    assert "2 tasks" in summary(tmp_path / "copy")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("GatedRepo", "Agree to its terms at https://huggingface.co/datasets/smolagents/GAIA"),
        ("RepoNotFound", "is not there, or not for you"),
        ("RevisionNotFound", "has no revision 'main'"),
    ],
)
def test_without_access_it_is_told_what_to_do(
    code: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub (extra gaia) is not installed")
    with serving(Hub({}, refuses=code)) as hub:
        assert main(["--output-dir", str(tmp_path), "--endpoint", hub.url]) == 1
    told = capsys.readouterr().err
    assert words in told and ANNOTATED.repo in told and "Traceback" not in told


def test_an_agent_is_shown_the_question_and_the_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = Gaia(Gaia.Config(data_path=copy_in("jsonl", tmp_path), split="validation"))
    tasks = {task.public["question"]: task for task in env.tasks("validation")}
    task = tasks["Which?"]
    assert task.public == {
        "question": "Which?",
        "files": [{"name": "attachment.txt", "data": base64.b64encode(b"red and blue").decode()}],
    }
    assert task.hidden == {
        "answer": "red, blue", "level": 2, "task_id": "b", "solution": None,
    }  # fmt: skip
    assert "count them" not in repr(tasks) and env.dropped.total() == 4
    assert [len(task.id) for task in tasks.values()] == [21, 21]


async def test_the_file_is_in_the_agents_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[PublicTask, AgentOptions]] = []
    offered: list[set[str]] = []

    async def solve(task: PublicTask, run: Any, rules: AgentOptions, tools: Any) -> dict[str, Any]:
        shown.append((task, rules))
        offered.append({tool.name for tool in tools})
        return {"answer": Path("attachment.txt").read_text(), "state": "answered", "steps": []}

    monkeypatch.setattr("envserver_environments.gaia.env.solve", solve)
    monkeypatch.chdir(tmp_path)
    settings: Any = {"max_steps": 5, "max_completion_tokens": 700, "agent_seconds": 9}
    env = Gaia(Gaia.Config(agent="plain", **settings))
    data = base64.b64encode(b"42").decode()
    files = [{"name": "attachment.txt", "data": data}]
    task = PublicTask("gaia-1", {"question": "How much?", "files": files})
    output: Any = await env.rollout(task, None)  # type: ignore[arg-type]
    assert output["answer"] == "42"
    ((task, rules),) = shown
    assert task.public == {"question": "How much?", "files": ["attachment.txt"]}
    assert (rules.agent, rules.max_steps, rules.token_budget) == ("plain", 5, 700)
    assert rules.seconds == 9
    env = Gaia(Gaia.Config(web="replay", documents=False))
    await env.rollout(
        PublicTask("gaia-1", {"question": "?", "files": files}), SimpleNamespace(call_tool=None)
    )  # type: ignore[arg-type]
    assert offered == [
        {"read_document", "find_in_document"}, {"web_search", "visit_page", "find_in_page"}
    ]  # fmt: skip


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
    with pytest.raises(ConfigError, match="ask not to train"):
        list(Gaia(Gaia.Config(data_path=copy)).tasks("train"))
    with pytest.raises(ConfigError, match="cannot be scored"):
        list(Gaia(Gaia.Config(data_path=copy, train_on_gaia=True)).tasks("test"))
    assert len(list(Gaia(Gaia.Config(data_path=copy, train_on_gaia=True)).tasks("train"))) == 2
    assert len(list(Gaia(Gaia.Config(data_path=copy)).tasks("validation"))) == 2


def test_tasks_are_chosen_by_level_file_and_size(tmp_path: Path) -> None:
    def ids(**settings: Any) -> list[str]:
        return [task.id for task in Gaia(Gaia.Config(**settings)).tasks("train")]

    assert len(ids()) == 30 and ids() == ids() != ids(seed=1)
    assert len(ids(levels="1,3")) + len(ids(levels=[2])) == 30
    assert 0 < len(ids(max_file_mb=0.005)) < 30
    with pytest.raises(ConfigError, match="no usable task"):
        ids(text_only=True)
    with pytest.raises(ValueError, match="1, 2 and 3"):
        Gaia.Config(levels=[4])


def test_plans_have_model_calls_of_their_own() -> None:
    assert Gaia.Config(max_steps=7).max_turns == 7
    assert Gaia.Config(max_steps=7, planning_interval=3).max_turns == 10
    assert Gaia.Config(max_steps=7, max_turns=20).max_turns == 20
