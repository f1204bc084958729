"""The texts that the agents get; each system prompt is a file beside this one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from envserver_environments.demonstrations import prompt_beside
from envserver_environments.video.context import VideoContext, stamp

_NAMES = {"captions": "captions", "transcript": "a transcript", "scene_graph": "scene graphs"}
_LETTER_RULE = "Answer with the letter of the right option."
_SHORT_RULE = "Answer in a few words."


system_prompt = functools.partial(prompt_beside, __file__)


def question(public: dict[str, Any]) -> str:
    options = [f"{chr(ord('A') + i)}) {option}" for i, option in enumerate(public["options"])]
    return "\n".join([public["question"], *options, _LETTER_RULE if options else _SHORT_RULE])


def about(context: VideoContext) -> str:
    names = [_NAMES[name] for name in context.modalities]
    there = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    length = f"The video lasts {stamp(context.seconds)}. " if context.seconds else ""
    return f"{length}Of it there are {there}."


def reports(texts: Sequence[tuple[str, str]]) -> str:
    return "\n\n".join(f"The expert for {name} reports:\n{text}" for name, text in texts)
