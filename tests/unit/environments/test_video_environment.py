"""The environment `video`: its questions, what is known of videos, and where both come from."""

from __future__ import annotations

import json
import re
import sys
import types
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.video.context import MODALITIES, VideoContext, video_context
from envserver_environments.video.data_sets import option_place, read_item
from envserver_environments.video.env import Video
from envserver_environments.video.loading import SAMPLE, SAMPLE_VIDEOS, context_file
from envserver_environments.video.tools import video_tools
from envserver_tools.calling import run_tool_call

from envserver import ConfigError, InputError, NotFoundError, Task

ROWS = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
CHOICES = [row for row in ROWS if "options" in row]
VIDEOS = {path.stem: context_file(path) for path in SAMPLE_VIDEOS.iterdir()}


def test_sample_has_the_documented_questions() -> None:
    assert len(ROWS) == len({row["id"] for row in ROWS}) == 30
    assert set(Counter(row["video"] for row in ROWS).values()) == {3}
    assert {row["video"] for row in ROWS} == set(VIDEOS) and len(VIDEOS) == 10
    assert Counter(row["type"] for row in ROWS) == {
        "CW": 6, "CH": 4, "TN": 3, "TP": 3, "TC": 4, "DC": 4, "DL": 3, "DO": 3,
    }  # fmt: skip
    assert Counter(len(row.get("options", [])) for row in ROWS) == {5: 24, 3: 4, 0: 2}


def test_sample_videos_have_what_the_questions_need() -> None:
    assert sum(bool(video.transcript) for video in VIDEOS.values()) == 5
    assert sum(bool(video.scene_graph) for video in VIDEOS.values()) == 3
    repeated = [
        any(first.text == second.text for first, second in pairwise(video.captions))
        for video in VIDEOS.values()
    ]
    assert sum(repeated) >= 9
    for row in ROWS:
        video = VIDEOS[row["video"]]
        assert 60 <= video.seconds <= 180
        for start, end in row["evidence"]:
            assert start < end <= video.seconds
            assert any(video.lines(modality, start, end) for modality in MODALITIES), row["id"]


def test_sample_cannot_be_guessed_without_the_videos() -> None:
    five = Counter(row["answer"] for row in CHOICES if len(row["options"]) == 5)
    assert set(five) == set(range(5)) and max(five.values()) <= 5
    for extreme in (max, min):
        hits = sum(
            row["options"].index(extreme(row["options"], key=len)) == row["answer"]
            for row in CHOICES
        )
        assert hits <= len(CHOICES) // 4
    hits = sum(_nearest(row["question"], row["options"]) == row["answer"] for row in CHOICES)
    assert hits <= len(CHOICES) // 4
    assert len({row["options"][row["answer"]] for row in CHOICES if row["type"] == "DC"}) == 4


def _nearest(question: str, options: list[str]) -> int:
    """The option that shares most words with the question."""
    asked = set(re.findall("[a-z]+", question.lower()))
    shared = [len(asked & set(re.findall("[a-z]+", option))) for option in options]
    return shared.index(max(shared))


def test_options_are_shuffled_the_same_for_a_group_by_the_seed() -> None:
    one, again, other = (_shown(Video.Config(seed=seed)) for seed in (1, 1, 2))
    assert one == again
    moved = [one[task_id] != options for task_id, options in other.items() if options]
    assert sum(moved) > 20
    plain = _shown(Video.Config(shuffle_options=False))
    assert plain == {row["id"]: row.get("options", []) for row in ROWS}
    for task in Video(Video.Config(seed=2)).tasks("train"):
        row = next(row for row in ROWS if row["id"] == task.id)
        if "options" in row:
            right = row["options"][row["answer"]]
            assert task.public["options"][task.hidden["answer"]] == right


