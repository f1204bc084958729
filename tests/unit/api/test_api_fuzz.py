"""The trainer API answers any input with 4xx or better, without a traceback, and keeps running.

Inputs come from its own OpenAPI document (schemathesis), which the answers must match, from a
corpus of malformed bodies, and from random bytes on the socket. 503 and 507 mean a failing store,
and here the store works.
"""

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import pytest
import schemathesis
from envserver_records.records import pack
from envserver_records.zstd import zstd
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.api import (
    ENVIRONMENT,
    KEYS,
    REGISTRATION,
    Api,
    join,
    native_group,
    registration,
    running_api,
    wire_group,
)
from support.waiting import PATIENCE

from envserver.proxy.gate import Gate

JSON: Final = "application/json"
MSGPACK: Final = "application/vnd.envserver.group+msgpack"
SHOWN_NEVER: Final = ("Traceback", 'File "', "site-packages", "sqlalchemy")


@asynccontextmanager
async def busy_api(tmp_path: Path, seconds: float = 60.0) -> AsyncIterator[Api]:
    """An API with a run, groups, a trainer and an environment; `seconds` for heads and bodies."""
    bounds = {"body_idle_seconds": seconds, "header_seconds": seconds, "max_body_bytes": 1_000_000}
    async with running_api(tmp_path / "store.db", server=bounds, gate=Gate()) as api:
        await api.run(batch_size=2)
        await api.put(*(f"group-{number}" for number in range(4)))
        await api.start()
        await api.add_environment()
        yield api
        assert await api.status("GET", "/healthz") == 200
        assert await api.status("GET", "/v1/status") == 200
        assert await api.status("POST", "/v1/runs", json={"name": "after"}) == 201
        assert await api.status("POST", "/v1/runs/after/lease", json={}) in (200, 204)


def check(answer: httpx.Response | Any, sent: object) -> None:
    """It is an answer that may be given to anything."""
    text = answer.text
    assert answer.status_code < 500, (answer.status_code, sent, text[:500])
    for word in SHOWN_NEVER:
        assert word not in text, (sent, text[:500])
    kind = str(answer.headers.get("content-type", ""))
    if answer.status_code >= 400 and "json" in kind and text:
        assert len(text) < 100_000
        json.loads(text)


# By the document

CONFORMANCE: Final = [
    response_schema_conformance,
    status_code_conformance,
    content_type_conformance,
]


