"""What every dialect offers."""

from __future__ import annotations

from typing import Any, Protocol

from envserver_records.errors import EnvserverError
from envserver_records.records import Dialect

from ..model_request import ModelRequest

Memory = dict[str, Any]
"""What a dialect with a memory (`previous_response_id`) keeps of one attempt."""


class EventWriter(Protocol):
    """One streamed answer as server-sent events. Called in this order: begin, chunk*, end | fail.

    `begin` is called when the answer's first chunk is there, `end` when the calls are recorded.
    """

    def begin(self) -> bytes:
        """Events before the first chunk; may be none."""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """The events for one chunk of the chat form; may be none.

        The chunk that ends a choice, and the one with the usage, come only after the recording.
        """

    def end(self) -> bytes:
        """The last events."""

    def fail(self, error: EnvserverError) -> bytes:
        """The events that end the stream because of `error`."""


class DialectAdapter(Protocol):
    """One dialect."""

    name: Dialect

    def read(self, body: dict[str, Any], memory: Memory) -> ModelRequest:
        """
        Raises:
            InputError: a field is missing, has the wrong form, or is not possible; `place` names
                it.
        """

    def whole(
        self, request: ModelRequest, answer: dict[str, Any], memory: Memory
    ) -> dict[str, Any]:
        """`answer`, of the chat form, in this dialect. Called once the calls are recorded."""

    def writer(self, request: ModelRequest, memory: Memory) -> EventWriter:
        """For one streamed answer to `ask`."""

    def error(self, error: EnvserverError) -> dict[str, Any]:
        """The body of an answer that says `error`."""