def _shown(config: Video.Config) -> dict[str, list[str]]:
    return {task.id: task.public["options"] for task in Video(config).tasks("train")}


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        ("a man\n\n0:07: sits\n1:00:02: up", ["0:00:00: a man", "0:00:07: sits", "1:00:02: up"]),
        (["a", "a", "b"], ["0:00:00: a", "0:00:02: b"]),
        ({"fps": 0.5, "captions": ["a", "b"]}, ["0:00:00: a", "0:00:02: b"]),
        ([{"t0": 9, "t1": 10, "text": " b\nc "}, {"t0": 3, "text": "a"}],
         ["0:00:03: a", "0:00:09: b c"]),
        ({"transcript": [{"t0": 61.9, "t1": 63, "speaker": "Al", "text": "Hi"}]},
         ["0:01:01: Al: Hi"]),
        ({"scene_graph": [{"t": 4, "triples": [["cup", "on", "table"], ["cup", "is", "red"]]}]},
         ["0:00:04: (cup, on, table) (cup, is, red)"]),
        ({"title": "x"}, ["0:00:00: {", '0:00:01: "title": "x"', "0:00:02: }"]),
    ],
)  # fmt: skip
def test_contexts_are_read_in_every_shape(value: Any, lines: list[str]) -> None:
    context = video_context(value)
    (modality,) = context.modalities
    assert [str(line) for line in context.lines(modality)] == lines
    assert VideoContext.of_json(json.loads(json.dumps(context.as_json()))) == context


@pytest.mark.parametrize(
    "value",
    ["", [], {}, None, [7], [{"t0": 1}], {"scene_graph": [{"t": 1}]}, [{"t0": -1, "text": "a"}]],
)
def test_contexts_that_hold_nothing_are_refused(value: Any) -> None:
    with pytest.raises(InputError):
        if value == {}:
            value = {"captions": []}
        video_context(value)


def test_a_scene_graph_holds_until_the_next_one() -> None:
    graphs = [{"t": t, "triples": [["cup", "at", str(t)]]} for t in (10, 20)]
    context = video_context({"captions": [{"t0": 0, "t1": 40, "text": "a"}], "scene_graph": graphs})
    assert len(context.lines("scene_graph", 0, 9)) == 0
    assert len(context.lines("scene_graph", 15, 15)) == 1
    assert len(context.lines("scene_graph", 15, 25)) == 2
    assert len(context.lines("scene_graph", 39, 40)) == 1


def test_long_captions_are_read_in_pages() -> None:
    context = video_context([f"{place} {'and so on ' * 9}" for place in range(180)])
    read = video_tools(context)["get_captions"]
    seen: list[str] = []
    page = run_tool_call({"get_captions": read}, _call("{}"))
    while found := re.search(r"\(\d+ more; go on from t0 = (\d+)\)$", page.text):
        seen += page.text.splitlines()[:-1]
        page = run_tool_call({"get_captions": read}, _call(json.dumps({"t0": int(found[1])})))
    seen += page.text.splitlines()
    assert [line.split()[1] for line in seen] == [str(place) for place in range(180)]


def _call(arguments: str) -> dict[str, Any]:
    return {"function": {"name": "get_captions", "arguments": arguments}}


NEXTQA = {
    "video": 4010069381, "qid": 6, "frame_count": 369, "question": "why did the man sit",
    "answer": 2, "type": "CW", **{f"a{place}": f"reason {place}" for place in range(5)},
}  # fmt: skip
OPTIONS = [f"reason {place}" for place in range(5)]
EGOSCHEMA = {
    "question_idx": "0", "video_idx": "uid-1", "question": "What is it about?",
    "option": [f"{letter}. reason {place}" for place, letter in enumerate("ABCDE")], "answer": "2",
}  # fmt: skip
EGOSCHEMA_FILE = {
    "q_uid": "uid-1", "question": "What is it about?",
    **{f"option {place}": f"reason {place}" for place in range(5)},
}  # fmt: skip
OWN = {"video": "uid-1", "question": "Why?", "options": OPTIONS, "answer": "C"}


@pytest.mark.parametrize("row", [NEXTQA, EGOSCHEMA, {**EGOSCHEMA_FILE, "answer": 2}, OWN])
def test_rows_are_read_in_each_shape(row: dict[str, Any]) -> None:
    item = read_item(row)
    assert (item.options, item.answer) == (OPTIONS, 2)
    assert item.video in ("uid-1", "4010069381")
    task = Video().task_from_row(row)
    assert (task.public["options"], task.hidden["answer"]) == (OPTIONS, 2)


@pytest.mark.parametrize(
    ("answer", "place"),
    [(2, 2), (2.0, 2), ("2", 2), ("c", 2), ("reason 2", 2), (5, None), (-1, None), ("F", None),
     (True, None), (None, None), ("reason", None), ([2], None)],
)  # fmt: skip
def test_a_data_set_may_name_its_answer_in_many_ways(answer: Any, place: int | None) -> None:
    assert option_place(answer, OPTIONS) == place


