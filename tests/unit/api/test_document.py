"""The OpenAPI document; the page made of it is in tests/browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import unquote

import pytest
from pydantic.json_schema import GenerateJsonSchema
from support.api import Api, running_api, wire_group

from envserver.api.metrics import Metrics
from envserver.proxy.gate import Gate


def references(part: Any) -> Iterator[str]:
    """Yields every `$ref` in `part`."""
    if isinstance(part, list):
        for each in part:
            yield from references(each)
    elif isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for each in part.values():
            yield from references(each)


async def test_the_document_is_whole_and_its_schemas_are_made_only_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making = Mock(wraps=GenerateJsonSchema.generate)
    monkeypatch.setattr(
        GenerateJsonSchema, "generate", lambda *given, **named: making(*given, **named)
    )
    async with running_api(tmp_path / "s.db", metrics=Metrics(), gate=Gate()) as api:
        assert making.call_count == 0
        document = await api.get("/openapi.json")
    assert making.call_count > 20
    found = set(references(document))
    assert {"#/components/schemas/News", "#/components/schemas/ScoredGroup"} <= found
    for reference in found:
        place = document
        assert reference.startswith("#/")
        for name in reference[2:].split("/"):
            assert name in place, reference
            place = place[name]


async def test_the_document_says_what_each_route_of_a_trainer_answers(api: Api) -> None:
    paths = (await api.get("/openapi.json"))["paths"]
    assert {"/scored_data", "/healthz"} <= set(paths)
    ours = ("/v1/runs", "/v1/groups", "/v1/policy-version", "/v1/status")
    routes = {
        f"{method} {path}": route
        for path, methods in paths.items()
        for method, route in methods.items()
        if path.startswith(ours)
    }
    for name, route in routes.items():
        assert route["description"], name
        good = [answer for status, answer in route["responses"].items() if status < "300"]
        assert good, name
        assert all("schema" in one for a in good for one in a.get("content", {}).values()), name
        for status, answer in route["responses"].items():
            if status >= "400":
                assert set(answer["content"]) == {"application/problem+json"}, (name, status)
        if name.startswith("post") and not name.endswith("/close"):
            assert "requestBody" in route, name
            assert {"400", "413", "422", "503"} <= set(route["responses"]), name

    def answers(name: str) -> set[str]:
        return set(routes[name]["responses"]["200"]["content"])

    def parameters(name: str) -> dict[str, Any]:
        return {one["name"]: one["schema"].get("default") for one in routes[name]["parameters"]}

    body = routes["post /v1/runs/{run}/lease"]["requestBody"]["content"]["application/json"]
    assert "wait_seconds" in body["schema"]["properties"]
    assert "post /v1/runs/{run}/close" in routes
    one, stream = "application/vnd.envserver.group+msgpack", "application/vnd.envserver.stream"
    assert answers("get /v1/groups/{group_id}") == {one, "application/json"}
    assert answers("get /v1/runs/{run}/stream") == {stream, "text/event-stream"}
    wanted = {"after": 0, "limit": 100, "order": "oldest", "flag": ""}
    assert wanted.items() <= parameters("get /v1/groups").items()
    assert {"window", "on_hangup", "max_tokens"} <= set(parameters("get /v1/runs/{run}/stream"))


async def test_the_document_has_the_errors_of_every_route(tmp_path: Path) -> None:
    async with running_api(
        tmp_path / "s.db",
        metrics=Metrics(),
        gate=Gate(),
        server={"max_waiting_groups": 1, "max_body_bytes": 1024},
    ) as api:
        paths = (await api.get("/openapi.json"))["paths"]
        sent = [
            await api.http.post("/scored_data", content=b"{"),
            await api.http.post("/scored_data", content=b'{"tokens": "\xff"}'),
            await api.http.post("/scored_data", json=wire_group()),
            await api.http.post("/scored_data", json=wire_group()),
            await api.http.post("/ack", json={"lease_id": "none"}),
            await api.http.request("GET", "/status-env", json={"env_id": 7}),
            await api.http.get("/status", headers={"host": "evil.example"}),
            await api.http.get("/reset_data", headers={"origin": "http://evil.example"}),
            await api.http.get("/metrics"),
            await api.http.get("/readyz"),
        ]
        for path, operations in paths.items():  # a GET may have a body, too
            for method in operations.keys() - {"post"} if not path.endswith("/stream") else ():
                for body, encoding in ((b"x" * 2000, "identity"), (b"x", "gzip")):
                    headers = {"content-encoding": encoding}
                    sent.append(await api.http.request(method, path, content=body, headers=headers))
    statuses = [one.status_code for one in sent]
    assert statuses[:10] == [422, 400, 200, 429, 404, 404, 421, 403, 200, 200]
    assert {400, 413} <= set(statuses[10:])
    for one in sent:
        operation = paths[unquote(one.request.url.path)][one.request.method.lower()]
        answer = operation["responses"][str(one.status_code)]
        if one.status_code == 204:
            continue
        kind = one.headers["content-type"].partition(";")[0]
        assert kind in answer["content"], (one.request.url, one.status_code)
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert {"400", "401", "403", "413", "429", "503"} <= set(operation["responses"]), path
            assert method == "get" or "507" in operation["responses"], path
            assert operation.get("description"), path
