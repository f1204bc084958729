"""Sandboxes of other machines: what a client gets, what it may not, and what ends with whom.

That every promise of a sandbox holds there, too, is shown by `test_sandbox.py` ("elsewhere").
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from envserver_records.errors import ConfigError, SandboxLost, SandboxUnavailable
from envserver_records.framing import FrameReader, frame
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr
from support.extent import examples
from support.process_tree import alive_with, children_of, marked
from support.sandboxes import sandbox_machine
from support.waiting import PATIENCE, until

from envserver import ExecResult, InputError, Sandbox, SandboxConfig, SandboxLimits, SandboxSpec
from envserver.cli.console import Console
from envserver.cli.doctor_command import look_at_machines, show_machines
from envserver.http.access import create_token
from envserver.running.hosting import machine_numbers
from envserver.running.sandbox_serving import ServedSandboxes
from envserver.sandbox import machines as machines_module
from envserver.sandbox.client import SandboxClient
from envserver.sandbox.machine_messages import PATH, Load
from envserver.sandbox.machines import Machine, Machines, MachineSandbox, machines_at
from envserver.sandbox.maker import RemoteAddress
from envserver.sandbox.requests import Exec
from envserver.sandbox.service import SandboxService
from envserver.sandbox.source import CustomSandboxes
from envserver.sandbox.supervisor import READY

pytestmark = pytest.mark.asyncio(loop_scope="module")
PLAIN = SandboxSpec()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedSandboxes]:
    """A machine with a token for each role, two places and room for one program."""
    tokens = tmp_path_factory.mktemp("machine") / "tokens.yaml"
    TOKENS.update(
        environment=create_token(tokens, "runner", "environment")[0],
        trainer=create_token(tokens, "trainer", "trainer")[0],
    )
    async with sandbox_machine(tokens, concurrent=2, room=1, max_memory_mb=600) as machine:
        yield machine


TOKENS: dict[str, str] = {}


@pytest_asyncio.fixture(loop_scope="module")
async def boxes(served: ServedSandboxes) -> AsyncIterator[Machines]:
    async with client_of(served) as machines:
        yield machines


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines_module, "PATIENCE_SECONDS", 0.0)


def client_of(*machines: ServedSandboxes, token: str | None = None) -> Machines:
    urls = tuple(machine.url for machine in machines)
    return Machines(RemoteAddress(urls, TOKENS.get("environment", "") if token is None else token))


def stay(box: Sandbox, mark: str) -> asyncio.Task[ExecResult]:
    """Runs a program that `alive_with(mark)` finds, until it is ended."""
    return asyncio.create_task(box.exec(["sleep", mark]))


async def test_numbers_come_as_they_were_counted(served: ServedSandboxes, boxes: Machines) -> None:
    before = served.machine.cpu_seconds
    async with boxes.open(SandboxSpec(files={"in/a.txt": b"6 7"})) as box:
        code = "a, b = open('in/a.txt').read().split(); print(int(a) * int(b))"
        result = await box.run_python(code)
        assert (result.stdout, result.ok) == (b"42\n", True)
        assert result.usage.cpu_seconds > 0 and result.usage.peak_memory_mb > 1
        killed = await box.exec(
            ["sh", "-c", "while :; do :; done"], limits=SandboxLimits(cpu_seconds=0.2)
        )
        assert killed.killed_by == "cpu"
        total = await box.total()
        spent = result.usage.cpu_seconds + killed.usage.cpu_seconds
        assert total.executions == 2 and total.killed == {"cpu": 1}
        assert total.cpu_seconds == pytest.approx(spent)
    assert served.machine.cpu_seconds - before == pytest.approx(spent)
    assert served.machine.load.open == 0


async def test_a_program_is_talked_to_and_ends_with_its_sandbox(boxes: Machines) -> None:
    mark = marked()
    source = 'while read line; do echo "<$line>"; done; sleep "$0"'
    async with (
        boxes.open(PLAIN) as box,
        box.start(["sh", "-c", source, mark], env={}, wall_seconds=3600.0) as program,
    ):
        reader, writer = await asyncio.open_unix_connection(sock=program.stdio)
        for word in (b"one", b"two"):
            writer.write(word + b"\n")
            assert await reader.readline() == b"<" + word + b">\n"
        assert alive_with(mark)
        writer.close()
    assert program.result is not None and program.result.killed_by == "cancelled"
    await until(lambda: not alive_with(mark))


async def test_what_ends_by_itself_says_how(boxes: Machines) -> None:
    async with (
        boxes.open(PLAIN) as box,
        box.start(["sh", "-c", "echo bye; exit 3"], env={}, wall_seconds=60.0) as program,
    ):
        reader, writer = await asyncio.open_unix_connection(sock=program.stdio)
        assert await reader.read(-1) == b"bye\n"
        program.hung_up = True
        writer.close()
    assert program.result is not None and program.result.exit == 3


@pytest.mark.parametrize("is_interactive", [False, True])
async def test_sandboxes_end_with_their_client(
    served: ServedSandboxes, is_interactive: bool
) -> None:
    async def run_interactive(box: MachineSandbox, mark: str) -> None:
        async with box.start(["sleep", mark], env={}, wall_seconds=3600.0) as program:
            await asyncio.get_running_loop().sock_recv(program.stdio, 1)

    mark = marked()
    async with client_of(served) as gone, gone.open(PLAIN) as box:
        running: asyncio.Task[Any]
        if is_interactive:
            running = asyncio.create_task(run_interactive(box, mark))
        else:
            running = stay(box, mark)
        await until(lambda: alive_with(mark))
        assert isinstance(box._websocket, aiohttp.ClientWebSocketResponse)
        transport = box._websocket.get_extra_info("socket")
        transport.shutdown(2)  # as when its process is killed: no word is said
        with pytest.raises(SandboxLost):
            await running
    await until(lambda: not alive_with(mark) and served.machine.load.open == 0)


async def test_programs_sandboxes_wait_in_order(served: ServedSandboxes, boxes: Machines) -> None:
    ended = []

    async def use(number: int) -> None:
        async with boxes.open(PLAIN) as box:
            assert (await box.run_python("pass")).ok
            ended.append(number)

    async with boxes.open(PLAIN) as box:
        holding = stay(box, mark := marked())  # takes the only room
        await until(lambda: alive_with(mark))
        others = []
        for number in range(3):
            others.append(asyncio.create_task(use(number)))
            # One has the second place and waits for room.
            await until(lambda: served.machine.load.queued == 1)
            await until(lambda: served.machine.load.waiting == len(others) - 1)
        assert served.machine.load.running == 1 and not ended
        holding.cancel()
        await asyncio.gather(holding, *others, return_exceptions=True)
    assert ended == [0, 1, 2]


@pytest.mark.parametrize(
    "limits",
    [
        SandboxLimits(memory_mb=601),
        SandboxLimits(wall_seconds=float("nan")),
        SandboxLimits(output_kb=1 << 20),
        SandboxLimits(input_kb=1 << 20),
    ],
)
async def test_limits_above_its_own_are_refused(boxes: Machines, limits: SandboxLimits) -> None:
    with pytest.raises(InputError, match=r"memory_mb|wall_seconds|put_kb"):
        async with boxes.open(SandboxSpec(limits=limits)):
            pass


@pytest.mark.usefixtures("impatient")
async def test_a_token_of_the_role_environment_is_needed(
    served: ServedSandboxes, capsys: pytest.CaptureFixture[str]
) -> None:
    for token in ("", "evs_0123456789_wrong", TOKENS["trainer"]):
        machines_at.cache_clear()
        async with client_of(served, token=token) as machines:
            with pytest.raises(ConfigError, match="refuses the access token"):
                await machines.check()
            with pytest.raises(SandboxUnavailable, match="refuses the access token"):
                async with machines.open(PLAIN):
                    pass
        assert not token or token not in repr(machines._address)
    machines_at.cache_clear()
    told = capsys.readouterr()
    assert all(token not in told.out + told.err for token in TOKENS.values())


@asynccontextmanager
async def connected(served: ServedSandboxes) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    headers = {"authorization": f"Bearer {TOKENS['environment']}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.ws_connect(served.url + PATH) as websocket,
    ):
        yield websocket


@settings(max_examples=examples(40))
@given(st.binary(max_size=200) | st.binary(max_size=200).map(frame))
@pytest.mark.usefixtures("impatient")
async def test_nonsense_ends_only_its_own_connection(served: ServedSandboxes, data: bytes) -> None:
    async with connected(served) as websocket:
        await websocket.send_bytes(data)
    await until(lambda: served.machine.load.open == 0)


async def test_a_client_has_only_what_it_opened(served: ServedSandboxes) -> None:
    """Nothing in a request names a sandbox, and nothing is answered before one is open."""
    async with connected(served) as websocket:
        await websocket.send_bytes(asked(1, "total", None))
        answer = msgspec.msgpack.decode((await websocket.receive_bytes())[4:])
        assert answer[:2] == [1, "error"] and "begin with `open`" in answer[2]["message"]


@asynccontextmanager
async def opened(
    served: ServedSandboxes, spec: SandboxSpec
) -> AsyncIterator[tuple[aiohttp.ClientWebSocketResponse, AsyncIterator[list[Any]]]]:
    """Yields the connection of an open sandbox, and the answers that come."""
    async with connected(served) as websocket:
        reader = FrameReader(1 << 20)

        async def answers() -> AsyncIterator[list[Any]]:
            async for message in websocket:
                for body in reader.feed(message.data):
                    yield msgspec.msgpack.decode(body)

        coming = answers()
        await websocket.send_bytes(asked(0, "open", spec))
        assert (await anext(coming))[:2] == [0, "ok"]
        yield websocket, coming


def asked(number: int, word: str, body: object) -> bytes:
    return frame(msgspec.msgpack.encode((number, word, body)))


def sleeping(seconds: str, stdin: bytes = b"") -> Exec:
    return Exec(argv=["sleep", seconds], stdin=stdin, cwd="/work", env=None, limits=None)


@pytest.mark.thorough
async def test_a_request_that_is_given_up_at_once_is_answered(served: ServedSandboxes) -> None:
    async with opened(served, SandboxSpec()) as (websocket, answers), asyncio.timeout(PATIENCE):
        await websocket.send_bytes(asked(1, "exec", sleeping(marked())) + asked(2, "cancel", 1))
        number, word, value = await anext(answers)
        assert (number, word, value["kind"]) == (1, "error", "cancelled")


@pytest.mark.thorough
async def test_requests_that_wait_do_not_fill_the_machines_memory(
    served: ServedSandboxes, boxes: Machines
) -> None:
    small = SandboxLimits(disk_mb=1, input_kb=1024)
    async with (
        boxes.open(PLAIN) as box,
        opened(served, SandboxSpec(limits=small)) as (websocket, answers),
    ):
        holding = stay(box, mark := marked())  # takes the only room
        await until(lambda: alive_with(mark))
        programs = [asked(n, "exec", sleeping("0", bytes(1 << 20))) for n in range(1, 11)]
        sending = asyncio.create_task(
            websocket.send_bytes(b"".join([*programs, asked(11, "total", None)]))
        )
        await until(lambda: served.machine.load.queued >= 4)
        holding.cancel()
        order = [(await anext(answers))[0] for _ in range(11)]
        await sending
        assert order.index(11) > 3, "it was read before there was memory for what stood before it"


@pytest.mark.usefixtures("impatient")
async def test_what_a_lost_machine_had_is_lost_and_the_next_is_made_elsewhere(
    served: ServedSandboxes,
) -> None:
    async with sandbox_machine(concurrent=2) as other, client_of(served, other) as machines:
        await machines.look()
        async with machines.open(PLAIN) as first, machines.open(PLAIN) as second:
            assert {first.url, second.url} == {served.url, other.url}, "the emptiest is taken"
            there = first if first.url == other.url else second
            here = second if there is first else first
            running = stay(there, mark := marked())
            await until(lambda: alive_with(mark))
            await other.close()
            with pytest.raises(SandboxLost, match=other.url):
                await running
            with pytest.raises(SandboxLost):
                await there.total()
            assert (await here.run_python("pass")).ok
        async with machines.open(PLAIN) as third:
            assert third.url == served.url
        known = {one.url: one for one in machines.known}
        assert known[other.url].is_aside and known[other.url].counts["lost"] == 1


@pytest.mark.thorough
@pytest.mark.usefixtures("impatient")
async def test_a_machine_that_drains_takes_no_more(served: ServedSandboxes) -> None:
    async with sandbox_machine(concurrent=2) as other, client_of(other) as machines:
        async with machines.open(PLAIN) as box:
            draining = asyncio.create_task(other.drain())
            await asyncio.sleep(0)
            with pytest.raises(SandboxUnavailable, match="shutting down"):
                async with machines.open(PLAIN):
                    pass
            assert (await box.run_python("pass")).ok and not draining.done()
        await draining


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50), st.integers(0, 50)), min_size=1))
async def test_the_machine_with_most_free_room_is_first(loads: list[tuple[int, int, int]]) -> None:
    machines = []
    for places, taken, waiting in loads:
        machine = Machine("http://machine")
        machine.answered(Load(sandboxes=places, open=taken, waiting=waiting))
        machines.append(machine)
    chosen = min(machines, key=lambda one: one.fullness)
    assert chosen.fullness == min((taken + waiting) / places for places, taken, waiting in loads)
    chosen.open += 1000  # what this process asked for since counts, too
    assert chosen.fullness > 1


@pytest.fixture(autouse=True)
def _forget_machines() -> Iterator[None]:
    yield
    machines_at.cache_clear()


async def test_doctor_and_metrics_show_the_machines(
    served: ServedSandboxes, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = "http://127.0.0.1:9"
    config = SandboxConfig(
        remote=f"{served.url},{gone}", remote_token=SecretStr(TOKENS["environment"])
    )
    here, there = await look_at_machines(config)
    assert here.load == served.machine.load and there.load is None and there.problem
    show_machines(Console(), [here, there])
    told = capsys.readouterr().out
    assert f"{served.url}: works ({here.load.backend}), 0 of 2 sandboxes open" in told
    assert f"{gone}: does not work: it cannot be reached" in told

    numbers = await machine_numbers(machines_at(config.remote_urls))
    assert numbers["sandbox_machine_up"] == {served.url: True, gone: False}


async def test_programs_reach_the_proxy_of_their_client(boxes: Machines) -> None:
    """So `egress` works: rules and record stay where the attempt is."""
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n"))
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 200_000)
        await writer.drain()
        writer.close()

    code = "import urllib.request as u; print(len(u.urlopen('http://api.test/').read()))"
    async with boxes.open(PLAIN) as box:
        server = await box.lead_out(serve)
        if server is None:
            pytest.skip(f"programs have no network of their own in {box.isolation}")
        for _ in range(3):
            result = await box.run_python(code)
            assert result.stdout == b"200000\n", result.stderr
        server.close()
    assert asked == [b"GET http://api.test/ HTTP/1.1\r\n"] * 3


@pytest.mark.thorough
async def test_more_stand_ready_while_more_are_asked_for() -> None:
    """`sandboxes serve` keeps up to 16; here 8."""
    config = SandboxConfig(backend="namespace", concurrent=32, warm=8)
    async with SandboxService(config) as service, SandboxClient(service.address) as client:
        assert service._process is not None
        supervisor = service._process.pid

        def living() -> int:
            zygotes = [zygote for outer in children_of(supervisor) for zygote in children_of(outer)]
            return sum(len(children_of(zygote)) for zygote in zygotes)

        async with client.open(PLAIN):
            await until(lambda: living() == 1 + READY)
        async with AsyncExitStack() as stack:
            await asyncio.gather(*(stack.enter_async_context(client.open(PLAIN)) for _ in range(8)))
        await until(lambda: living() == 8)


class Cloud:
    """A user's class, whose sandboxes lack `read`."""

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Any]:
        yield SimpleNamespace(id="a", isolation="cloud")


async def test_a_sandbox_whose_class_lacks_a_method_is_lost() -> None:
    async with CustomSandboxes(f"{__name__}:Cloud") as made, made.open(PLAIN) as sandbox:
        with pytest.raises(SandboxLost, match="'read'"):
            await sandbox.read("x")
