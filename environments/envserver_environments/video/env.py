"""The environment `video`: questions about videos, from text about them and frames of their files.

`public` holds the question, its options in the order that all rollouts of a group see, the video's
name, the text about it (`context`) and, with frames, its `file`; `hidden` the answer, the
question's type and the time of the evidence.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from envserver_environments.answers import doubtful_option
from envserver_environments.rows import (
    DataEnvironment,
    FirstOption,
    NumberedRow,
    OptionRowsConfig,
    Row,
    first_option,
    id_of,
    made,
)
from envserver_records.tasks import Json
from pydantic import Field, PositiveFloat, PositiveInt

from envserver import (
    AgentRole,
    ConfigError,
    Environment,
    InputError,
    KnownResult,
    Message,
    NotFoundError,
    PublicTask,
    Result,
    Rollout,
    Score,
    Service,
    Services,
    Split,
    Task,
)
from envserver.rows.columns import doubt

from .agent import Protocol
from .context import MODALITIES, VideoContext, video_context
from .data_sets import (
    DATA_SETS,
    HUBS,
    SAMPLE_VIDEOS,
    DataSetName,
    Folder,
    VideoQuestion,
    Videos,
    answers_file,
    context_file,
    read_item,
    single_rows,
    video_file,
)
from .frames.decoding import FrameLimits
from .frames.store import FrameStore, require_av
from .known import demonstrate, known_answers
from .scoring import score_rollout
from .teams import FRAMES, ORGANIZER, Frames, Mode, solve

_HOW_TO_GIVE = (
    "Captions: --env.captions_path FOLDER with NAME.txt, .srt, .vtt or .json for each video, or"
    " one JSON file by name, or `context` in the rows. Frames: --env.frames all --env.videos_path"
    " FOLDER with NAME.mp4 or a folder NAME of pictures. Neither: --env.blind true. Answers in"
    """ a file: --env.answers_path. Other fields: --env.columns '{"question": "...", ...}'."""
)


class Video(DataEnvironment):
    """Answer questions about videos, from captions, transcripts, scene graphs and frames."""

    name = "video"
    sample_files = {"data_path": "questions.jsonl", "captions_path": "videos"}
    checks_rows = True

    class Config(OptionRowsConfig):
        """Selects the questions, the team, and its tools."""

        data_set: DataSetName = "sample"
        """Data set. sample: 30 built-in questions; nextqa; egoschema; captions: data_path."""
        answers_path: Path | None = None
        """Answers by video or question, for rows without one (EgoSchema's subset_answers.json)."""
        captions_path: Path | None = None
        """Captions: a folder of NAME.txt, .srt, .vtt or .json, or one JSON file keyed by name."""
        caption_fps: PositiveFloat = 1.0
        """Captions per second, if captions are a plain list."""
        frames: Frames = "off"
        """Show the model frames of video files: all at once, or by its tool view_frames (tool)."""
        videos_path: Path | None = None
        """Folder of the videos, as files or folders of frames; unset: the folder of data_path."""
        folder_fps: PositiveFloat = 1.0
        """Frames per second of a video, where they are pictures in a folder."""
        frame_count: int = Field(default=8, ge=1, le=64)
        """Frames of a video (all), or of each part of it that the model views (tool)."""
        frame_seconds: PositiveFloat | None = None
        """Seconds from a frame to the next, as far as frame_count allows; unset: evenly spread."""
        frame_side: int = Field(default=448, ge=16, le=2048)
        """Longest side of a frame in pixels; smaller videos stay as they are."""
        decode_seconds: PositiveInt = 20
        """Processor seconds for the frames of one request."""
        decode_memory_mb: int = Field(default=1024, ge=256)
        """Memory for that, in MB."""
        max_video_mb: PositiveInt = 4096
        """Maximum size of a video file, in MB."""
        max_megapixels: PositiveInt = 40
        """Maximum width times height of a video, in millions."""
        frame_cache_mb: PositiveInt = 256
        """Decoded frames that are kept for further rollouts, in MB."""
        mode: Mode = "single"
        """single: one agent; report: experts, and an organizer if they disagree; star: an
        organizer that asks experts one by one."""
        protocol: Protocol = "tools"
        """How agents call tools. tools: tool calls; text: THOUGHT, TOOL_CALL and FINAL as text."""
        blind: bool = False
        """Baseline: ask the question without the video and without tools."""
        shuffle_options: bool = True
        """Shuffle options by seed and task; a group shares one order."""
        max_rounds: PositiveInt = 8
        """Maximum messages of the organizer in mode star."""
        organizer_schema: bool = False
        """Force the organizer's JSON schema in mode report; its tokens are then not trained."""
        evidence_bonus: float = Field(default=0.0, ge=0, le=0.5)
        """Share of the reward that needs a right answer to name a time of its evidence."""

    class Question(Environment.Question):
        """A question about a video of which there is a file."""

        video_ctx: Path
        """Captions of the video: a .txt, .srt, .vtt or .json file, see README.md."""
        options: list[str] = []
        """Answer options in order; without options the answer is free text."""

    def baselines(self) -> dict[str, Json]:
        return {"blind": {"blind": True}}

    def agents(self) -> Mapping[str, AgentRole]:
        if self.config.blind or self.config.mode == "single":
            return {}
        seeing = [] if self.config.frames == "off" else [FRAMES]
        return {name: AgentRole() for name in (ORGANIZER, *MODALITIES, *seeing)}

    def services(self) -> AbstractAsyncContextManager[Mapping[str, Service]]:
        config, folder = self.config, self._folder()
        if folder is None:
            return nullcontext({})
        require_av()
        limits = FrameLimits(
            count=config.frame_count,
            every=config.frame_seconds,
            side=config.frame_side,
            max_pixels=config.max_megapixels * 1_000_000,
            cpu_seconds=config.decode_seconds,
            memory_mb=config.decode_memory_mb,
        )
        store = FrameStore(
            folder,
            limits,
            file_mb=config.max_video_mb,
            kept_mb=config.frame_cache_mb,
            pictures_per_second=config.folder_fps,
        )
        return nullcontext(Services({FRAMES: store.answer}, counts=store.counts))

    def tasks(self, split: Split) -> Iterator[Task]:
        config = self.config
        answers, videos, folder = answers_file(config.answers_path), self._videos(), self._folder()
        files = None if folder is None else Folder(folder)
        source = DATA_SETS.rows(config.data_set, config.data_path, split, config.seed)
        rows = (part for whole in source for part in whole.parts(single_rows))

        def read(row: Row, first: FirstOption) -> VideoQuestion:
            return read_item(row, answers, config.columns, first)

        first = first_option(config.first_option, config.data_path, split, read, single_rows)

        def task(row: Row, numbered: NumberedRow) -> Task:
            return self._task(numbered.task_id(config.data_set), read(row, first), videos, files)

        name = config.data_path.name if config.data_path else config.data_set
        return self.rows.usable(name, made(rows, task), hint=_HOW_TO_GIVE)

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        return await solve(task, run, self.config)

    def score(self, task: Task, result: Result) -> Score:
        return score_rollout(task, result, self.config.evidence_bonus)

    def demonstration(self, task: Task) -> list[Message] | Mapping[str, list[Message]]:
        config = self.config
        return demonstrate(
            task, config.mode, config.protocol, blind=config.blind, frames=config.frames
        )

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        return known_answers(task)

    def task_from_row(self, row: Json) -> Task:
        # A response can be scored without the question that it answers.
        first = self.config.first_option or 0
        row = {"question": "?", **row}
        item = read_item(row, columns=self.config.columns, first=lambda: first)
        context = None if item.context is None else video_context(item.context)
        # The order stays: a response says a letter of it.
        return _task(id_of(row), item, context, list(range(len(item.options))))

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        return Result(output={"answer": _finished(messages), "text": response}, messages=messages)

    def task_from_question(self, question: Question) -> Task:
        context = context_file(question.video_ctx, self.config.caption_fps)
        row = {
            "question": question.question,
            "video": question.video_ctx.stem,
            "options": question.options,
            # A question may come without an answer; then it is not scored.
            "answer": question.answer
            if question.answer is not None
            else (0 if question.options else "?"),
        }
        item = read_item(row)
        return _task(question.video_ctx.stem, item, context, list(range(len(item.options))))

    def _videos(self) -> Videos | None:
        config = self.config
        if config.captions_path is not None:
            return Videos(config.captions_path, config.caption_fps)
        if config.data_set == "sample" and config.data_path is None:
            return Videos(SAMPLE_VIDEOS, config.caption_fps)
        needed = not config.blind and config.frames == "off"
        if config.data_set in HUBS and config.data_path is None and needed:
            raise ConfigError(
                f"The data set {config.data_set!r} has questions, but no captions.",
                hint=_HOW_TO_GIVE,
            )
        return None

    def _folder(self) -> Path | None:
        config = self.config
        if config.frames == "off" or config.blind:
            return None
        data = config.data_path
        folder: Path | None = config.videos_path or (
            data.parent if data and data.is_file() else data
        )
        if folder is None:
            raise ConfigError(
                "Frames need video files, and no folder of them is set.",
                hint="Set videos_path to a folder with NAME.mp4 for each video.",
            )
        if not folder.is_dir():
            raise NotFoundError(f"There is no folder of videos at {str(folder)!r}.")
        return folder

    def _task(
        self, task_id: str, item: VideoQuestion, videos: Videos | None, files: Folder | None
    ) -> Task:
        file = None if files is None else video_file(files, item)
        context = None if self.config.blind else self._context(item, videos)
        if context is None and file is None and not self.config.blind:
            raise InputError("no captions and no frames of its video")
        if item.answer is not None and (why := doubtful_option(item.options, item.answer)):
            doubt(why)
        order = list(range(len(item.options)))
        if self.config.shuffle_options:
            random.Random(f"options-{self.config.seed}-{task_id}").shuffle(order)
        return _task(task_id, item, context, order, file)

    def _context(self, item: VideoQuestion, videos: Videos | None) -> VideoContext | None:
        if item.context is not None:
            return video_context(item.context, self.config.caption_fps)
        return None if videos is None else videos.context(item)


def _task(
    task_id: str,
    item: VideoQuestion,
    context: VideoContext | None,
    order: list[int],
    file: str | None = None,
) -> Task:
    """The task of an item; `order`: places in the item's options, in the order that is shown."""
    hidden: Json = {"type": item.type, "evidence": item.evidence}
    if item.answer is None:
        hidden["golds"] = item.golds
    else:
        hidden["answer"] = order.index(item.answer)
    public = {
        "question": item.question,
        "options": [item.options[place] for place in order],
        "video": item.video,
        "context": None if context is None else context.as_json(),
        **({} if file is None else {"file": file}),
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