@pytest.mark.parametrize(
    "row",
    [{}, {"text": "x"}, {**OWN, "answer": 0.5},
     {**OWN, "answer": 9}, {**OWN, "options": ["a"]}, {**OWN, "options": "ab"},
     {**OWN, "question": ""}, {"question": "Why?"}, {**OWN, "evidence": [3]}, EGOSCHEMA_FILE,
     {**OWN, "options": ["a", " "]}],
)  # fmt: skip
def test_rows_without_a_shape_or_an_answer_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Video().task_from_row(row)


def _tasks(**settings: Any) -> list[Task]:
    return list(Video(Video.Config(**settings)).tasks("validation"))


def test_local_data_sets_find_their_captions(tmp_path: Path) -> None:
    header = list(NEXTQA)
    table = [header, [NEXTQA[name] for name in header], [1, 2, *[""] * (len(header) - 2)]]
    (tmp_path / "val.csv").write_text("\n".join(",".join(map(str, row)) for row in table))
    captions = tmp_path / "captions.json"
    captions.write_text(json.dumps({"4010069381": ["a man stands", "he sits"]}))
    (task,) = _tasks(data_set="nextqa", data_path=tmp_path, captions_path=captions, caption_fps=0.5)
    assert task.public["question"] == "why did the man sit?" and task.hidden["type"] == "CW"
    assert task.public["context"]["captions"][1] == {"text": "he sits", "t0": 2.0, "t1": 4.0}
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps([EGOSCHEMA_FILE, {**EGOSCHEMA_FILE, "q_uid": "../x"}]))
    (tmp_path / "answers.json").write_text('{"uid-1": 2, "../x": 1}')
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "uid-1.txt").write_text("#C C opens a box")
    (tmp_path / "x.txt").write_text("outside")
    (ego,) = _tasks(
        data_set="egoschema", data_path=questions, captions_path=tmp_path / "videos",
        answers_path=tmp_path / "answers.json",
    )  # fmt: skip
    assert ego.public["options"][ego.hidden["answer"]] == "reason 2"
    assert ego.public["context"] == {
        "captions": [{"text": "#C C opens a box", "t0": 0.0, "t1": 1.0}]
    }
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({**OWN, "context": "0:01: a cat sleeps"}) + "\n")
    (mine,) = _tasks(data_set="captions", data_path=own)
    assert mine.public["context"]["captions"][0]["t0"] == 1.0


def test_the_hub_is_asked_for_the_right_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, config: str, *, split: str, streaming: bool) -> Any:
        asked.append((path, config, split))
        return [NEXTQA, {**NEXTQA, "video": 1}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (tmp_path / "c.json").write_text('{"4010069381": ["a"]}')
    env = Video(Video.Config(data_set="nextqa", captions_path=tmp_path / "c.json"))
    assert len(list(env.tasks("test"))) == 1 and sum(env.dropped.values()) == 1
    blind = Video(Video.Config(data_set="nextqa", blind=True))
    assert all(task.public["context"] is None for task in blind.tasks("test"))
    assert set(asked) == {("lmms-lab/NExTQA", "MC", "test")}


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"data_set": "nextqa"}, ConfigError),
        ({"data_set": "captions"}, ConfigError),
        ({"data_set": "captions", "data_path": "no.jsonl"}, NotFoundError),
        ({"data_set": "nextqa", "captions_path": "no"}, NotFoundError),
    ],
)
def test_data_that_does_not_fit_is_a_clear_error(
    settings: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        next(Video(Video.Config(**settings)).tasks("train"))


def test_public_parts_hold_no_answer_and_blind_ones_no_video() -> None:
    for task in islice(Video().tasks("train"), 30):
        assert set(task.public) == {"question", "options", "video", "context"}
    env = Video(Video.Config(blind=True))
    assert all(task.public["context"] is None for task in env.tasks("train"))
    assert env.baselines() == {"blind": {"blind": True}}


def test_a_single_question_is_asked_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kitchen.txt"
    file.write_text("0:05: a woman cuts bread")
    asked = Video.Question(question="What is cut?", video_ctx=file, answer="bread")
    task = Video().task_from_question(asked)
    assert task.hidden["golds"] == ["bread"] and task.public["video"] == "kitchen"
    asked = Video.Question(question="What?", video_ctx=file, options=["ham", "bread"], answer="B")
    assert Video().task_from_question(asked).hidden["answer"] == 1
    Video().task_from_question(Video.Question(question="What?", video_ctx=file))
    with pytest.raises(NotFoundError):
        Video().task_from_question(Video.Question(question="?", video_ctx=tmp_path / "no.txt"))
