"""The environment `video`: questions about videos that are given as captions only.

Tasks: `public` holds the question, its options in the order that all rollouts of a group see, the
video's name and the text about it (`context`); `hidden` the answer, the question's type and the
time of the evidence. Several agents may work on it, each with a name (`Config.mode`).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envserver_environments.rows import Row
from envserver_environments.usable import usable_tasks
from pydantic import Field

from envserver import (
    AgentRole,
    ConfigError,
    Environment,
    InputError,
    KnownResult,
    Message,
    PublicTask,
    Result,
    Rollout,
    Score,
    Split,
    Task,
)

from .agent import Protocol
from .context import MODALITIES, VideoContext, video_context
from .data_sets import DataSetName, VideoQuestion, read_item
from .demonstrations import demonstrate
from .known import known_answers
from .loading import SAMPLE_VIDEOS, Videos, answers_file, context_file, rows
from .scoring import score_rollout
from .teams import ORGANIZER, Mode, TeamOptions, solve


class Video(Environment):
    """Answer questions about videos, from captions, transcripts and scene graphs."""

    name = "video"

    class Config(Environment.Config):
        """Selects the questions, the team, and its tools."""

        data_set: DataSetName = "sample"
        """Data set. sample: 30 built-in questions; nextqa; egoschema; captions: data_path."""
        data_path: Path | None = None
        """Local .jsonl, .json, .csv or .parquet file or folder, instead of the hub."""
        answers_path: Path | None = None
        """JSON file of answers by video, for rows without one (EgoSchema's subset_answers.json)."""
        captions_path: Path | None = None
        """Video captions: a folder of NAME.json or NAME.txt, or one JSON file keyed by name."""
        caption_fps: float = Field(default=1.0, gt=0)
        """Captions per second, if captions are a plain list."""
        mode: Mode = "single"
        """single: one agent; report: experts, and an organizer if they disagree; star: an
        organizer that asks experts one by one."""
        protocol: Protocol = "tools"
        """How agents call tools. tools: tool calls; text: THOUGHT, TOOL_CALL and FINAL as text."""
        blind: bool = False
        """Baseline: ask the question without the video and without tools."""
        shuffle_options: bool = True
        """Shuffle options by seed and task; a group shares one order."""
        max_rounds: int = Field(default=8, ge=1)
        """Maximum messages of the organizer in mode star."""
        organizer_schema: bool = False
        """Force the organizer's JSON schema in mode report; its tokens are then not trained."""
        evidence_bonus: float = Field(default=0.0, ge=0, le=0.5)
        """Share of the reward that needs a right answer to name a time of its evidence."""

    class Question(Environment.Question):
        """A question about a video of which there is a file."""

        video_ctx: Path
        """Captions of the video: a .txt or .json file, see README.md."""
        options: list[str] = []
        """Answer options in order; without options the answer is free text."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.dropped: Counter[str] = Counter()
        """Number of rows that `tasks` dropped, by reason."""

    def baselines(self) -> dict[str, dict[str, Any]]:
        """Settings of the runs that results of this environment are to be held against."""
        return {"blind": {"blind": True}}

    def agents(self) -> Mapping[str, AgentRole]:
        if self.config.blind or self.config.mode == "single":
            return {}
        return {name: AgentRole() for name in (ORGANIZER, *MODALITIES)}

    def tasks(self, split: Split) -> Iterator[Task]:
        config = self.config
        answers = answers_file(config.answers_path)
        videos = self._videos()
        source = rows(config.data_set, config.data_path, split, config.seed)
        read = (self._task_or_reason(number, row, answers, videos) for number, row in source)
        hint = "Do data_set, data_path and captions_path fit together?"
        return usable_tasks(config.data_set, read, self.dropped, hint=hint)

    async def rollout(self, task: PublicTask, run: Rollout) -> dict[str, Any]:
        config = self.config
        rules = TeamOptions(
            mode=config.mode,
            protocol=config.protocol,
            blind=config.blind,
            max_rounds=config.max_rounds,
            organizer_schema=config.organizer_schema,
        )
        return await solve(task, run, rules)

    def score(self, task: Task, result: Result) -> Score:
        return score_rollout(task, result, self.config.evidence_bonus)

    def demonstration(self, task: Task) -> list[Message] | Mapping[str, list[Message]]:
        config = self.config
        return demonstrate(task, config.mode, config.protocol, blind=config.blind)

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        return known_answers(task)

    def task_from_row(self, row: dict[str, Any]) -> Task:
        text = json.dumps(row, sort_keys=True, ensure_ascii=True, default=str)
        task_id = f"row-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        # A response can be scored without the question that it answers.
        item = read_item({"question": "?", **row})
        context = None if item.context is None else video_context(item.context)
        # The order stays: a response says a letter of it.
        return _task(task_id, item, context, list(range(len(item.options))))

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        return Result(output={"answer": _finished(messages), "text": response}, messages=messages)

    def task_from_question(self, asked: Question) -> Task:
        context = context_file(asked.video_ctx, self.config.caption_fps)
        row = {
            "question": asked.question,
            "video": asked.video_ctx.stem,
            "options": asked.options,
            # A question may come without an answer; then it is not scored.
            "answer": asked.answer if asked.answer is not None else (0 if asked.options else "?"),
        }
        item = read_item(row)
        return _task(asked.video_ctx.stem, item, context, list(range(len(item.options))))

    def _videos(self) -> Videos | None:
        """Returns the texts about videos, or None if only the rows have them."""
        config = self.config
        if config.captions_path is not None:
            return Videos(config.captions_path, config.caption_fps)
        if config.data_set == "sample" and config.data_path is None:
            return Videos(SAMPLE_VIDEOS, config.caption_fps)
        if config.data_set in ("nextqa", "egoschema") and not config.blind:
            raise ConfigError(
                f"The data set {config.data_set!r} has questions, but no captions.",
                hint="Set captions_path to captions of its videos, or blind to true.",
            )
        return None

    def _task_or_reason(
        self, number: int, row: Row | None, answers: dict[str, Any], videos: Videos | None
    ) -> Task | str:
        try:
            return self._task_of(number, row, answers, videos)
        except InputError as error:
            return error.message

    def _task_of(
        self, number: int, row: Row | None, answers: dict[str, Any], videos: Videos | None
    ) -> Task:
        """Raises InputError where the row is of no use."""
        if row is None:
            raise InputError("no JSON object")
        item = read_item(row, answers)
        context = None
        if not self.config.blind:
            if item.context is not None:
                context = video_context(item.context, self.config.caption_fps)
            elif videos is not None:
                context = videos.context(item.video)
            else:
                raise InputError("nothing is known of its video")
        name = self.config.data_set
        task_id = item.row_id if name == "sample" and item.row_id else f"{name}-{number}"
        order = list(range(len(item.options)))
        if self.config.shuffle_options:
            random.Random(f"options-{self.config.seed}-{task_id}").shuffle(order)
        return _task(task_id, item, context, order)


def _task(
    task_id: str, item: VideoQuestion, context: VideoContext | None, order: list[int]
) -> Task:
    """The task of an item; `order`: places in the item's options, in the order that is shown."""
    hidden: dict[str, Any] = {"type": item.type, "evidence": item.evidence}
    if item.answer is None:
        hidden["golds"] = item.golds
    else:
        hidden["answer"] = order.index(item.answer)
    public = {
        "question": item.question,
        "options": [item.options[place] for place in order],
        "video": item.video,
        "context": None if context is None else context.as_json(),
    }
    return Task(task_id, public, hidden)


def _finished(messages: list[Message]) -> str | None:
    """Returns the argument of `finish` in the last message of a conversation, or None."""
    last = messages[-1] if messages else {}
    calls = last.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and function.get("name") == "finish":
            try:
                answer = json.loads(function.get("arguments") or "").get("answer")
            except (ValueError, TypeError, AttributeError, RecursionError):
                return None
            return answer if isinstance(answer, str) else None
    return None
