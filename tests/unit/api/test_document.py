"""The OpenAPI document; the page made of it is in tests/browser."""

import re
from pathlib import Path

from support.api import running_api, wire_group

from envserver.http.health import Metrics
from envserver.proxy.gate import Gate


async def test_the_document_has_the_errors_of_every_route(tmp_path: Path) -> None:
    async with running_api(
        tmp_path / "s.db",
        metrics=Metrics(),
        gate=Gate(),
        server={"max_waiting_groups": 1, "max_body_bytes": 1024},
    ) as api:
        document = await api.get("/openapi.json")
        paths = document["paths"]
        for name in re.findall("#/components/schemas/([^'\"]+)", str(document)):
            assert name in document["components"]["schemas"]
        sent = [
            await api.http.post("/scored_data", content=b"{"),
            await api.http.post("/scored_data", content=b'{"tokens": "\xff"}'),
            await api.http.post("/scored_data", json=wire_group()),
            await api.http.post("/scored_data", json=wire_group()),
            await api.http.post("/ack", json={"lease_id": "none"}),
            await api.http.request("GET", "/status-env", json={"env_id": 7}),
            await api.http.get("/status", headers={"host": "evil.example"}),
            await api.http.get("/reset_data", headers={"origin": "http://evil.example"}),
        ]
    assert [one.status_code for one in sent] == [422, 400, 200, 429, 404, 404, 421, 403]
    for one in sent:
        operation = paths[one.request.url.path][one.request.method.lower()]
        answer = operation["responses"][str(one.status_code)]
        kind = one.headers["content-type"].partition(";")[0]
        assert kind in answer["content"], (one.request.url, one.status_code)
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert {"400", "401", "403", "413", "429", "503"} <= set(operation["responses"]), path
            assert method == "get" or "507" in operation["responses"], path
            assert operation.get("description"), path
