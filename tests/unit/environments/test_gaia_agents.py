"""The agents of `gaia`: what each does with a scripted model, before the proxy, step by step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from envserver_environments.gaia.agents import AgentOptions, solve
from envserver_environments.gaia.agents.connection import Connection
from envserver_environments.gaia.trail import Trail, trail_of
from envserver_tools.calling import Tool, ToolError
from support.sdk_house import SdkHouse, Seat, sim_house
from support.sim import call, said

from envserver import PublicTask

KINDS = ("code", "tools", "plain")
QUESTION = PublicTask("one", {"question": "How much is it?", "files": ["prices.txt"]})
READ = {
    "code": "import os\ntext = open('prices.txt').read()\nprint(text)",
    "more": "sum(int(word) for word in text.split())",
}


@pytest.fixture(scope="module")
def house() -> Iterator[SdkHouse]:
    with sim_house() as house:
        yield house


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "prices.txt").write_text("17 25")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(code: str) -> dict[str, Any]:
    return said("I look.", call("python", {"code": code}))


def coded(code: str) -> dict[str, Any]:
    return said(f"I look.\n<code>\n{code}\n</code>")


def turns_of(kind: str, *codes: str, answer: str = "42") -> list[Any]:
    """What a model says that executes `codes` and then answers."""
    if kind == "code":
        return [*map(coded, codes), coded(f"final_answer({answer!r})")]
    return [*map(python, codes), said(None, call("final_answer", {"answer": answer}))]


def run_of(seat: Seat, seconds: float = 60.0) -> Any:
    return SimpleNamespace(
        base_url=f"{seat.url}/v1",
        api_key=seat.attempt.key,
        model=seat.model,
        deadline=time.time() + seconds,
        log_action=lambda *step, **more: None,
    )


def solved(seat: Seat, seconds: float = 60.0, tools: Any = (), **rules: Any) -> dict[str, Any]:
    return asyncio.run(solve(QUESTION, run_of(seat, seconds), AgentOptions(**rules), tools))


def trail_of_seat(seat: Seat) -> Trail:
    """What the scorer reads of it."""
    last = seat.calls[-1]
    return trail_of([*last.messages, last.message], len(seat.calls))


def assert_one_sequence(seat: Seat) -> None:
    assert len(seat.sequences) == 1
    seat.assert_exact()


@pytest.mark.parametrize("kind", KINDS)
def test_an_ordinary_run_is_solved_told_and_one_sequence(house: SdkHouse, kind: str) -> None:
    turns = turns_of(kind, READ["code"], READ["more"])
    with house.seat(*turns) as seat:
        done = solved(seat, agent=kind)
        assert (done["answer"], done["state"]) == ("42", "answered")
        assert [step["observation"] for step in done["steps"][:2]] == ["17 25", "Value: 42"]
        assert [step["final"] for step in done["steps"]] == [False, False, True]
        assert all(step["tokens"]["completion"] > 0 for step in done["steps"])
        assert "prices.txt" in seat.calls[0].messages[1]["content"]
        assert_one_sequence(seat)
    if kind != "code":  # what is printed is no error whatever it says
        with house.seat(*turns_of(kind, "print('Error: is the title of a book')")) as seat:
            assert solved(seat, agent=kind)["steps"][0]["error"] is None
            assert trail_of_seat(seat).failed == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_model_gets_wrong_is_told_typed_and_still_one_sequence(
    house: SdkHouse, kind: str
) -> None:
    failing = "def broken():\n    return 1 / 0\nprint('first')\nbroken()"
    nonsense = [said("I do not know.")] if kind != "plain" else []
    with house.seat(*nonsense, *turns_of(kind, failing, READ["code"])) as seat:
        done = solved(seat, agent=kind)
        assert done["answer"] == "42"
        *missing, failed, _, _ = done["steps"]
        assert [step["error"]["kind"] for step in missing] == ["parsing"] * len(nonsense)
        assert failed["error"]["kind"] in ("exception", "tool")
        told = failed["observation"]
        assert "first" in told
        assert "in broken\n    return 1 / 0" in told
        assert "ZeroDivisionError" in told
        assert "inside.py" not in told
        trail = trail_of_seat(seat)
        assert (trail.malformed, trail.failed) == (len(nonsense), 1)
        assert "ZeroDivisionError" in trail.observed
        assert_one_sequence(seat)


@pytest.mark.parametrize("kind", KINDS)
def test_every_limit_ends_typed_with_the_steps_so_far(house: SdkHouse, kind: str) -> None:
    for codes, rules, max_turns, ended, steps in (
        ("123", {"max_steps": 2}, None, "max_steps", 2),  # without another call
        ("12", {}, 1, "turns", 1),
        ("12", {"token_budget": 8}, None, "tokens", 0),
    ):
        turns = {"max_turns": max_turns} if max_turns else {}
        with house.seat(*turns_of(kind, *codes), **turns) as seat:
            done = solved(seat, agent=kind, **rules)
            assert (done["answer"], done["state"], len(done["steps"])) == (None, ended, steps)
            assert ended != "max_steps" or len(seat.calls) == 2
    for seconds in (1, 4, 16, 64):  # the call before the step must fit
        with house.seat(*turns_of(kind, "while True: pass", "2")) as seat:
            done = solved(seat, seconds=seconds, agent=kind)
        if done["steps"]:
            break
    assert (done["state"], len(done["steps"])) == ("time", 1)


def test_plans_are_turns_of_the_same_sequence(house: SdkHouse) -> None:
    plans = [said("Read it, then add up.<end_plan>"), said("Answer.<end_plan>")]
    first, second, last = turns_of("code", READ["code"], READ["more"])
    with house.seat(plans[0], first, second, plans[1], last) as seat:
        done = solved(seat, planning_interval=2)
        assert [step["step"] for step in done["steps"]] == [0, 1, 2, 0, 3]
        assert trail_of_seat(seat) == Trail(steps=3, observed=trail_of_seat(seat).observed)
        assert done["answer"] == "42"
        assert_one_sequence(seat)


@pytest.mark.parametrize("kind", KINDS)
def test_given_tools_are_used(house: SdkHouse, kind: str) -> None:
    asked: list[int] = []

    async def price(number: int) -> str:
        asked.append(number)
        if number < 0:
            raise ToolError("there is no such price.")
        return str(number * 21)

    parameters = {"type": "object", "properties": {"number": {"type": "integer"}}}
    described = {"name": "price", "description": "Says it.", "parameters": parameters}
    tool = Tool({"type": "function", "function": parameters | described}, price)
    calls = [-1, "two", 2]
    if kind == "code":
        turns = [coded(f"price({number!r})") for number in calls]
    else:
        turns = [said(None, call("price", {"number": number})) for number in calls]
    with house.seat(*turns, *turns_of(kind)) as seat:
        done = solved(seat, agent=kind, tools=[tool])
        assert asked == [-1, 2]
        assert "no such price" in done["steps"][0]["observation"]
        assert "not valid" in done["steps"][1]["observation"]
        assert "42" in done["steps"][2]["observation"]
        assert done["answer"] == "42"


def test_other_calls_beside_the_answer_are_refused(house: SdkHouse) -> None:
    both = said(None, call("python", {"code": "1"}), call("final_answer", {"answer": "1"}))
    with house.seat(both, *turns_of("tools")) as seat:
        done = solved(seat, agent="tools")
        assert done["answer"] == "42"
        assert done["steps"][0]["error"]["kind"] == "tool"
        assert len(seat.sequences) == 1


def test_answers_come_over_one_connection() -> None:
    seen = []

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            seen.append((self.client_address, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"2\r\nhi\r\n3\r\nyou\r\n0\r\n\r\n")

    with HTTPServer(("127.0.0.1", 0), Answers) as server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.handle_request)  # serves one connection
        connection = Connection(f"http://127.0.0.1:{server.server_port}/v1")
        try:
            answers = [connection.post(body, {}, 60.0) for body in (b"one", b"two")]
        finally:
            connection.close()
    assert answers == [(200, b"hiyou")] * 2
    assert [body for _, body in seen] == [b"one", b"two"] and len({at for at, _ in seen}) == 1
