"""The Python API: what commands do, as functions with typed results, from any kind of code."""

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import msgspec
import orjson
import pytest
from envserver_records import Group, pack, unpack
from envserver_records.records import chained, digest_after, is_intact, link_of, sealed
from hypothesis import given, settings
from hypothesis import strategies as st
from support import echo, waiting
from support.api import native_group
from support.commands import read_jsonl, until
from support.echo import IDS, AnyIds, Echo
from support.extent import examples, first_of
from support.in_process import Run
from support.process_tree import alive, alive_with, marked
from support.waiting import PATIENCE

import envserver
from envserver import (
    ConfigError,
    Environment,
    ModelCall,
    NotFoundError,
    SamplingConfig,
)
from envserver.models.catalogue import model_source
from envserver.proxy.attempts import ProxyAttempt
from envserver.registry import find
from envserver.rollouts.provenance import made_with
from envserver.running.delivered import Delivery, LineChain, read_body
from envserver.settings.config import TokensConfig

SIM: dict[str, Any] = {"model": "sim", "env": {"total_steps": 2, "group_size": 2}}


async def test_groups_are_returned_and_their_records_need_no_garbage_collection() -> None:
    def attempts() -> list[ProxyAttempt]:
        return [one for one in gc.get_objects() if type(one) is ProxyAttempt]

    gc.collect()
    before = attempts()  # of other tests
    gc.disable()  # as good as: of old objects it comes once in some 30,000 rollouts
    try:
        result = await envserver.aio.process(Echo, **SIM)
        left = [one.spec.rollout_id for one in attempts() if one not in before]
    finally:
        gc.enable()
    assert (result.delivered, len(result.groups), result.files, left) == (2, 2, {}, [])
    assert all(len(group.trajectories) == 2 for group in result.groups)


def test_groups_can_be_taken_as_they_finish_and_left() -> None:
    endless = {"model": "sim", "env": {"total_steps": 1000, "group_size": 2}}
    taken = []
    for group in envserver.groups(Echo, **endless):
        taken.append(group.group_id)
        if len(taken) == 3:
            break
    assert len(set(taken)) == 3
    assert len(list(envserver.groups(Echo, **SIM))) == 2


class Noting(Echo):
    reasons: ClassVar[list[BaseException]] = []

    @contextlib.asynccontextmanager
    async def services(self) -> Any:
        try:
            yield {}
        except BaseException as error:
            self.reasons.append(error)
            raise


async def test_services_do_not_end_for_an_error_that_their_caller_handles() -> None:
    try:
        raise KeyError
    except KeyError:
        await envserver.aio.process(Noting, **SIM)
    assert not Noting.reasons


class Leaving(Echo):
    """Leaves programs behind, of its own session and without variables."""

    class Config(Environment.Config):
        seconds: str = ""

    def leave(self) -> None:
        subprocess.run(["sh", "-c", f"setsid sleep {self.config.seconds} &"], env={})

    def tasks(self, split: str) -> Any:
        self.leave()
        yield from super().tasks(split)

    @contextlib.asynccontextmanager
    async def services(self) -> Any:
        self.leave()
        yield {}

    def on_request(self, call: ModelCall) -> None:
        self.leave()


class Late(Leaving):
    """Starts a program when its run has ended."""

    class Config(Leaving.Config):
        ended: str = ""

    def tasks(self, split: str) -> Any:
        self.leave()
        ended = Path(self.config.ended)
        until(ended.exists, str)
        try:
            self.leave()
        except RuntimeError as error:
            ended.write_text(str(error))
        yield from super().tasks(split)


Call = Callable[..., contextlib.AbstractAsyncContextManager[None]]


@contextlib.asynccontextmanager
async def blocking(**settings: Any) -> AsyncIterator[None]:
    with contextlib.closing(envserver.groups(Leaving, model="sim", **settings)) as groups:
        next(groups)
        yield


@contextlib.asynccontextmanager
async def iterated(**settings: Any) -> AsyncIterator[None]:
    taken = envserver.aio.groups(Leaving, model="sim", **settings)
    async with contextlib.aclosing(taken) as groups:
        await anext(groups)
        yield


