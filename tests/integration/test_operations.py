"""What whoever runs a server can see of it, and how it stops: with the real `serve`."""

import gzip
import json
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import httpx
import yaml
from envserver_clients.http import SyncEnvClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families
from support.commands import served
from support.http_stand_in import standing_in
from support.waiting import PATIENCE


def values(span: Span) -> dict[str, Any]:
    """Returns the attributes of a span that are text or numbers."""
    kinds = ("string_value", "int_value", "double_value", "bool_value")
    return {
        one.key: getattr(one.value, kind)
        for one in span.attributes
        if (kind := one.value.WhichOneof("value")) in kinds
    }


class Traces:
    """Spans that an OTLP/HTTP receiver got, by trace."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.url = ""
        self.status = 200
        """Answers a request to the receiver."""

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


DOCKER = Path(__file__).parents[2] / "docker"
SECRET = "sk-operations-secret-0123456789"
MATH = (
    "--env math --model sim --sim.latency_seconds 0 --env.group_size 2"
    " --env.ensure_scores_are_not_same false --store groups.db --rollouts.max_concurrent 4"
    f" --workers.processes 1 --openai.api_key {SECRET}"
)


def families(url: str) -> dict[str, Any]:
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def dashboard_uses() -> dict[str, set[str]]:
    """Each series that the dashboard or an alert reads, with the labels it uses."""
    board = json.loads((DOCKER / "grafana-dashboard.json").read_text())
    rules = yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"][0]["rules"]
    exprs = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    exprs += [rule["expr"] for rule in rules]
    used: dict[str, set[str]] = defaultdict(set)
    for expr in exprs:
        labels = {
            name.strip() for names in re.findall(r"by \((.*?)\)", expr) for name in names.split(",")
        }
        for series in re.findall(r"\b(?:envserver|process)_[a-z0-9_]+", expr):
            used[series] |= labels - {"le"}
    return used


def test_a_server_shows_its_numbers_its_traces_and_its_end(tmp_path: Path) -> None:
    with receiver() as traces:
        line = f"{MATH} --telemetry.otlp_endpoint {traces.url} --log_format json"
        with served(f"{line} --rollouts.max_queued_groups 6", tmp_path) as (server, url):
            assert httpx.get(f"{url}/readyz", timeout=PATIENCE).json()["parts"].keys() == {
                "store", "disk", "engine", "workers:math", "scorers:math", "routes",
            }  # fmt: skip
            with SyncEnvClient(url, run="trainer", batch_size=2) as client:
                client.publish_policy_version(3)
                client.ack(next(client.batches(idle_seconds=PATIENCE)))
                client.nack(next(client.batches(idle_seconds=PATIENCE)))
            shown = families(url)
            check_dashboard(shown)
            assert shown["envserver_leases"].samples
            delivered = shown["envserver_groups_delivered"].samples[0]
            assert delivered.labels == {"environment": "math"}
            assert delivered.value >= 4
            server.send(signal.SIGTERM)
            assert server.end() == 0
            output = server.output()
    check_traces(traces.by_trace())
    for line in output.splitlines():
        if line.startswith("{"):
            assert {"event", "level", "timestamp"} <= json.loads(line).keys()
    assert SECRET not in output
    assert not any(SECRET.encode() in body for body in traces.bodies)


def check_dashboard(shown: dict[str, Any]) -> None:
    """Every series and every label that is drawn exists."""
    for series, labels in dashboard_uses().items():
        name = re.sub(r"_(total|bucket|sum|count)$", "", series)
        family = shown.get(name) or shown.get(series.removesuffix("_info"))
        assert family is not None, series
        if family.samples:
            names = {sample.name for sample in family.samples}
            assert series in names, (series, names)
            own = set().union(*(sample.labels for sample in family.samples))
            assert labels <= own | {"part"}, (series, labels, own)


def check_traces(traces: dict[bytes, list[Span]]) -> None:
    """One rollout is one trace, and its parts hang together."""
    whole = 0
    rollouts = set()
    for spans in traces.values():
        names = {span.span_id: span.name for span in spans}
        parents = {span.name: names.get(span.parent_span_id) for span in spans}
        (root,) = [span for span in spans if not span.parent_span_id] or [None]
        if root is None:  # cut off by the end
            continue
        about = {one.key: one.value for one in root.attributes}
        rollouts.add(about["envserver.rollout_id"].string_value)
        if "store put" not in parents:
            continue
        whole += 1
        tool = parents.pop("execute_tool calculate", "invoke_agent math")  # not all use it
        assert tool == "invoke_agent math"
        assert parents == {
            "task": None,
            "invoke_agent math": "task",
            "chat sim": "invoke_agent math",
            "score": "task",
            "store put": "task",
        }
        call = next(span for span in spans if span.name == "chat sim")
        values = {one.key: one.value for one in call.attributes}
        assert values["gen_ai.usage.output_tokens"].int_value > 0
        assert values["gen_ai.usage.input_tokens"].int_value > 0
        assert values["gen_ai.operation.name"].string_value == "chat"
        keys = {one.key for span in spans for one in span.attributes}
        assert all(key.startswith(("gen_ai.", "envserver.", "error.")) for key in keys)
        assert not any("message" in key or "prompt" in key for key in keys)
    assert whole >= 8
    assert len(rollouts) >= whole


def test_what_does_not_end_in_time_is_cancelled_and_counted(tmp_path: Path) -> None:
    slow = "--sim.seconds_per_token 60 --server.drain_seconds 10"
    with served(f"{MATH} {slow}", tmp_path) as (server, url):
        server.until(
            lambda: httpx.get(f"{url}/v1/status", timeout=PATIENCE).json()["server"]["open_groups"]
        )
        server.send(signal.SIGTERM)
        server.wait_for("Finishing")
        answer = httpx.get(f"{url}/readyz", timeout=PATIENCE)
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["parts"]["server"]["state"] == "draining"
        assert httpx.get(f"{url}/healthz", timeout=PATIENCE).json()["status"] == "ok"
        assert server.end() == 1
    assert re.search(r"Stopped after 10 s: [1-9]\d* groups? cancelled", server.output())


def test_files_that_containers_mount_exist_and_what_is_drawn_is_documented() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"].values()
    for volume in (one for service in services for one in service.get("volumes", ())):
        assert volume[0] != "." or (DOCKER / volume.split(":")[0]).is_file(), volume
    names = (DOCKER.parent / "docs/observing.md").read_text()
    for series in dashboard_uses():
        base = re.sub(r"_(bucket|sum|count)$", "", series)
        short = base.replace("envserver_replica", "", 1)
        assert f"`{base}`" in names or f"`{short}`" in names or base.startswith("process_"), base
