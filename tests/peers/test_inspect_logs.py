"""`export --to inspect` and `convert`, judged by the real inspect-ai (`make inspect-peer`)."""

import json
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from envserver_records.errors import Failure
from envserver_records.records import Group, Score, Trajectory
from envserver_records.timings import Timing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.commands import environment_variables, envserver
from support.extent import examples
from support.foreign_trainers import ROOT
from support.trajectories import trajectories, trajectory
from support.waiting import PATIENCE

from envserver.export.jsonl import group_line

CASES = cases_of(__file__)

# Commands in the Python where inspect-ai is, and what Inspect itself makes of a log


_COMMAND = """
import json, sys
sys.path[:0], ours = json.loads(sys.argv.pop(1)), json.loads(sys.argv.pop(1))
sys.path += ours  # after Inspect's own packages
from envserver.cli import main
sys.exit(main())
"""
_READ = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log
for info in list_eval_logs(sys.argv[1]):
    log = read_eval_log(info, resolve_attachments=True)
    sys.stdout.write(log.model_dump_json() + chr(10))
"""
"""Reads the logs of a folder; one line of JSON each."""
_WRITE = """
import sys
from inspect_ai.log import EvalLog, write_eval_log
for path in sys.argv[1:]:
    write_eval_log(EvalLog.model_validate_json(sys.stdin.readline()), path)
"""
MESSAGES = CASES["messages"]
"""Turns each message into Inspect's JSON and back."""


def paths() -> tuple[str, str]:
    """Returns the folders of our code, and of what it needs, as JSON."""
    ours = [str(ROOT / name) for name in (".", "clients", "tools", "environments")]
    return json.dumps(ours), json.dumps([sysconfig.get_path("purelib")])


def envserver_beside_inspect(
    python: Path, *words: object, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Runs a command of envserver in Inspect's Python."""
    return _run(python, _COMMAND, *paths(), *words, folder=folder)


def read_by_inspect(python: Path, logs: Path) -> list[dict[str, Any]]:
    """Returns the logs of a folder, as Inspect's `read_eval_log` reads them."""
    done = _run(python, _READ, logs, folder=logs)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_by_inspect(python: Path, log: dict[str, Any], *places: Path) -> None:
    """Lets Inspect's `write_eval_log` write a log to each place."""
    lines = (json.dumps(log) + "\n") * len(places)
    done = _run(python, _WRITE, *places, folder=places[0].parent, input=lines)
    assert done.returncode == 0, done.stderr


def _run(
    python: Path, program: str, *words: object, folder: Path, input: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", program, *map(str, words)],
        cwd=folder,
        env=environment_variables(),
        capture_output=True,
        text=True,
        input=input,
        timeout=PATIENCE,
        check=False,
    )


# What is exported


HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[31m"
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query":"tea"}'},
}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": f"Where is the tea? {HOSTILE}"},
    {"role": "assistant", "content": "", "reasoning_content": "I search.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "On the shelf."},
    {"role": "assistant", "content": "It is on the shelf."},
]
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
CALLS = st.lists(
    st.sampled_from([None, {"function": 3}, {"function": {"name": None, "arguments": {"x": 1}}}])
    | st.builds(
        lambda text: {**CALL, "function": {"name": "f", "arguments": text}},
        st.sampled_from(['{"x": 1}', '{"x":1}', "[1]", "{", ""]),
    ),
    max_size=2,
)
PARTS = st.lists(
    st.one_of(
        st.builds(lambda text: {"type": "text", "text": text}, TEXTS),
        st.just({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}),
        st.just({"type": "video", "at": 1.5}),
    ),
    max_size=3,
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "critic"]),
        "content": st.one_of(TEXTS, st.none(), PARTS, st.just({"odd": [1]})),
    },
    optional={
        "reasoning_content": TEXTS,
        "tool_calls": CALLS,
        "tool_call_id": TEXTS,
        "name": TEXTS,
        "weight": st.integers(0, 1),
    },
)


def stored(folder: Path, *groups: Group) -> Path:
    path = folder / "groups.jsonl"
    lines = [group_line(group, include_messages=True, score_range="env") for group in groups]
    path.write_bytes(b"".join(lines))
    return path


def group(number: int, *members: Trajectory, **facts: Any) -> Group:
    return Group(
        **(
            {
                "group_id": f"g-{number}",
                "index": number,
                "env": "math",
                "task_id": f"t-{number}",
                "split": "train",
                "trajectories": list(members),
                "model": "tiny",
                "created_at": 1_700_000_000.0 + number,
                "asked": len(members),
            }
            | facts
        )
    )


