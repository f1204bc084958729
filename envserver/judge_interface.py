"""The judge (`self.judge`) that `score`, `score_group` and rubrics call models with.

Implementation: `judges/client.py`, in a scorer process. The call itself is made by the server
(`judges/server.py`), which has the key, the cache and the bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
from envserver_records.tasks import Message

T = TypeVar("T")

TRIES = 3
"""How often `ask` requests an answer that can be read."""


class JudgeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a judge.

    Args:
        content: its text.
        model: the model that gave it.
        prompt_tokens, completion_tokens: what it cost when it was made.
        cached: it came from the cache and cost nothing now.
    """

    content: str
    model: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: bool = False


class Judge(Protocol):
    """A model that scorers ask; `--judge.*` says which. Its calls are never trained on.

    Answers are cached by content: the same model, messages and sampling cost once, also in a later
    `rescore`. While a scorer waits for an answer, its `score_timeout_seconds` stand still.

    Raises (every method):
        ConfigError: no judge is set (`--judge.base_url`).
        JudgeError: no answer, after repetitions. Do not catch it: scoring is tried again, and the
            rollout is never scored without its judge.
    """

    async def chat(
        self, messages: list[Message], *, attempt: int = 0, **sampling: Any
    ) -> JudgeReply:
        """Requests one chat completion.

        Args:
            messages: in OpenAI's format.
            attempt: part of what the cache compares: another number, another answer.
            sampling: `temperature`, `max_tokens`, `stop`, `response_format` ...; unset: as the
                settings say.
        """

    def chat_blocking(
        self, messages: list[Message], *, attempt: int = 0, **sampling: Any
    ) -> JudgeReply:
        """`chat` for a plain `def score`."""

    async def ask(
        self,
        messages: list[Message],
        read: Callable[[str], T],
        *,
        tries: int = TRIES,
        **sampling: Any,
    ) -> T:
        """Requests an answer that `read` can read, at most `tries` times.

        Args:
            read: returns what the answer's text says; raises ValueError if it cannot be read.

        Raises:
            JudgeError: none could be read.
        """

    def ask_blocking(
        self,
        messages: list[Message],
        read: Callable[[str], T],
        *,
        tries: int = TRIES,
        **sampling: Any,
    ) -> T:
        """`ask` for a plain `def score`."""
