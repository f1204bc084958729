"""A receiver of traces (OTLP over HTTP)."""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from .http_stand_in import standing_in


def values(span: Span) -> dict[str, Any]:
    """Returns the attributes of a span that are text or numbers."""
    kinds = ("string_value", "int_value", "double_value", "bool_value")
    return {
        one.key: getattr(one.value, kind)
        for one in span.attributes
        if (kind := one.value.WhichOneof("value")) in kinds
    }


class Traces:
    """What came to an OTLP/HTTP receiver: spans by trace."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.url = ""
        self.status = 200
        """What the receiver answers."""

    def spans(self) -> list[Span]:
        return [span for spans in self.by_trace().values() for span in spans]

    def by_trace(self) -> dict[bytes, list[Span]]:
        found: dict[bytes, list[Span]] = defaultdict(list)
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        found[span.trace_id].append(span)
        return found


@contextmanager
def receiver() -> Iterator[Traces]:
    traces = Traces()

    def answer(path: str, headers: Message, body: bytes) -> tuple[int, bytes]:
        assert path == "/v1/traces"
        packed = headers.get("content-encoding") == "gzip"
        traces.bodies.append(gzip.decompress(body) if packed else body)
        return traces.status, b""

    with standing_in(answer) as traces.url:
        yield traces
