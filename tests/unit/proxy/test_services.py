"""Services for agents: called over the proxy, limited, stopped with the attempt.

They get the hidden part of the task and a state of their own for each attempt, and run here or in
another interpreter: asked over HTTP as any.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from envserver_records.errors import ConflictError
from envserver_tools.web import WebSettings
from envserver_tools.web import services_of as web_services
from support.cases import cases_of
from support.commands import envserver, read_jsonl
from support.engine_stand_in import ids_of, prompt_ids
from support.proxy_house import House, house
from support.serving import attempt_spec
from support.waiting import PATIENCE, until
from support.websites import KEY, websites

from envserver import Caller, ConfigError, InputError, LimitReached, ServiceError, Services, Task
from envserver.http import requests  # noqa: F401 - as in a server: it has another error of a kind of ours
from envserver.proxy.attempts import ProxyAttempt
from envserver.proxy.hooks import HookFunctions
from envserver.proxy.worker import job_of
from envserver.registry import find, make_environment
from envserver.registry.hosted import HostedServices
from envserver.registry.installed import Interpreter
from envserver.registry.service_host import Request, _Host, send
from envserver.rollout_interface import HookBug, ModelCall
from envserver.rollouts.attempt import ending_limit
from envserver.tools.serving import services_of
from envserver.workers.run import AttemptRun, HttpClient, Job

CASES = cases_of(__file__)

ZOO = Path(__file__).parents[2] / "support" / "web_zoo.py"


class Desk:
    """Agents' runs at a proxy with services, over HTTP."""

    def __init__(self, home: House, workers: HttpClient) -> None:
        self.proxy, self.http = home.proxy, home.http
        self._url, self._workers = home.url, workers

    def open(
        self, seconds: float = 30.0, task: Task | None = None
    ) -> tuple[ProxyAttempt, AttemptRun]:
        spec = attempt_spec(seconds=seconds)
        attempt = self.proxy.open(msgspec.structs.replace(spec, task=task or spec.task))
        job = msgspec.json.decode(job_of(attempt), type=Job)
        return attempt, AttemptRun(job, f"{self._url}/r/{attempt.key}", self._workers, _at_once)


def _at_once() -> Any:
    raise AssertionError("not needed here")


@asynccontextmanager
async def desk(services: Any) -> AsyncIterator[Desk]:
    async with house(services=services) as home, HttpClient() as workers:
        yield Desk(home, workers)


async def test_an_agent_is_told_what_it_did_wrong() -> None:
    async def echo(arguments: dict[str, Any], caller: Caller) -> Any:
        if "bad" in arguments:
            raise InputError("that is bad")
        caller.flag("echoed")
        return [arguments, caller.task.id]

    async with desk({"a/echo": echo}) as place:
        attempt, run = place.open()
        assert await run.call_tool("a/echo", {"x": "ä"}) == [{"x": "ä"}, "add-1"]
        assert attempt.flags == {"echoed"}
        with pytest.raises(InputError, match="that is bad"):
            await run.call_tool("a/echo", {"bad": 1})
        with pytest.raises(InputError, match="Known services: a/echo"):
            await run.call_tool("none", {})
        with pytest.raises(InputError, match="over"):
            await run.call_tool("a/echo", {"x": "y" * (2 << 20)})
        async with place.http.post(f"{run.tools_url}/a/echo", data=b"[1]") as answer:
            assert answer.status == 400
        async with place.http.get(f"{run.tools_url}/a/echo") as answer:
            assert answer.status == 405
        wrong = {"authorization": "Bearer no"}
        async with place.http.post(f"{run.tools_url}/a/echo", json={}, headers=wrong) as answer:
            assert answer.status == 401
        assert attempt.service_failure is None
        attempt.posted = True
        assert ending_limit(attempt) is None


async def test_a_call_ends_with_its_attempt_and_in_its_time() -> None:
    running: set[int] = set()

    async def hangs(arguments: dict[str, Any], caller: Caller) -> Any:
        running.add(arguments["n"])
        try:
            await asyncio.Event().wait()
        finally:
            running.discard(arguments["n"])

    async with desk({"hangs": hangs}) as place:
        attempt, run = place.open()
        calls = [asyncio.create_task(run.call_tool("hangs", {"n": n})) for n in range(12)]
        await until(lambda: len(running) == 8)  # the others wait
        place.proxy.seal(attempt)
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, ServiceError | ConflictError) for error in ended)
        await until(lambda: not running)

        attempt, run = place.open(seconds=0.3)
        with pytest.raises(LimitReached):
            await run.call_tool("hangs", {"n": 1})
        await until(lambda: not running)

        attempt, run = place.open()
        call = asyncio.create_task(run.call_tool("hangs", {"n": 1}))
        await until(lambda: running)
        call.cancel()
        await until(lambda: not running)


