"""A third round: walled programs, answers, raw HTTP and web pages.

All of it meets the real parts. Nothing may be paid, end what others use, or get an answer of 500.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from envserver_records.records import SandboxSpec
from support.api import REGISTRATION, Api, running_api
from support.cases import cases_of
from support.proxy_house import ASK, House, chat, house
from support.sandboxes import sandboxes
from support.waiting import PATIENCE

import envserver
from envserver import SandboxLimits

from .test_proxy_fields import CHAT, send

TABLES = cases_of(__file__, "programs/third_round.toml")
LONG = {"ZEROS": "0", "NINES": "9", "RANGES": "0-,", "EQUALS": "="}
BODY = json.dumps({"messages": ASK}).encode()


async def exchange(url: str, sent: bytes) -> bytes:
    """Returns what comes back for these bytes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    try:
        writer.write(sent)
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    finally:
        writer.close()


def request(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "connection: close", *headers]
    text = "\r\n".join([*lines, "", ""])
    for name, word in LONG.items():
        text = text.replace(name, word * 5000)
    return text.encode("latin-1") + body


def status(answer: bytes) -> int:
    return int(answer.partition(b" ")[2][:3])


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as made:
        yield made


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "store.db") as served:
        yield served


async def test_no_frame_of_http_reaches_another_rollout(home: House) -> None:
    (victim, client), (attempt, _) = home.open(), home.open()
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    wrong = {}
    for name, row in TABLES["frames"].items():
        expected, *headers = row if isinstance(row[0], int) else (400, *row)
        body = BODY
        if any("chunked" in header for header in headers):
            body = b"f" * 18 + b"\r\n" + BODY if "2^72" in name else chunks
        sent = request(f"/r/{attempt.key}/v1/chat/completions", body, *headers)
        for word, value in (("LENGTH", str(len(BODY))), ("OTHER", victim.key)):
            sent = sent.replace(word.encode(), value.encode())
        answer = await exchange(home.url, sent)
        assert answer.count(b"HTTP/1.1 ") == 1, name
        if status(answer) != expected:
            wrong[name] = status(answer)
    assert not wrong
    assert not victim.calls
    assert (await chat(client)).message.content


async def test_no_path_leads_to_another_rollout(home: House) -> None:
    (victim, client), (attempt, _) = home.open(), home.open()
    key = victim.key
    paths = [f"../{key}/v1/models", f"%2e%2e/{key}/v1/models", f"..%2f{key}/result"]
    paths += ["v1//models", "v1/models%00", "V1/MODELS", "tokenize", "load_lora_adapter", "pause"]
    for path in paths:
        for method in ("GET", "POST"):
            sent = request(f"/r/{attempt.key}/{path}", b"", method=method)
            assert status(await exchange(home.url, sent)) == 404, path
    for stranger in (key[:-1], key + "x", key.swapcase(), "", "%00", "*", "a" * 5000):
        sent = request(f"/r/{stranger}/v1/models", b"", method="GET")
        assert status(await exchange(home.url, sent)) == 404, stranger
    assert (await chat(client)).message.content


async def test_pipelined_calls_and_kept_connections_pass_no_limit(home: House) -> None:
    attempt, _ = home.open(max_turns=2)
    one = request(f"/r/{attempt.key}/v1/chat/completions", BODY, f"content-length: {len(BODY)}")
    kept = one.replace(b"connection: close", b"connection: keep-alive")
    answer = await exchange(home.url, kept * 11 + one)
    assert answer.count(b"HTTP/1.1 200") == len(attempt.calls) == 2
    home.proxy.seal(attempt)
    assert status(await exchange(home.url, one)) == 409


@pytest.mark.parametrize("name", TABLES["fields"])
def test_no_such_field_reaches_the_engine(name: str) -> None:
    path, body = TABLES["fields"][name]
    answered, _, asked = send(path, {"messages": ASK} | body if path == CHAT else body)
    if name == "a priority in wide letters":  # which no engine knows
        assert answered == 200 and not asked[0].keys() & body.keys()
    else:
        assert (answered, asked) == (400, [])


async def test_no_program_gets_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLOVER", "plover-77")
    (tmp_path / "secret").write_text("plover-77")
    limits = SandboxLimits(
        wall_seconds=4, cpu_seconds=1, memory_mb=128, disk_mb=16, inodes=512, processes=16,
        open_files=64, output_kb=16,
    )  # fmt: skip
    async with sandboxes("namespace") as opened:

        async def said(source: str) -> bytes:
            async with opened.open(SandboxSpec(limits=limits)) as box:
                program = f"SECRET = {str(tmp_path / 'secret')!r}\n{source}"
                ran = await box.run_python(program, limits=limits)
                after = await box.run_python("print('fine')", limits=limits)
                assert after.stdout == b"fine\n" or ran.killed_by, source
                return ran.stdout + after.stdout

        programs = TABLES["sandboxed"]
        outputs = await asyncio.gather(*map(said, programs.values()))
    told = zip(programs, outputs, strict=True)
    assert [name for name, text in told if b"GOT" in text or b"plover" in text] == []


def code_rows() -> list[dict[str, Any]]:
    function = {
        "instruction": "i",
        "entry_point": "f",
        "code": "def f(x):\n    return [x, x + 1]",
        "testcase": ["assert f(1) == [1, 2]", "assert f(2) == [2, 3]", "assert len(f(3)) == 2"],
    }
    pairs = [{"input": "1", "output": "17"}, {"input": "2", "output": "34"}]
    return [
        {"task": task, "response": f"```python\n{source}\n```"}
        for source in TABLES["solutions"].values()
        for task in (function, {"instruction": "i", "tests": pairs})
    ]


def math_rows() -> list[dict[str, Any]]:
    texts = [*TABLES["math"], r"\boxed{" + "(" * 5000 + "41" + ")" * 5000 + "}"]
    texts += [r"\boxed{" + r"\frac{1}{" * 3000 + "2" + "}" * 3000 + "}"]
    texts += [r"\boxed{" + "9**" * 200 + "9}"]
    return [{"task": {"question": "q", "answer": "#### 42"}, "response": text} for text in texts]


@pytest.mark.parametrize("environment", ["code", "math", *TABLES["answers"]])
def test_nothing_is_paid_that_is_not_the_answer(environment: str) -> None:
    """Solutions that compute nothing, formulas, and texts that name several answers."""
    if environment in ("code", "math"):
        rows = code_rows() if environment == "code" else math_rows()
    else:
        answers = TABLES["answers"][environment]
        texts = [one if isinstance(one, str) else one[0] * one[1] for one in answers["texts"]]
        rows = [{"task": answers["task"], "response": text} for text in texts]
    assert [
        (row["response"][:60], one["reward"], one["error"])
        for row, one in zip(rows, envserver.score(environment, rows, processes=1).rows, strict=True)
        if one["reward"] or one["error"]
    ] == []


async def test_no_header_makes_the_api_fail(api: Api) -> None:
    for path in ("/register", "/v1/environments/x/groups", "/v1/runs"):
        for name, header in TABLES["headers"].items():
            answer = await exchange(api.url, request(path, b"{}", header))
            assert 200 <= status(answer) < 500, (path, name)


async def test_no_page_of_another_origin_changes_anything(api: Api) -> None:
    body = json.dumps(REGISTRATION).encode()
    for header in TABLES["origins"]:
        sent = request("/register", body, f"content-length: {len(body)}", header)
        answer = await exchange(api.url, sent)
        assert status(answer) == 403, header
        assert b"allow-origin" not in answer
    assert (await api.get("/info"))["batch_size"] == -1