@contextlib.asynccontextmanager
async def cancelled(kind: type[Leaving] = Leaving, **settings: Any) -> AsyncIterator[None]:
    call = asyncio.create_task(envserver.aio.process(kind, model="sim", **settings))
    seconds = settings["env"]["seconds"]
    await waiting.until(lambda: len(alive_with(seconds)) > 1)  # of tasks and services
    yield
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


@contextlib.asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[None]:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(KeyError):
        where = {"store": f"{folder}/groups.db", "server": {"port": 0}}
        async with envserver.aio.serve(Leaving, model="sim", **where, **settings):
            yield
            raise KeyError


@contextlib.contextmanager
def of_the_caller() -> Iterator[list[Any]]:
    """A program of the caller, and a process of multiprocessing."""
    program = subprocess.Popen(["sleep", "3600"])
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(3600,))
    process.start()
    try:
        yield [program.pid, process.pid]
    finally:
        program.kill()
        process.kill()


@pytest.mark.parametrize("call", first_of(cancelled, blocking, iterated, served))
async def test_programs_of_a_run_end_with_it_and_those_of_its_caller_go_on(call: Call) -> None:
    env = {"total_steps": 1000, "group_size": 2}
    one, other = marked(), marked()
    async with contextlib.AsyncExitStack() as stack:
        own = stack.enter_context(of_the_caller())
        async with call(env={**env, "seconds": one}):
            async with call(env={**env, "seconds": other}):
                await waiting.until(lambda: alive_with(one) and alive_with(other))
                own += stack.enter_context(of_the_caller())
            assert alive_with(one) and not alive_with(other)
        assert not alive_with(one) and all(map(alive, own)) and len(own) == 4


async def test_a_program_is_not_started_when_its_run_has_ended(tmp_path: Path) -> None:
    seconds, ended = marked(), tmp_path / "ended"
    async with cancelled(Late, env={"seconds": seconds, "ended": str(ended)}):
        pass
    ended.touch()
    assert "has ended" in until(ended.read_text, str)
    assert not alive_with(seconds)