def judge(url: str, examples: int) -> None:
    """Asks what the document allows and what it does not, `examples` times each."""
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = found.ok()
        if not operation.path.endswith(("/stream", "/events")):  # they have no end
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                # Groups are slow to make up; the corpus has some.
                _judge(operation, mode, examples // 2 if "scored" in operation.path else examples)


def _judge(operation: Any, mode: GenerationMode, examples: int) -> None:
    bodies = [body.media_type for body in operation.body]
    if not examples or (bodies and not any(kind.endswith("json") for kind in bodies)):
        return  # the corpus has those, too

    @seed(7)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
    def ask(case: Any, known: bool) -> None:
        if known and "run" in (case.path_parameters or {}):
            case.path_parameters["run"] = "run"
        if isinstance(case.body, dict) and "wait_seconds" in case.body:
            case.body["wait_seconds"] = 0
        if isinstance(case.body, dict) and "timeout_seconds" in case.body:
            case.body["timeout_seconds"] = 0.01
        answer = case.call(timeout=PATIENCE)
        check(answer, case.as_curl_command())
        if operation.path.startswith("/v1/"):  # of the Atropos API the document says less
            case.validate_response(answer, checks=CONFORMANCE)

    if mode is GenerationMode.POSITIVE or bodies or list(operation.query):
        with contextlib.suppress(Unsatisfiable):  # nothing of it can be wrong
            ask()


@pytest.mark.parametrize(
    "examples",
    [pytest.param(1, marks=pytest.mark.thorough), pytest.param(200, marks=pytest.mark.slow)],
)
async def test_the_api_keeps_to_its_own_document(tmp_path: Path, examples: int) -> None:
    async with busy_api(tmp_path) as api:
        await asyncio.to_thread(judge, api.url, examples)


async def test_an_integer_that_no_answer_can_hold_is_refused_harmlessly(tmp_path: Path) -> None:
    # As an older version stored it, which refused no such settings: it is shown with the rest.
    old = {"seeds": [1, 2**64 + 1], "deep": json.loads("[" * 300 + "]" * 300)}
    async with busy_api(tmp_path) as api:
        await api.store.create_run("old", batch_size=1, settings=old)
        runs = {run["name"]: run for run in (await api.get("/v1/runs"))["runs"]}
        assert {"run", "old"} <= set(runs)
        assert runs["old"]["settings"] == old == (await api.get("/v1/runs/old"))["settings"]
        one = await join(api)
        asked = {"name": "run", "settings": {"seeds": [1, 2**64]}}
        joining = registration(scoring={"a": -(2**64)})
        for refused, place in (
            (await api.http.post("/v1/runs", json=asked), "settings"),
            (await one.send("POST", "/heartbeat", json={"engine": {"a": 2**64}}), "engine"),
            (await api.http.post("/v1/environments", json=joining), "scoring"),
        ):
            assert refused.status_code == 422, refused.text
            assert refused.json()["place"] == f"body.{place}"
            assert "64-bit" in refused.json()["detail"]


# By a corpus


def malformed(good: bytes) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Bodies that nobody should send, with their headers, made of one that is fine."""
    plain = {"content-type": JSON}
    for cut in (1, len(good) // 2, len(good) - 1):
        yield good[:cut], plain
    deep = 5000
    for raw in (
        b"",
        b"[]",
        b"null",
        b"NaN",
        b"\0",
        b"[" * deep,
        b'{"a":' * deep + b"1" + b"}" * deep,
        b'{"a":1,"a":2,"name":"x","name":"y"}',
        b'{"name": "\xff\xfe"}',
        b'{"name": "\\ud800"}',
        b'{"name": "\\u0000"}',
        b'{"name": 1e999}',
        b'{"version": 1' + b"0" * 5000 + b"}",
        b'{"env_id": 9e99}',
        b"[null]",
        json.dumps(dict.fromkeys([*REGISTRATION, *ENVIRONMENT, *KEYS], -1)).encode(),
        b'{"lease_id": "\' OR 1=1 --"}',
        b'{"name": "' + b"A" * 300_000 + b'"}',
        b"\xef\xbb\xbf" + good,
        good.decode().encode("utf-16"),
        b"--x\r\ncontent-disposition: form-data; name=a\r\n\r\n1\r\n--x--",
        b"a=1&b=2",
    ):
        yield raw, plain
    for kind in (
        "text/plain",
        "",
        "application/x-www-form-urlencoded",
        "application/json; charset=utf-7",
        MSGPACK,
    ):
        yield good, {"content-type": kind}
    packed, small = gzip.compress(good), zstd.compress(good)
    for coding, body in (
        ("gzip", good),
        ("gzip", packed[:-5]),
        ("gzip", packed * 3),
        ("gzip", gzip.compress(b"[" * 900_000)),
        ("gzip, gzip", gzip.compress(packed)),
        ("gzip", gzip.compress(b" " * 5_000_000)),
        ("zstd", small[:-2]),
        ("zstd", zstd.compress(b" " * 5_000_000)),
        ("br", good),
        ("x" * 500, good),
        ("\x7f", good),
    ):
        yield body, plain | {"content-encoding": coding}
    group = pack(native_group("g"))
    for body in (
        group,
        group[:-3],
        group + b"x",
        b"\x91" * deep,
        b"\x81\xa1a" * deep,
        b"\xc9\xff\xff\xff\xff\x00",
    ):
        yield body, {"content-type": MSGPACK}


TARGETS: Final[dict[str, Any]] = {
    "/v1/runs": {"name": "run"},
    "/v1/runs/run/lease": {"max_groups": 1},
    "/v1/runs/run/ack": {"lease_id": "x"},
    "/v1/runs/run/nack": {"lease_id": "x"},
    "/v1/runs/run/extend": {"lease_id": "x", "seconds": 1},
    "/v1/policy-version": {"version": 1},
    "/v1/policy/pause": {"in_flight": "keep"},
    "/v1/policy/resume": {},
    "/v1/environments": {"name": "e", "env": "math"},
    "/v1/environments/e/heartbeat": {},
    "/v1/environments/e/groups": {},
    "/v1/environments/e/known": {"group_ids": []},
    "/register": REGISTRATION,
    "/register-env": ENVIRONMENT,
    "/disconnect-env": {"env_id": 0},
    "/ack": {"lease_id": "x"},
    "/scored_data": wire_group(),
    "/scored_data_list": [wire_group()],
}


@pytest.mark.parametrize("one_in", [6, pytest.param(1, marks=pytest.mark.slow)])
async def test_malformed_bodies_are_the_senders_fault(tmp_path: Path, one_in: int) -> None:
    """Every body to one in so many targets, and every target gets some."""
    async with busy_api(tmp_path) as api:
        for turn, (path, good) in enumerate(TARGETS.items()):
            bodies = list(malformed(json.dumps(good).encode()))
            for body, headers in bodies[turn % one_in :: one_in]:
                answer = await api.http.post(path, content=body, headers=headers)
                check(answer, (path, headers, body[:80]))
        for body, headers in [*malformed(b'{"env_id": 0}')][::one_in]:
            answer = await api.http.request("GET", "/status-env", content=body, headers=headers)
            check(answer, (headers, body[:80]))


# By rubbish on the socket

LINE: Final = b"POST /v1/runs HTTP/1.1\r\nhost: localhost\r\n"
RUBBISH: Final = (
    b"\x00" * 100,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET\r\n\r\n",
    b"\r\n" * 500,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    LINE + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    LINE + b"content-length: 99999999999999999999\r\n\r\n{}",
    LINE + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    LINE + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    LINE + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}",
    LINE + b"transfer-encoding: chunked\r\n\r\n2\r\n{}{}\r\n0\r\n\r\n",
    LINE + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    LINE + b"content-length: 2\r\n\r\n{}" + b"\xff\xfe rubbish" * 50,
    LINE + b"content-length: 2\r\n\r\n{}" * 1 + (LINE + b"content-length: 2\r\n\r\n{}") * 30,
    LINE + b"a b: c\r\n\r\n",
    LINE + b"x: a\x00b\r\n\r\n",
    b"POST http://evil.example/v1/runs HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}",
    b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET * HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"\r\n",
    LINE + b"expect: 100-continue\r\ncontent-length: 5\r\n\r\n",
    b"GET /v1/groups/\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
)


async def test_rubbish_on_the_socket_ends_only_its_own_connection(tmp_path: Path) -> None:
    async with busy_api(tmp_path, seconds=1) as api:
        answers = await asyncio.gather(*(_answers(api.url, raw) for raw in RUBBISH))
        for raw, answer in zip(RUBBISH, answers, strict=True):
            assert b"HTTP/1.1 5" not in answer, (raw[:200], answer[:500])
            assert b"Traceback" not in answer


async def _answers(url: str, raw: bytes) -> bytes:
    """All that comes back until nothing more does: the server hangs up, or waits for more."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        writer.write(raw)
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                return await reader.read()
        return b""
    finally:
        writer.close()
