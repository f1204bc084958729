"""The environment `video`: its questions, what is known of videos, where both come from, what
counts as an answer, and how accuracy is reported."""

from __future__ import annotations

import json
import re
import sys
import types
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.video.aggregation import accuracy_by_type, nextqa_accuracy
from envserver_environments.video.context import MODALITIES, VideoContext, video_context
from envserver_environments.video.data_sets import option_place, read_item
from envserver_environments.video.env import Video
from envserver_environments.video.loading import SAMPLE, SAMPLE_VIDEOS, context_file
from envserver_environments.video.tools import video_tools
from envserver_tools.calling import run_tool_call
from hypothesis import given
from hypothesis import strategies as st
from support.case_files import cases
from support.commands import read_jsonl
from support.scripted_run import call

from envserver import InputError, NotFoundError, Result, Task

CASES = cases(__file__, "video_cases.json")
ROWS = read_jsonl(SAMPLE)
CHOICES = [row for row in ROWS if "options" in row]
VIDEOS = {path.stem: context_file(path) for path in SAMPLE_VIDEOS.iterdir()}


def test_the_sample_has_the_documented_questions_and_what_they_need() -> None:
    assert len(ROWS) == len({row["id"] for row in ROWS}) == 30
    assert set(Counter(row["video"] for row in ROWS).values()) == {3}
    assert {row["video"] for row in ROWS} == set(VIDEOS) and len(VIDEOS) == 10
    assert Counter(row["type"] for row in ROWS) == {
        "CW": 6, "CH": 4, "TN": 3, "TP": 3, "TC": 4, "DC": 4, "DL": 3, "DO": 3,
    }  # fmt: skip
    assert Counter(len(row.get("options", [])) for row in ROWS) == {5: 24, 3: 4, 0: 2}
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


def _nearest(row: dict[str, Any]) -> str:
    """The option that shares most words with the question."""
    asked = set(re.findall("[a-z]+", row["question"].lower()))
    return max(row["options"], key=lambda one: len(asked & set(re.findall("[a-z]+", one))))


def test_the_sample_cannot_be_guessed_without_the_videos() -> None:
    five = Counter(row["answer"] for row in CHOICES if len(row["options"]) == 5)
    assert set(five) == set(range(5)) and max(five.values()) <= 5
    for guess in (
        lambda row: max(row["options"], key=len),
        lambda row: min(row["options"], key=len),
        _nearest,
    ):
        hits = sum(row["options"].index(guess(row)) == row["answer"] for row in CHOICES)
        assert hits <= len(CHOICES) // 4
    assert len({row["options"][row["answer"]] for row in CHOICES if row["type"] == "DC"}) == 4


def _tasks(split: Any = "validation", **settings: Any) -> list[Task]:
    return list(Video(Video.Config(**settings)).tasks(split))


def _shown(**settings: Any) -> dict[str, list[str]]:
    return {task.id: task.public["options"] for task in _tasks("train", **settings)}


def test_options_are_shuffled_the_same_for_a_group_by_the_seed() -> None:
    one, again, other = (_shown(seed=seed) for seed in (1, 1, 2))
    assert one == again
    moved = [one[task_id] != options for task_id, options in other.items() if options]
    assert sum(moved) > 20
    assert _shown(shuffle_options=False) == {row["id"]: row.get("options", []) for row in ROWS}
    rows = {row["id"]: row for row in CHOICES}
    for task in _tasks("train", seed=2):
        assert set(task.public) == {"question", "options", "video", "context"}
        if row := rows.get(task.id):
            right = row["options"][row["answer"]]
            assert task.public["options"][task.hidden["answer"]] == right
    assert all(task.public["context"] is None for task in _tasks("train", blind=True))
    assert Video().baselines() == {"blind": {"blind": True}}


@pytest.mark.parametrize(("value", "lines"), CASES["contexts"])
def test_contexts_are_read_in_every_shape(value: Any, lines: list[str]) -> None:
    context = video_context(value)
    (modality,) = context.modalities
    assert [str(line) for line in context.lines(modality)] == lines
    assert VideoContext.of_json(json.loads(json.dumps(context.as_json()))) == context