@pytest.mark.parametrize("api", first_of("envserver.aio", "envserver"))
def test_programs_of_a_run_end_with_its_process(api: str) -> None:
    seconds = marked()
    program = f"""
import asyncio, os, envserver, test_python_api

async def run():
    settings = {{"model": "sim", "env": {{"group_size": 2, "seconds": {seconds!r}}}}}
    groups = {api}.groups(test_python_api.Leaving, **settings)
    await anext(groups) if hasattr(groups, "aclose") else next(groups)
    os.kill(os.getpid(), 9)

asyncio.run(run())
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    killed = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert killed.returncode == -signal.SIGKILL and alive_with(seconds)
    until(lambda: not alive_with(seconds), lambda: seconds)


def test_an_environment_may_be_an_instance_but_not_a_class_without_a_file() -> None:
    result = envserver.process(Echo(Echo.Config(group_size=2)), **SIM)
    assert [group.env for group in result.groups] == ["echo"] * 2
    made = type("Made", (Echo,), {"__module__": "__nowhere__"})
    with pytest.raises(ConfigError, match="not in a file"):
        envserver.process(made, **SIM)


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        ("math", {"env": {"group_sizes": 2}}, r"'env\.group_sizes'\. Did you mean 'env\.group_si"),
        ("/etc/passwd", SIM, "'/etc/passwd' is not a Python file"),
        ("maths", SIM, "Did you mean 'math'"),
    ],
)
def test_mistakes_are_told_first(environment: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, NotFoundError), match=message):
        envserver.process(environment, **settings)


@pytest.mark.thorough
async def test_it_works_inside_a_running_event_loop_and_as_coroutines() -> None:
    assert envserver.process(Echo, **SIM).delivered == 2  # as a notebook calls it
    mix = {"math": 2.0, "router": 1.0}
    result = await envserver.aio.process(mix, model="sim", env={"total_steps": 3, "group_size": 2})
    assert len(result.groups) == 3
    assert {group.env for group in result.groups} <= {*mix}  # the first that are complete
    assert len([group async for group in envserver.aio.groups(Echo, **SIM)]) == 2


async def test_a_cancelled_run_ends() -> None:
    endless = {"model": "sim", "env": {"total_steps": 10_000, "group_size": 2}}
    task = asyncio.create_task(envserver.aio.process(Echo, **endless))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.thorough
def test_the_id_of_a_task_may_be_any_text(run: Run) -> None:
    settings: dict[str, Any] = {"store": "groups.db", "server": {"port": 0}}
    env = {"group_size": 1, "ensure_scores_are_not_same": False}
    ids = list(IDS.values())
    with (
        envserver.serve(AnyIds, model="sim", env=env, **settings) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as http,
    ):

        def got(path: str, **parameters: str) -> Any:
            answer = http.get(path, params=parameters)
            assert answer.status_code == 200, answer.text
            return answer.json()

        listed = got("/v1/tasks", environment="anyids", limit="99")["tasks"]
        assert [task["task_id"] for task in listed] == ids
        order = {"environment": "anyids", "task_ids": ids, "wait_seconds": 60}
        assert http.post("/v1/rollouts", json=order).status_code == 200
        for task_id in ids:
            for group in got("/v1/groups", task=task_id)["groups"]:
                assert group["task_id"] == task_id
                assert got(f"/v1/groups/{group['group_id']}/rollouts/0")
            seen = got("/v1/tasks/seen", text=task_id)["tasks"]
            assert task_id in [one["task_id"] for one in seen]
        assert http.get("/metrics").status_code == 200
    for words in ("html --out html", "traces --out traces", "parquet --out parquet"):
        run(f"export groups.db --to {words}")
    run("export groups.db --to atropos --out out.jsonl")
    assert {group["envserver"]["task_id"] for group in read_jsonl(Path("out.jsonl"))} == set(ids)
    run(f"rescore out.jsonl --env {echo.__file__}:AnyIds --out again.jsonl --processes 1")


@pytest.mark.thorough
def test_what_was_made_is_evaluated_verified_scored_again_and_replayed(tmp_path: Path) -> None:
    made, again = tmp_path / "groups.jsonl", tmp_path / "again.jsonl"
    result = envserver.process("math", out=made, **SIM, tokens={"keep_calls": True})
    assert result.files == {made: 2} and result.groups == []
    assert envserver.verify(made, model="sim").verdict == "exact"
    rescored = envserver.rescore("math", made, again)
    assert (rescored.groups, rescored.changed) == (2, 0)
    rollout = json.loads(made.read_text().splitlines()[0])["envserver"]["rollouts"][0]["rollout_id"]
    assert envserver.replay(made, rollout).same
    evaluation = envserver.evaluate("math", out=tmp_path / "evaluation", **SIM, no_baselines=True)
    assert evaluation.report is not None and (evaluation.folder / "report.json").exists()


def test_answers_are_scored_without_a_model() -> None:
    rows = [
        {"task": {"question": "1 + 1?", "answer": "#### 2"}, "response": f"\\boxed{{{answer}}}"}
        for answer in (2, 3)
    ]
    assert [row["reward"] for row in envserver.score("math", rows).rows] == [1.0, 0.0]


@pytest.mark.thorough
def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import envserver\nprint('begin')\n"
        "r = envserver.process('math', model='sim', env={'total_steps': 1, 'group_size': 2})\n"
        "print(r.delivered)\n"
    )
    done = _python(script, cwd=tmp_path)
    assert done.stdout.split() == ["begin", "1"], done.stderr


TASK = {"question": "1 + 1?", "answer": "#### 2"}
SCORE = (
    f"print(envserver.score('math', [{{'task': {TASK}, 'response': 'three'}}]).rows[0]['reward'])"
)


@pytest.mark.thorough
def test_multiprocessing_stays_as_the_script_set_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import multiprocessing, os, signal, sys
import envserver

def seen():
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return "colorsys" in sys.modules, "ENVSERVER_MINE" in os.environ, bool(blocked)

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["colorsys"])
    {SCORE}
    print(multiprocessing.get_start_method(allow_none=True))
    with context.Pool(1) as pool:
        print(pool.apply(seen))
    {SCORE}
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        {SCORE}
    else:
        print(os.waitpid(child, 0)[1])
""")
    done = _python(script, cwd=tmp_path, env={**os.environ, "ENVSERVER_MINE": "1"})
    kept = "0.0 None (True, True, False) 0.0 0.0 0"
    assert " ".join(done.stdout.splitlines()) == kept, done.stderr


