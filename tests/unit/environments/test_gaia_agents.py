"""The agents of `gaia`: what each does with a scripted model, step by step; and their interpreter:
plain Python, whatever the code does."""

import asyncio
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from envserver_environments.gaia.agents import AgentOptions, solve
from envserver_environments.gaia.interpreter import process as interpreters
from envserver_environments.gaia.interpreter.process import Interpreter, Outcome
from envserver_environments.gaia.scoring import Trail, trail_of
from envserver_records.tasks import Json
from envserver_tools.calling import Tool, ToolError
from support.cases import cases_of
from support.sdk_house import SdkHouse, Seat, sim_house
from support.sim import call, said

from envserver import PublicTask

CASES = cases_of(__file__)

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


def python(code: str) -> Json:
    return said("I look.", call("python", {"code": code}))


def coded(code: str) -> Json:
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


def solved(seat: Seat, seconds: float = 60.0, tools: Any = (), **rules: Any) -> Json:
    return asyncio.run(solve(QUESTION, run_of(seat, seconds), AgentOptions(**rules), tools))


def trail_of_seat(seat: Seat) -> Trail:
    """What the scorer reads of it."""
    last = seat.calls[-1]
    return trail_of([*last.messages, last.message], len(seat.calls))


def assert_one_sequence(seat: Seat) -> None:
    assert len(seat.sequences) == 1
    seat.assert_exact()


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


@pytest.fixture
def interpreter() -> Iterator[Interpreter]:
    started = Interpreter({"double": lambda value: value * 2})
    yield started
    started.finish()


def test_state_values_and_real_python(interpreter: Interpreter) -> None:
    interpreter.run("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\np = P(3)")
    assert interpreter.run("print('seen'); p") == Outcome(printed="seen\n", value="P(x=3)")
    assert interpreter.run("p.x += 1") == Outcome()
    assert interpreter.run("import pickle; pickle.loads(pickle.dumps(p)) == p").value == "True"
    assert interpreter.run("def f(n):\n    yield from range(n)\nsum(f(p.x))").value == "6"
    pool = (
        "import multiprocessing as m\nwith m.Pool(2) as pool:\n    a = pool.map(abs, [-1, -2])\na"
    )
    assert interpreter.run(pool).value == "[1, 2]"
    assert interpreter.run("import asyncio\nasync def g(): return 5\nasyncio.run(g())").value == "5"


def test_all_that_is_printed_is_seen_by_whomever(interpreter: Interpreter) -> None:
    code = "import os, subprocess\nprint('a')\nsubprocess.run(['echo', 'b'])\nos.write(1, b'c\\n')"
    assert interpreter.run(code).printed == "a\nb\nc\n"
    long = interpreter.run("for n in range(10**4): print(n)").printed
    assert len(long) < 11_000
    assert long.startswith("0\n1\n")
    assert "left out" in long
    assert long.endswith("9999\n")


def test_errors_are_outcomes_without_our_frames(interpreter: Interpreter) -> None:
    interpreter.run("kept = 1")
    for code, kind in CASES["errors"].items():
        outcome = interpreter.run(code)
        assert (outcome.trouble, outcome.kind) == ("exception", kind), code
        assert "inside.py" not in outcome.error
        assert interpreter.run("kept").value == "1"


@pytest.mark.parametrize(("code", "kept"), CASES["endless"])
def test_time_is_kept_from_outside(
    interpreter: Interpreter, code: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreters, "INTERRUPT_SECONDS", 60.0 if kept else 0.3)
    interpreter.run("kept = 1")
    interpreter.step_seconds = 0.3
    outcome = interpreter.run(code)
    interpreter.step_seconds = 60.0
    assert (outcome.trouble, outcome.kind) == ("timeout", "timeout")
    assert ("Variables are kept" in outcome.error) == kept
    assert (interpreter.run("kept").value == "1") == kept


def test_a_crash_is_an_outcome_and_the_next_step_goes_on(interpreter: Interpreter) -> None:
    for code, how in CASES["crashes"]:
        outcome = interpreter.run(code)
        assert outcome.trouble == "died"
        assert how in outcome.error
        assert "last words" in outcome.printed
        assert interpreter.run("1 + 1").value == "2"


def test_forks_do_not_speak_for_it_and_tools_run_outside(interpreter: Interpreter) -> None:
    assert interpreter.run("import os\nos.fork() and 'parent'").value == "parent"
    assert interpreter.run("2").value == "2"
    failed = interpreter.run("double(None)")
    assert "RuntimeError: TypeError" in failed.error
    # The answer ends a step.
    code = "try:\n    final_answer([1.0, 'b'])\nexcept Exception:\n    pass\nprint('never')"
    assert interpreter.run(code) == Outcome(answer="1, b")


def test_it_can_be_closed_from_another_thread_and_leaves_nothing(interpreter: Interpreter) -> None:
    pid = int(interpreter.run("import os; os.getpid()").value or 0)
    threading.Timer(0.3, interpreter.close).start()
    assert interpreter.run("import time; time.sleep(60)").trouble == "died"
    assert interpreter.run("1").trouble == "died"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_that_starts_too_late_is_no_outcome_and_is_replaced(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = interpreters.live

    def live_late(channel: socket.socket, output: int) -> NoReturn:
        """Starts when nobody waits for it any more."""
        given_up = select.poll()
        given_up.register(channel, select.POLLRDHUP)
        given_up.poll()
        live(channel, output)

    with monkeypatch.context() as patched:
        patched.setattr(interpreters, "START_SECONDS", 0.01)
        patched.setattr(interpreters, "live", live_late)
        assert interpreter.run("6 * 7").trouble == "died"
    assert interpreter.run("6 * 7").value == "42"