@pytest.mark.parametrize("value", CASES["no_contexts"])
def test_contexts_that_hold_nothing_are_refused(value: Any) -> None:
    with pytest.raises(InputError):
        video_context(value)


def test_a_scene_graph_holds_until_the_next_one() -> None:
    graphs = [{"t": t, "triples": [["cup", "at", str(t)]]} for t in (10, 20)]
    context = video_context({"captions": [{"t0": 0, "t1": 40, "text": "a"}], "scene_graph": graphs})
    for start, end, count in ((0, 9, 0), (15, 15, 1), (15, 25, 2), (39, 40, 1)):
        assert len(context.lines("scene_graph", start, end)) == count


def test_long_captions_are_read_in_pages() -> None:
    context = video_context([f"{place} {'and so on ' * 9}" for place in range(180)])
    read = {"get_captions": video_tools(context)["get_captions"]}

    def page(**arguments: Any) -> str:
        (made,) = call("get_captions", **arguments)["tool_calls"]
        return run_tool_call(read, made).text

    seen: list[str] = []
    text = page()
    while found := re.search(r"\(\d+ more; go on from t0 = (\d+)\)$", text):
        seen += text.splitlines()[:-1]
        text = page(t0=int(found[1]))
    seen += text.splitlines()
    assert [line.split()[1] for line in seen] == [str(place) for place in range(180)]


NEXTQA = CASES["nextqa"]
OPTIONS = CASES["options"]
EGOSCHEMA = CASES["egoschema"]
EGOSCHEMA_FILE = CASES["egoschema_file"]
OWN = {"video": "uid-1", "question": "Why?", "options": OPTIONS, "answer": "C"}


@pytest.mark.parametrize("row", [NEXTQA, EGOSCHEMA, {**EGOSCHEMA_FILE, "answer": 2}, OWN])
def test_rows_are_read_in_each_shape(row: dict[str, Any]) -> None:
    item = read_item(row)
    assert (item.options, item.answer) == (OPTIONS, 2)
    assert item.video in ("uid-1", "4010069381")
    task = Video().task_from_row(row)
    assert (task.public["options"], task.hidden["answer"]) == (OPTIONS, 2)


@pytest.mark.parametrize(("answer", "place"), CASES["answers_of_rows"])
def test_a_data_set_may_name_its_answer_in_many_ways(answer: Any, place: int | None) -> None:
    assert option_place(answer, OPTIONS) == place


@pytest.mark.parametrize("row", CASES["no_rows"])
def test_rows_without_a_shape_or_an_answer_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Video().task_from_row(row)