@pytest.mark.thorough
def test_a_process_that_lacks_a_folder_is_told_so(tmp_path: Path) -> None:
    """And a home that cannot be read has no packages."""
    home = tmp_path / "home"
    home.mkdir(mode=0)
    (tmp_path / "here").mkdir()
    program = f"""
import os, tempfile, envserver
from envserver.registry import known_names

def told():
    try:
        {SCORE}
    except envserver.ConfigError as error:
        print(error.message)

known, user = known_names(), os.geteuid()
if user == 0:
    os.seteuid(12345)
os.environ["XDG_DATA_HOME"] = os.environ["CLOSED"]
print(known_names() == known)
os.seteuid(user)
del os.environ["XDG_DATA_HOME"]
found, tempfile._candidate_tempdir_list = tempfile._candidate_tempdir_list, lambda: []
told()
tempfile._candidate_tempdir_list = found
os.rmdir(os.getcwd())
told()
"""
    variables = {**os.environ, "CLOSED": str(home)}
    done = _python("-P", "-c", program, cwd=tmp_path / "here", env=variables)
    assert done.returncode == 0, done.stderr
    packages, temporary, here = done.stdout.splitlines()
    assert packages == "True"
    assert "no folder for temporary files" in temporary
    assert "The working directory of this process has been removed" in here


def _python(*words: Path | str, **options: Any) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, **options)


# Each group says what it was made with, and a changed, removed or moved one is found

OBJECTS = st.dictionaries(st.text(max_size=5), st.integers(0, 9), min_size=1)
LINES = st.lists(OBJECTS, min_size=3, max_size=6)


def file_of(objects: list[dict[str, int]], *, old: int = 0) -> list[bytes]:
    """Lines of a file, the first `old` of them without a link, as an older version wrote them."""
    lines: list[bytes] = []
    for number, one in enumerate(objects):
        line = orjson.dumps(one, option=orjson.OPT_APPEND_NEWLINE)
        if number >= old:
            line = chained(line, digest_after(lines[-1]) if lines else "")
        lines.append(line)
    return lines


def found(lines: list[bytes]) -> list[tuple[str, int | None]]:
    chain, delivery = LineChain(), Delivery()
    for number, line in enumerate(lines, 1):
        chain.check(line, number, delivery)
    return [(one.kind, one.line) for one in delivery.findings]


@settings(max_examples=examples(100))
@given(LINES, st.integers(0, 2), st.data())
def test_what_was_done_to_a_file_is_found_with_its_line(
    objects: list[dict[str, int]], old: int, data: st.DataObject
) -> None:
    lines = file_of(objects, old=old)
    assert found(lines) == []
    assert [orjson.loads(line).keys() - {"chain"} for line in lines] == [o.keys() for o in objects]
    last = len(lines)
    at = data.draw(st.integers(old, last - 1))
    place = data.draw(st.integers(0, len(lines[at]) - 2))
    changed = bytearray(lines[at])
    changed[place] ^= 1
    kinds = found([*lines[:at], bytes(changed), *lines[at + 1 :]])
    # Without its only link, a file is one from before links.
    if old != at or at != last - 1 or link_of(bytes(changed)) is not None:
        assert kinds, "a changed byte is found"
        assert kinds[0][1] in (at + 1, at + 2)
    if at + 1 < last:
        assert found([*lines[:at], *lines[at + 1 :]]) == [("order", at + 1)], "a line is removed"
        unlinked = orjson.dumps(objects[at], option=orjson.OPT_APPEND_NEWLINE)
        assert found([*lines[:at], unlinked, *lines[at + 1 :]]), "a link is removed"
        forged = chained(unlinked, "")
        assert found([*lines[:at], forged, *lines[at + 1 :]]) or forged == lines[at]
    spaced = (json.dumps(orjson.loads(lines[at]), indent=None) + "\n").encode()
    assert ("changed", at + 1) in found([*lines[:at], spaced, *lines[at + 1 :]])