@asynccontextmanager
async def web() -> AsyncIterator[tuple[Any, Desk]]:
    async with websites() as sites:
        settings = WebSettings(provider_url=sites.url, allow_private=True)
        async with web_services(settings, key=KEY) as services, desk(services) as place:
            yield sites, place


async def test_tavilys_own_client_works_against_the_server() -> None:
    tavily = pytest.importorskip("tavily", reason="needs tavily-python of the gaia extra")
    async with web() as (sites, place):
        _, run = place.open()
        client = tavily.TavilyClient(run.api_key, api_base_url=f"{run.tools_url}/tavily")
        found = await asyncio.to_thread(client.search, "herons", max_results=3)
        assert found["results"][0]["url"] == f"{sites.url}/page"
        assert "huggingface" not in str(found)
        pages = await asyncio.to_thread(client.extract, [f"{sites.url}/page", f"{sites.url}/none"])
        assert "# Visit 1" in pages["results"][0]["raw_content"]
        assert "404" in pages["failed_results"][0]["error"]
        assert sites.keys == {f"Bearer {KEY}"}


async def test_services_say_what_they_counted_and_a_failing_provider_is_ours() -> None:
    async with web() as (sites, place):
        attempt, run = place.open()
        await run.call_tool("web_search", {"query": "herons"})
        counts = place.proxy.services.counts()  # `/metrics` shows them
        names = ("web_upstream_calls", "web_credits", "web_hits")
        assert [counts[name] for name in names] == [1, 2, 0]
        sites.failing = [401]
        with pytest.raises(ServiceError, match="TAVILY_API_KEY"):
            await run.call_tool("web_search", {"query": "x"})
        attempt.posted = True  # the agent went on as if nothing had been
        with pytest.raises(ServiceError):
            ending_limit(attempt)


