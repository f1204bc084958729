"""The environment `video`: its questions, what is known of videos, where both come from, what
counts as an answer, and how accuracy is reported."""

import json
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.rows import option_place
from envserver_environments.video.context import VideoContext, video_context
from envserver_environments.video.data_sets import SAMPLE, read_item
from envserver_environments.video.env import Video
from envserver_records.tasks import Json
from hypothesis import given
from hypothesis import strategies as st
from support.cases import cases_of
from support.commands import read_jsonl
from support.scripted_run import call

from envserver import ConfigError, InputError, NotFoundError, Result, Task

CASES = cases_of(__file__, "video_cases.json")
ROWS = read_jsonl(SAMPLE)


def _tasks(split: Any = "validation", **settings: Any) -> list[Task]:
    return list(Video(Video.Config(**settings)).tasks(split))


def _shown(**settings: Any) -> dict[str, list[str]]:
    return {task.id: task.public["options"] for task in _tasks("train", **settings)}


def test_options_are_shuffled_the_same_for_a_group_by_the_seed() -> None:
    one, again, other = (_shown(seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert _shown(shuffle_options=False) == {row["id"]: row.get("options", []) for row in ROWS}
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


NEXTQA = CASES["nextqa"]
OPTIONS = CASES["options"]
EGOSCHEMA_FILE = CASES["egoschema_file"]
OWN = {"video": "uid-1", "question": "Why?", "options": OPTIONS, "answer": "C"}


@pytest.mark.parametrize("case", CASES["published"], ids=lambda case: case["card"])
def test_rows_are_read_as_their_cards_show_them(case: Json) -> None:
    item = read_item(case["row"], columns=case.get("columns"))
    found = {**vars(item), "right": None if item.answer is None else item.options[item.answer]}
    expected = {name: value for name, value in case.items() if name in found}
    assert found | expected == found


@pytest.mark.parametrize(("row", "said"), CASES["refused"])
def test_what_a_row_lacks_is_said(row: Json, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_item(row)


@pytest.mark.parametrize(("answer", "place"), CASES["answers_of_rows"])
def test_a_data_set_may_name_its_answer_in_many_ways(answer: Any, place: int | None) -> None:
    assert option_place(answer, OPTIONS) == place


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


CAPTION = (
    "1\n00:00:01,500 --> 00:00:03,000\n<i>a cat</i>\nsleeps\n\n2\n0:05,0 --> 0:06,0\nit wakes\n"
)


@pytest.mark.parametrize(
    ("video", "file", "content"),
    [
        ("166.mp4", "166.txt", "a cat"),
        ("166.mp4", "166.mp4.txt", "a cat"),
        ("166", "166.srt", CAPTION),
        ("clips/166.mp4", "166.vtt", f"WEBVTT\n\n{CAPTION}"),
        ("166", "deep/er/166.json", '{"segments": [{"start": 1.5, "end": 3, "text": "a cat"}]}'),
        (166, "video166.json", '{"timestamps": [[0, 2]], "sentences": ["a cat"]}'),
        ("166", "v_166_en.json", '[{"start": "00:00:00.0", "end": "0:02.5", "line": "a cat"}]'),
    ],
)
def test_captions_are_found_by_the_names_of_published_videos(
    tmp_path: Path, video: object, file: str, content: str
) -> None:
    rows, captions = tmp_path / "rows.json", tmp_path / "captions"
    rows.write_text(json.dumps([{**OWN, "video": video}, {**OWN, "video": "other"}]))
    (captions / file).parent.mkdir(parents=True)
    (captions / file).write_text(content)
    videos = Video(Video.Config(data_path=rows, captions_path=captions))
    (task,) = videos.tasks("train")
    (lines,) = task.public["context"].values()
    assert "a cat" in lines[0]["text"] and len(lines) <= 2
    assert videos.rows.dropped == {"no captions and no frames of its video": 1}


def test_captions_and_answers_may_be_rows(tmp_path: Path) -> None:
    rows, captions, answers = (tmp_path / name for name in ("q.json", "c.jsonl", "a.json"))
    rows.write_text('[{"video_name": "x", "question_id": "x_1", "question": "Is it red?"}]')
    captions.write_text('{"vid_name": "x", "sub": [{"text": "red", "start": 2, "end": 3}]}\n')
    answers.write_text('[{"question_id": "x_1", "answer": "yes", "type": 3}]')
    (task,) = _tasks(data_path=rows, captions_path=captions, answers_path=answers)
    assert task.hidden["golds"] == ["yes"]
    assert task.public["context"]["captions"] == [{"text": "red", "t0": 2.0, "t1": 3.0}]


def test_a_set_without_captions_or_frames_says_how_to_give_them(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([OWN]))
    with pytest.raises(ConfigError) as caught:
        _tasks(data_set="nextqa", data_path=rows)
    assert "rows.json" in caught.value.message
    for setting in ("--env.captions_path FOLDER", "--env.videos_path FOLDER", "--env.blind true"):
        assert setting in (caught.value.hint or "")


@pytest.mark.parametrize("case", CASES["several"], ids=lambda case: case["card"])
def test_a_row_may_hold_several_questions(tmp_path: Path, case: Json) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps(case["file"]))
    tasks = _tasks(data_path=rows, blind=True)
    assert len({task.id for task in tasks}) == len(tasks)
    shown = [(task.public["question"], task.public["video"], _right(task)) for task in tasks]
    assert sorted(shown) == sorted(tuple(one) for one in case["questions"])


def _right(task: Task) -> str:
    hidden = task.hidden
    return str(
        task.public["options"][hidden["answer"]] if "answer" in hidden else hidden["golds"][0]
    )


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