def test_a_stored_group_that_was_changed_is_found() -> None:
    group = sealed(native_group("a"))
    body = pack(group)
    assert is_intact(body) and pack(unpack(body, Group)) == body
    assert read_body("a", "group", 7, body).findings == []
    group.trajectories[0].score.reward = 1.0
    (finding,) = read_body("a", "group", 7, pack(group)).findings
    assert (finding.kind, finding.group_id) == ("changed", "a")
    delivery = read_body("a", "group", 7, pack(msgspec.structs.replace(group, digest="")))
    assert (delivery.findings, delivery.unsealed) == ([], True)


def test_the_digest_of_settings_is_of_those_that_matter() -> None:
    def digest(**env: Any) -> str:
        kind = find("math")
        environment = kind(kind.Config.model_validate(env))
        return str(made_with(environment, SamplingConfig(), TokensConfig())["settings"])

    where = {"data_path_to_save_groups": "/x/y.jsonl", "total_steps": 9}
    assert digest() == digest(**where) != digest(group_size=9)


def test_a_model_is_named_without_its_path() -> None:
    qwen, cached = "Qwen/Qwen3-4B", "/home/me/.cache/models--Qwen--Qwen3-4B/snapshots/0123abc"
    known = {"source": qwen, "revision": "0123abc"}
    assert model_source(None, None) == {}
    assert model_source(qwen, None) == {"source": qwen}
    assert model_source("/home/me/secret/tiny/", None) == {"source": "tiny"}
    assert model_source(cached, None) == known
    assert model_source(qwen, Path(cached)) == known


def test_process_writes_it_and_verify_names_the_changed_line(run: Run, tmp_path: Path) -> None:
    shutil.copy(echo.__file__, tmp_path)
    words = (
        f"process --env {tmp_path}/echo.py:Echo --model sim --sim.latency_seconds 0 "
        f"--env.api_key hush-hush --env.group_size 2 --out {tmp_path}/out.jsonl "
        "--workers.processes 1 --env.total_steps"
    )
    run(f"{words} 2")
    run(f"{words} 4 --resume")
    path = Path("out.jsonl")
    facts = [line["envserver"] for line in read_jsonl(path)]
    assert len(facts) == 4
    told = facts[0]["provenance"]
    assert told["environment"]["name"] == "echo" and told["environment"]["files"] == 1
    assert told["code"]["version"] and len(told["code"]["digest"]) == 64
    assert told["engine"]["server"] and told["engine"]["model"] == "sim"
    assert told["sampling"]["temperature"] == 1.0 and told["policy_versions"] == [-1]
    assert all(one["provenance"] == told for one in facts), "the same code and settings"
    text = path.read_text()
    assert "hush-hush" not in text and str(tmp_path) not in text

    verify = "verify out.jsonl --model sim"
    run(verify)
    lines = path.read_bytes().splitlines(keepends=True)
    changed = re.sub(rb'"reward":[01].0', b'"reward":0.5', lines[1])
    path.write_bytes(b"".join([lines[0], changed, *lines[2:]]))
    said = run(verify, status=1)
    assert f"changed: line 2, {facts[1]['group_id']}" in " ".join(said.out.split())
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    said = run(verify, status=1)
    assert f"order: line 2, {facts[2]['group_id']}" in " ".join(said.out.split())
    run(f"{verify} --digests false")  # an excerpt