def test_local_data_sets_find_their_captions(tmp_path: Path) -> None:
    header = list(NEXTQA)
    table = [header, [NEXTQA[name] for name in header], [1, 2, *[""] * (len(header) - 2)]]
    (tmp_path / "val.csv").write_text("\n".join(",".join(map(str, row)) for row in table))
    captions = tmp_path / "captions.json"
    captions.write_text(json.dumps({"4010069381": ["a man stands", "he sits"]}))
    (task,) = _tasks(data_set="nextqa", data_path=tmp_path, captions_path=captions, caption_fps=0.5)
    assert task.public["question"] == "why did the man sit?" and task.hidden["type"] == "CW"
    assert task.public["context"]["captions"][1] == {"text": "he sits", "t0": 2.0, "t1": 4.0}
    questions, answers = tmp_path / "questions.json", tmp_path / "answers.json"
    questions.write_text(json.dumps([EGOSCHEMA_FILE, {**EGOSCHEMA_FILE, "q_uid": "../x"}]))
    answers.write_text('{"uid-1": 2, "../x": 1}')
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "uid-1.txt").write_text("#C C opens a box")
    (tmp_path / "x.txt").write_text("outside")
    (ego,) = _tasks(
        data_set="egoschema", data_path=questions, captions_path=tmp_path / "videos",
        answers_path=answers,
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
    blind = _tasks("test", data_set="nextqa", blind=True)
    assert all(task.public["context"] is None for task in blind)
    assert set(asked) == {("lmms-lab/NExTQA", "MC", "test")}


def test_a_single_question_is_asked_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kitchen.txt"
    file.write_text("0:05: a woman cuts bread")

    def asked(**more: Any) -> Task:
        return Video().task_from_question(
            Video.Question(**{"question": "What is cut?", "video_ctx": file, **more})
        )

    task = asked(answer="bread")
    assert task.hidden["golds"] == ["bread"] and task.public["video"] == "kitchen"
    assert asked(options=["ham", "bread"], answer="B").hidden["answer"] == 1
    asked()
    with pytest.raises(NotFoundError):
        asked(video_ctx=tmp_path / "no.txt")


# What counts as an answer.


def choice(**settings: Any) -> tuple[Video, Task]:
    env = Video(Video.Config(**settings))
    options = ["washes a cup", "opens the gate", "feeds a goose"]
    row = {"question": "What does he do?", "type": "TP", "options": options, "answer": "B",
           "evidence": [[60, 75]]}  # fmt: skip
    return env, env.task_from_row(row)


def reward(text: str = "", answer: str | None = None, **settings: Any) -> float | None:
    env, task = choice(**settings)
    return env.score(task, Result(output={"answer": answer, "text": text, "experts": {}})).reward


@pytest.mark.parametrize("text", CASES["named"])
def test_one_option_is_named_in_many_ways(text: str) -> None:
    assert reward(text) == 1.0


@pytest.mark.parametrize("answer", CASES["finished"])
def test_finish_names_an_option(answer: str) -> None:
    assert reward("Answer: A", answer) == 1.0


@pytest.mark.parametrize("text", CASES["not_named"])
def test_what_names_no_option_or_several_is_wrong(text: str) -> None:
    assert reward(text) == 0.0
    assert reward(answer=text) == 0.0 or text == "opens the gate"


@given(st.text(alphabet="ABCD .,:;()or and boxed{}\\\n", max_size=60), st.none() | st.text())
def test_no_words_break_the_scorer(text: str, answer: str | None) -> None:
    assert reward(text, answer) in (0.0, 1.0)


@pytest.mark.parametrize(("text", "expected"), CASES["evidence"])
def test_evidence_is_worth_its_share_of_a_right_answer(text: str, expected: float) -> None:
    assert reward(text, evidence_bonus=0.25) == expected
    assert reward(text) == float(expected > 0)


@pytest.mark.parametrize(("answer", "expected"), CASES["words"])
def test_answers_in_words_are_measured(answer: str, expected: float) -> None:
    env = Video()
    row = {"question": "Where?", "answer": ["the old barn", "barn of the old"], "type": "DL"}
    task = env.task_from_row(row)
    text = answer if answer.startswith("Answer") else f"\\boxed{{{answer}}}"
    assert env.score(task, Result(output=text)).reward == pytest.approx(expected)


def test_what_was_cut_off_is_wrong_and_types_are_told() -> None:
    env, task = choice()
    right = env.score(task, Result(output="Answer: B", metrics={"tool_errors_captions": 2.0}))
    assert right.metrics == {
        "truncated": 0.0, "tool_errors": 2.0, "answered": 1.0, "correct_TN": 1.0, "correct_T": 1.0,
    }  # fmt: skip
    cut = env.score(task, Result(output="Answer: B", truncated=True))
    assert (cut.reward, cut.metrics["correct_T"], cut.metrics["answered"]) == (0.0, 0.0, 0.0)


def test_a_response_is_a_text_or_a_call_of_finish() -> None:
    env, task = choice()
    finish, broken = call("finish", answer="B"), call("finish")
    broken["tool_calls"][0]["function"]["arguments"] = "["
    for text, messages, expected in (("", [finish], 1), ("Answer: B", [], 1), ("", [broken], 0)):
        assert env.score(task, env.response_from_row(text, messages)).reward == expected


def test_accuracy_is_reported_as_by_nextqa() -> None:
    rows = [
        {"video": "v", "qid": str(place), "type": type_, "answer": 0}
        for place, type_ in enumerate(["CW", "CW", "TN", "TP", "DO"])
    ]
    said = {"v_0": 0, "v_1": 1, "v_2": 0, "v_4": None}
    assert nextqa_accuracy(rows, said) == {
        "CW": 0.5, "C": 0.5, "TN": 0.5, "T": 0.5, "DO": 0.0, "D": 0.0, "all": 0.4,
    }  # fmt: skip
    assert accuracy_by_type([("", 1.0), ("", 0.0)]) == {"all": 0.5}
