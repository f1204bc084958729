"""The interface of a dialect. To add one, implement DialectAdapter and list it in `DIALECTS`."""

from __future__ import annotations

from typing import Any, Protocol

from envserver_records.errors import EnvserverError
from envserver_records.records import Dialect

from ..model_request import ModelRequest
from .tables import FieldTable

Memory = dict[str, Any]
"""State of a dialect for one attempt, such as stored responses (`previous_response_id`)."""


class EventWriter(Protocol):
    """Writes one answer as server-sent events. Call order: begin, chunk*, then end or fail.

    `begin` is called when the first chunk has arrived, `end` when the calls are recorded.
    """

    def begin(self) -> bytes:
        """Returns the events before the first chunk, if any."""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """Returns the events for one chat chunk, if any.

        The chunk that ends a choice, and the one with the usage, come only after recording.
        """

    def end(self) -> bytes:
        """Returns the last events."""

    def fail(self, error: EnvserverError) -> bytes:
        """Returns the events that end the stream because of `error`."""


class DialectAdapter(Protocol):
    """Translates between one API and the common form (ModelRequest, chat answers)."""

    name: Dialect
    table: FieldTable
    """The fields of a request; `read` gets no others, and none that is null."""

    def read(self, body: dict[str, Any], memory: Memory) -> ModelRequest:
        """Reads a decoded request body."""

    def whole(
        self, request: ModelRequest, answer: dict[str, Any], memory: Memory
    ) -> dict[str, Any]:
        """Returns the chat answer in this dialect. Called after the calls are recorded."""

    def writer(self, request: ModelRequest, memory: Memory) -> EventWriter:
        """Returns the writer for a streamed answer to `request`."""

    def error(self, error: EnvserverError) -> dict[str, Any]:
        """Returns the body of an error response."""