@pytest.mark.thorough
async def test_walled_agents_of_a_group_see_one_web_and_no_key(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    async with websites() as sites:
        done = await asyncio.to_thread(
            envserver,
            *("process", "--env", f"{ZOO}:Looker", "--model", "sim", "--env.site", sites.url),
            *("--env.total_steps", "1", "--env.group_size", "4"),
            *("--env.data_path_to_save_groups", groups),
            folder=tmp_path,
        )
        asked = dict(sites.asked)
    assert done.returncode == 0, done.stderr
    assert asked == {"/search": 1, "/page": 1, "/none": 1}
    (group,) = read_jsonl(groups)
    assert group["scores"] == [1.0] * 4  # the environment checks what its agents saw
    assert "web_leak_dropped" in groups.read_text()
    shown = group["envserver"]["services"]["web"]
    assert (shown["mode"], shown["provider"], shown["answers"]) == ("live", "tavily", 3)
    assert KEY not in groups.read_text()


# States, and environments in another interpreter

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = Interpreter(executable=sys.executable, own_path=[], version=VERSION)


def games(folder: Path, kind: str = "Games") -> tuple[str, dict[str, str]]:
    """An environment's reference and config."""
    file = folder / "games.py"
    file.write_text(CASES["code"])
    return f"{file}:{kind}", {"log": str(folder / "log")}


def hosted(reference: str, config: dict[str, str]) -> HostedServices:
    return HostedServices(PYTHON, reference, partial(make_environment, reference, config))


def game(place: Desk, secret: int) -> tuple[ProxyAttempt, AttemptRun]:
    return place.open(seconds=60.0, task=Task(f"game-{secret}", {}, {"secret": secret}))


@asynccontextmanager
async def playing(folder: Path, elsewhere: bool) -> AsyncIterator[Desk]:
    reference, config = games(folder)
    kind = find(reference)
    running = (
        hosted(reference, config).running()
        if elsewhere
        else services_of(kind(kind.Config(**config)))
    )
    async with running as services, desk(services) as place:
        yield place


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_attempts_play_side_by_side_with_own_state(tmp_path: Path, elsewhere: bool) -> None:
    log = tmp_path / "log"
    async with playing(tmp_path, elsewhere) as place:
        one, first = game(place, 1)
        two, second = game(place, 2)
        assert log.read_text().split() == ["up"]  # no request, no state
        assert await first.call_tool("guess", {"number": 2}) == [False, 1]
        assert await second.call_tool("guess", {"number": 2}) == [True, 1]
        many = [first.call_tool("guess", {"number": 1}) for _ in range(20)]
        assert sorted(await asyncio.gather(*many)) == [[True, n] for n in range(2, 22)]
        with pytest.raises(InputError, match="positive number"):
            await first.call_tool("guess", {"number": -1})
        assert await first.call_tool("peek", {"far": False}) == "1"
        with pytest.raises(InputError, match="it is too far"):
            await first.call_tool("peek", {"far": True})
        with pytest.raises(InputError, match="Expected `bool`"):
            await first.call_tool("peek", {"far": 1})
        assert one.flags == {"guessed1", "guessed2", "peeked"}
        assert place.proxy.services.counts() == {"games": 1.0}
        assert (await second.call_tool("pid", {}) == os.getpid()) != elsewhere
        # One that fails, and one that hangs, hold nobody up.
        hanging = asyncio.create_task(first.call_tool("hangs", {}))
        await until(lambda: "hangs" in log.read_text())
        with pytest.raises(ServiceError) as failed:
            await second.call_tool("breaks", {})
        assert "KeyError" in failed.value.message and "hidden" not in failed.value.message
        place.proxy.seal(one)
        await place.proxy.settle(one)
        with pytest.raises((ServiceError, ConflictError)):
            await hanging
        assert elsewhere or "closed game-1" in log.read_text()
        await until(lambda: "closed game-1" in log.read_text())
        assert await second.call_tool("guess", {"number": 3}) == [False, 2]
        await place.proxy.services.close()  # the end of the server
        assert not two.sealed
    words = ["up", "open game-1", "open game-2", "hangs", "stopped", "closed game-1"]
    assert log.read_text().splitlines() == [*words, "closed game-2", "down"]


@pytest.mark.thorough
async def test_a_dying_process_fails_its_rollouts_which_are_tried_again(tmp_path: Path) -> None:
    async with playing(tmp_path, elsewhere=True) as place:
        attempt, run = game(place, 1)
        hanging = asyncio.create_task(run.call_tool("hangs", {}))
        await until(lambda: "hangs" in (tmp_path / "log").read_text())
        os.kill(await run.call_tool("pid", {}), signal.SIGKILL)
        with pytest.raises(ServiceError, match="ended"):
            await hanging
        assert attempt.service_failure is not None
        with pytest.raises(ServiceError, match="ended"):  # its state is lost
            await run.call_tool("guess", {"number": 1})
        _, again = game(place, 1)
        assert await again.call_tool("guess", {"number": 1}) == [True, 1]


@pytest.mark.thorough
async def test_hooks_look_at_calls_in_the_environments_process(tmp_path: Path) -> None:
    flags: list[str] = []

    def call(text: str) -> ModelCall:
        task = Task("t", {}, {"secret": 7})
        caller = Caller(rollout_id="r", group_id="g", task=task, flag=flags.append)
        messages = [{"role": "user", "content": "?"}, {"role": "user", "content": text}]
        return ModelCall(caller=caller, agent=None, messages=messages, tools=[])

    environment = hosted(*games(tmp_path))
    async with environment.running():
        looked = call("hi")
        await environment.hook("on_request", looked)
        assert (looked.reason, looked.refused) == ("shorter", False)
        assert looked.changes == {"messages": [{"role": "user", "content": "hi"}]}
        assert flags == ["looked"]
        with pytest.raises(HookBug, match=r"KeyError: 'k' \(.*games.py:\d+, in Games.on_request"):
            await environment.hook("on_request", call("bug"))


@pytest.mark.thorough
async def test_what_cannot_be_started_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ValueError: no index"):
        async with hosted(*games(tmp_path, "Broken")).running():
            pass
    with pytest.raises(ConfigError, match="None"):
        async with hosted(*games(tmp_path, "None")).running():
            pass


async def test_a_state_whose_answer_crosses_its_cancel_is_left() -> None:
    left = asyncio.Event()

    @asynccontextmanager
    async def state(task: Task) -> AsyncIterator[str]:
        yield "state"
        left.set()

    sent: list[bytes] = []
    writer: Any = SimpleNamespace(write=sent.append)
    nothing: Any = None
    host = _Host(nothing, Services({}, state=state), writer)
    reader = asyncio.StreamReader()
    running = asyncio.create_task(host.run(reader))
    asked: Any = SimpleNamespace(write=reader.feed_data)
    send(asked, Request(1, "open_state", (Task("one", {}),)))
    while not sent:
        await asyncio.sleep(0)
    send(asked, Request(1, "cancel"))
    await asyncio.wait_for(left.wait(), PATIENCE)
    reader.feed_eof()
    await running


# An environment's hooks look at, change and refuse calls; tokens stay those of the engine

SAMPLED = "Hëllo."
NEW = {"role": "assistant", "content": "Nothing to see."}
BODIES: dict[str, dict[str, Any]] = CASES["bodies"]


async def test_the_agent_gets_the_changed_answer_and_the_record_keeps_the_sampled() -> None:
    def change(call: ModelCall) -> None:
        assert call.answer is not None and call.answer["content"] == SAMPLED
        call.change("a guard", answer=NEW)

    async with house(hooks=HookFunctions(None, change)) as made:
        for path, streamed in product(BODIES, (False, True)):
            attempt, _ = made.open()
            body = {"model": "any", **BODIES[path], "stream": streamed}
            async with made.http.post(f"{made.url}/r/{attempt.key}/{path}", json=body) as answer:
                text = await answer.text()
            assert answer.status == 200, path
            assert "Nothing to see." in text, (path, streamed)
            assert SAMPLED not in text and "H\\u00ebllo" not in text
            (call,) = attempt.calls
            assert call.completion_ids.tolist() == ids_of(SAMPLED)
            assert call.message["content"] == "Nothing to see."
            assert call.engine_message["content"] == SAMPLED
            assert "answer_changed" in call.flags and call.delivered == "full"
            assert [(one.at, one.reason, one.changed) for one in call.hooks] == [
                ("answer", "a guard", ["answer"])
            ]


async def test_the_engine_gets_the_changed_request() -> None:
    async def change(call: ModelCall) -> None:
        if call.prompt is not None:
            call.change("another prompt", prompt="changed")
            return
        question = {"role": "user", "content": "changed"}
        call.change("an injected message", messages=[*call.messages, question])

    async with house(hooks=HookFunctions(change, None)) as made:
        for path, body in BODIES.items():
            attempt, _ = made.open()
            status, _ = await made.post(attempt.key, path, {"model": "any", **body})
            assert status == 200, path
            (call,) = attempt.calls
            assert call.messages[-1]["content"] == "changed"
            if path != "v1/completions":
                assert call.prompt_ids.tolist() == prompt_ids(call.messages)
            assert call.exact and "request_changed" in call.flags, path
            assert "answer_changed" not in call.flags


def raises(error: Exception) -> Any:
    def fails(*_: object) -> None:
        raise error

    return fails


CHAT, QUESTION = "v1/chat/completions", BODIES["v1/chat/completions"]


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda call: 1 / 0, "hook_error"),
        (lambda call: call.change("why"), "hook_error"),
        (lambda call: call.change("why", answer=NEW), "hook_error"),
        (lambda call: call.change("why", messages=[{"role": "user", "content": 7}]), "hook_error"),
        (raises(ServiceError("The guard's model is away.")), "service_error"),
        (None, "service_error"),  # a state that cannot be made is no bug of a hook
    ],
)
async def test_a_hook_that_fails_is_a_typed_failure(wrong: Any, kind: str) -> None:
    services = Services({}, state=raises(OSError("no database"))) if wrong is None else None
    hooks = HookFunctions(wrong or (lambda call: None), None)
    async with house(hooks=hooks, services=services) as made:
        attempt, _ = made.open()
        status, answer = await made.post(attempt.key, CHAT, QUESTION)
    assert status >= 500 and answer["error"]["code"] == kind
    assert wrong or status == 502
    assert "database" not in answer["error"]["message"]
    assert attempt.service_failure is not None and attempt.service_failure.kind == kind
    assert ("bug" in attempt.service_failure.detail) == (kind == "hook_error")
    assert not attempt.calls