def there_and_back(python: Path, path: Path, *words: str) -> tuple[Any, Any]:
    """Returns the rollouts of a file, and those of its Inspect log: unified, by task id."""
    folder = path.parent
    done = envserver(
        *("export", path, "--to", "unified", "--out", "direct.jsonl", "--overwrite", *words),
        folder=folder,
    )
    assert done.returncode == 0, done.stderr
    for argv in (
        ("export", path, "--to", "inspect", "--out", "logs", "--overwrite", *words),
        ("convert", "logs", "--out", "back.jsonl", *words),
    ):
        done = envserver_beside_inspect(python, *argv, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return by_id(folder / "direct.jsonl"), by_id(folder / "back.jsonl")


def by_id(path: Path) -> dict[str, Any]:
    return {one["task_id"]: one for one in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
def test_a_log_says_in_inspect_what_the_rollout_was(inspect_python: Path, tmp_path: Path) -> None:
    lost = Failure(kind="engine_error", blame="engine", outcome="retry", message="It was away.")
    timings = [
        Timing(kind="engine", started=n, seconds=0.5, call=n, row=0, start=4, end=6)
        for n in range(2)
    ]
    right = trajectory(
        "g-1-r0",
        messages=TALK,
        tools=[TOOL],
        turns=2,
        score=Score(reward=1.0),
        started_at=1_600_000_000.0,
        timings=timings,
        agent_calls={"": [0, 1]},
    )
    cut = trajectory("g-1-r1", limit="turns", truncated=True, score=Score(reward=0.5))
    again = trajectory("g-2-r0", score=Score(reward=0.0, components={"form": 0.25}))
    path = stored(
        tmp_path,
        group(1, right, cut, asked=3, lost={"engine_error": 1}, failures=[lost]),
        group(2, again, task_id="t-1"),
    )
    direct, back = there_and_back(inspect_python, path)
    assert direct == back
    assert len(back) == 3

    (log,) = read_by_inspect(inspect_python, tmp_path / "logs")
    assert (log["status"], log["eval"]["task"], log["eval"]["model"]) == ("success", "math", "tiny")
    means = {one["name"]: one["metrics"]["mean"]["value"] for one in log["results"]["scores"]}
    assert means == {"reward": 0.5, "form": 0.25}
    samples = sorted(log["samples"], key=lambda one: one["epoch"])
    assert [(one["id"], one["epoch"]) for one in samples] == [
        ("t-1", place) for place in range(1, 5)
    ]
    first, second, missing_one, last = samples
    assert first["input"] == TALK[1]["content"]
    assert [one["role"] for one in first["messages"]] == [one["role"] for one in TALK]
    assert [one["event"] for one in first["events"]] == ["model", "tool", "model", "score"]
    asked, tool = first["events"][:2]
    assert asked["output"]["choices"][0]["message"]["tool_calls"][0]["arguments"] == {
        "query": "tea"
    }
    assert (tool["function"], tool["result"]) == ("search", "On the shelf.")
    began = [(one["working_start"], one.get("working_time")) for one in first["events"]]
    assert began == [(0.0, 0.5), (0.5, 0.5), (1.0, 0.5), (2.0, None)]
    assert asked["output"]["usage"]["output_tokens"] == 2
    assert second["events"][0].get("completed") is None  # its times are not stored
    assert first["scores"]["reward"]["value"] == 1.0
    assert second["limit"]["type"] == "turn"
    assert missing_one["error"]["message"] == "engine_error: It was away."
    assert last["metadata"]["group_id"] == "g-2"


@settings(max_examples=2, suppress_health_check=list(HealthCheck))
@given(members=st.lists(trajectories(), min_size=4, max_size=10))
def test_rollouts_of_all_shapes_come_back(
    inspect_python: Path, tmp_path_factory: pytest.TempPathFactory, members: list[Trajectory]
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    named = [
        group(place, trajectory_named(one, f"g-{place}-r0")) for place, one in enumerate(members)
    ]
    direct, back = there_and_back(inspect_python, stored(folder, *named), "--tokens")
    assert direct == back and len(back) == len(members)


def trajectory_named(one: Trajectory, rollout_id: str) -> Trajectory:
    one.rollout_id = rollout_id
    return one


@pytest.fixture(scope="module")
def converter(inspect_python: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that turns each line, a message, into Inspect's form and back."""
    with subprocess.Popen(
        [inspect_python, "-c", MESSAGES, *paths()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck))
@given(message=MESSAGE)
def test_each_message_comes_back(converter: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert converter.stdin is not None and converter.stdout is not None
    converter.stdin.write(json.dumps(message) + "\n")
    converter.stdin.flush()
    assert json.loads(converter.stdout.readline()) == message


def test_logs_of_others_and_broken_ones(inspect_python: Path, tmp_path: Path) -> None:
    sample = CASES["sample"]
    broken = {**sample, "id": "capital-2", "store": {"envserver": {"tokens": []}}}
    spec = {
        "created": "2026-01-01T00:00:00+00:00",
        "task": "capitals",
        "dataset": {},
        "model": "m",
        "config": {},
    }
    log = {"status": "success", "eval": spec, "samples": [sample, broken]}
    folder = tmp_path / "logs"
    folder.mkdir()
    write_by_inspect(inspect_python, log, folder / "a.eval", folder / "b.json")
    (folder / "c.eval").write_bytes((folder / "a.eval").read_bytes()[:900])
    (folder / "d.eval").write_text("no log")

    def convert(*names: str) -> subprocess.CompletedProcess[str]:
        words = ("convert", *(folder / name for name in names), "--domain", "mhqa")
        return envserver_beside_inspect(
            inspect_python, *words, "--out", f"{names[0]}.jsonl", folder=tmp_path
        )

    for name in ("a.eval", "b.json"):
        done = convert(name)
        assert done.returncode == 1
        assert f"{folder / name}, sample capital-2, epoch 1: its store is not" in done.stdout
        ((task_id, document),) = by_id(tmp_path / f"{name}.jsonl").items()
        assert task_id == "mhqa-capital-1"
        assert document["question"] == sample["input"]
        assert (document["final_answer"], document["metadata"]["reward"]) == ("Paris.", 1.0)
        assert document["metadata"]["sequences"][0]["messages"] == sample["messages"]
    done = convert("c.eval", "d.eval")
    assert done.returncode == 1
    for line, name in zip(done.stdout.splitlines(), ("c.eval", "d.eval"), strict=True):
        assert line.startswith(f"{folder / name}: not a log of Inspect: ")