async def test_a_hook_that_waits_ends_with_its_attempt() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def waits(call: ModelCall) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with house(hooks=HookFunctions(waits, None)) as made:
        attempt, _ = made.open()
        asking = made.asks(attempt.key, CHAT, QUESTION)
        await begun.wait()
        made.proxy.seal(attempt)
        status, _ = await asking
        await ended.wait()
    assert status == 409


ENVIRONMENT = CASES["environment"]


def test_records_say_what_hooks_did(tmp_path: Path) -> None:
    (tmp_path / "hooked.py").write_text(ENVIRONMENT.replace("FAIL", "pass"))
    words = ("--env", "hooked.py", "--model", "sim", "--env.group_size", 1)
    words += ("--sim.solve_probability", 1)
    ran = envserver("process", *words, "--out", "hooked.jsonl", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(tmp_path / "hooked.jsonl")
    assert len(groups) == 3
    for group in groups:
        (rollout,) = group["envserver"]["rollouts"]
        assert rollout["reward"] == 1.0 and rollout["limit"] == "refused"
        assert [(one["at"], one["reason"]) for one in rollout["hooks"]] == [
            ("request", "two are enough"),
            ("answer", "kept secret"),
            ("answer", "kept secret"),
        ]
        assert {"answer_changed", "request_refused"} <= set(rollout["flags"])
        assert group["masks"] == [[-100] * len(tokens) for tokens in group["tokens"]]
