"""PyPI's atroposlib against our server: its HTTP tests, BaseEnv, trainers' loops, its data tools.

All of it runs unchanged in `.venv-atropos` (`make atropos-peer`).
"""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from envserver_local.simulated import ASSETS
from support.api import api_process, running_api
from support.commands import free_port, running, until
from support.foreign_trainers import printed, told
from support.http_stand_in import standing_in
from support.waiting import PATIENCE


@contextlib.contextmanager
def answering(answer: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """The base URL of an engine; `answer` gets the body of each chat request."""

    def told(path: str, headers: Message, body: bytes) -> tuple[int, bytes]:
        said = {"role": "assistant", "content": answer(json.loads(body))}
        choice = {"index": 0, "message": said, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        facts = {"id": "x", "object": "chat.completion", "created": 0, "model": "x"}
        return 200, json.dumps({**facts, "choices": [choice], "usage": usage}).encode()

    with standing_in(told) as url:
        yield f"{url}/v1"


DUEL = Path(__file__).parents[1] / "support/duel.py"
PEER = Path(__file__).parents[1] / "support" / "atropos_peer"
FEW = ["--rollouts.max_queued_groups", 16]
"""Groups that are made before anybody asks for them."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that transformers can load: that of the simulated engine."""
    return Path(shutil.copytree(ASSETS, tmp_path_factory.mktemp("tokenizer") / "sim"))


def test_its_own_http_tests(atropos_python: Path, tmp_path: Path) -> None:
    port = free_port()
    found = "import atroposlib; print(list(atroposlib.__path__)[0])"
    library = subprocess.check_output([atropos_python, "-c", found], text=True, cwd=tmp_path)
    folder = Path(library.strip()) / "tests"
    names = ("legacy", "messages_handling", "compression")
    tests = [folder / f"test_api_{name}.py" for name in names]
    command = [atropos_python, "-m", "pytest", "-v", *tests, "--rootdir", folder]
    command += ["-p", "no:cacheprovider", "-p", "point_at_ours"]
    env = os.environ | {"PYTHONPATH": str(PEER), "ENVSERVER_URL": f"http://127.0.0.1:{port}"}
    with api_process(tmp_path / "store.db", port):
        said = printed(*command, folder=tmp_path, env=env)
    assert all(f"{path.name}::" in said for path in tests)


def trained_by(python: Path, url: str, rows: int, batches: int, *more: str) -> dict[str, Any]:
    """What atroposlib's example trainer got from a server."""
    found: dict[str, Any] = told(python, PEER / "trainer.py", url, rows, batches, *more)
    return found


@contextmanager
def environment(
    python: Path, api: str, engine: str, tokenizer: Path, folder: Path, *more: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The peer's environment in `serve` mode."""
    command = [python, str(PEER / "environments.py"), "serve"]
    command += ["--env.rollout_server_url", api, "--env.tokenizer_name", str(tokenizer)]
    command += ["--openai.base_url", engine, "--openai.model_name", "sim", *more]
    with logged(folder / "managed.log", *command) as process:
        yield process


@contextmanager
def logged(log: Path, *command: object) -> Iterator[subprocess.Popen[bytes]]:
    """A program of the peer, which writes to `log`."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=log.parent,
            env=os.environ | OFFLINE,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(PATIENCE)


def test_its_trainer_is_fed_by_our_rollouts_and_by_its_own_environment(
    atropos_python: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """All on one server, whose model its environment samples from token by token."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = ["serve", "--env", "math", "--model", "sim", "--port", port, "--store", "s.db"]
    command += FEW
    with running(*command, folder=tmp_path) as server:
        engine, key = server.wait_for(r"(http://\S+/r/(\S+)/v1)").groups()
        trained = trained_by(atropos_python, url, 8, 2)
        assert trained["rows"] == 8 * trained["batches"]
        assert trained["trained"] > trained["rows"]
        more = ["--openai.server_type", "vllm", "--openai.tokenizer_name", str(tokenizer)]
        more += ["--openai.api_key", key]
        with environment(atropos_python, url, engine, tokenizer, tmp_path, *more):
            groups: list[dict[str, Any]] = []
            own = until(
                lambda: next_of_an_environment(url, groups),
                lambda: (tmp_path / "managed.log").read_text()[-2000:],
                alive=server.process,
            )
    for tokens, masks, logprobs in zip(
        own["tokens"], own["masks"], own["inference_logprobs"], strict=True
    ):
        assert len(tokens) == len(masks) == len(logprobs)
        assert all(
            (logprob <= 0) == (mask != -100) for mask, logprob in zip(masks, logprobs, strict=True)
        )
    ours = [group for group in groups if group["env_id"] is None]
    assert ours
    assert all(isinstance(group["inference_logprobs"], list) for group in ours)


def test_its_trainer_trains_two_players_by_own_score(atropos_python: Path, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = ["serve", "--env", DUEL, "--env.group_size", 2, "--model", "sim", "--port", port]
    command += FEW
    with running(*command, folder=tmp_path) as server:
        server.wait_for(r"Trainers: http://\S+")
        trained = trained_by(atropos_python, url, 8, 2)
        group = httpx.get(f"{url}/latest_example", timeout=PATIENCE).json()
    assert trained["rows"] == 8 * trained["batches"]
    assert trained["spread"] == pytest.approx(1.0, abs=1e-3)  # of the scores, as it scaled them
    # A rollout has two rows for each player, whose turns do not continue each other.
    assert len(set(np.array(group["scores"]).tolist())) > 2
    for tokens, masks, advantages in zip(
        group["tokens"], group["masks"], group["advantages"], strict=True
    ):
        assert len(tokens) == len(advantages)
        pairs = zip(advantages, masks, strict=True)
        assert len({advantage for advantage, mask in pairs if mask != -100}) == 1


def next_of_an_environment(url: str, groups: list[dict[str, Any]]) -> dict[str, Any] | None:
    """A group that a registered environment made, as soon as one comes; `groups` gets all."""
    batch = httpx.get(f"{url}/batch", timeout=PATIENCE).json()["batch"] or []
    groups += batch
    return next((group for group in batch if group["env_id"] is not None), None)


@pytest.mark.parametrize(
    ("tool", "more", "columns"),
    [
        ("atropos-sft-gen", ["--tasks-per-step", "2"], ("completion", "prefix", "score")),
        ("atropos-dpo-gen", [], ("neg", "pos", "prefix", "score")),
    ],
)
async def test_its_data_tools_get_their_data(
    atropos_python: Path,
    tokenizer: Path,
    tmp_path: Path,
    tool: str,
    more: list[str],
    columns: tuple[str, ...],
) -> None:
    out = tmp_path / "rows.jsonl"
    command = [str(atropos_python.with_name(tool)), str(out), "--group-size", "2", *more]
    command += ["--num-seqs-to-save", "6", "--tokenizer", str(tokenizer)]
    async with running_api(tmp_path / "store.db") as api:
        # It resets, and so drops this one; an environment that lives on is no trouble.
        await api.post("/scored_data", two_rows(99))
        process = await asyncio.create_subprocess_exec(
            *command,
            "--api-url",
            api.url,
            env=os.environ | OFFLINE,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        number = 0
        async with asyncio.timeout(PATIENCE):
            while process.returncode is None:
                number += 1
                await api.post("/scored_data", two_rows(number))
                await asyncio.sleep(0.1)
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-3000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) >= 6
    assert {tuple(sorted(row)) for row in rows} == {columns}
    assert all(row["score"] > 0 for row in rows)


def two_rows(number: int) -> dict[str, Any]:
    """Two rows with a common beginning, the second one good."""
    rows = [[10, 11, 12, 20 + number % 50, last] for last in (80, 90)]
    return {"tokens": rows, "masks": rows, "scores": [-1.0, 1.0]}


# One address is all that differs between its own server and ours


KINDS = ("single", "turns", "tools")
ROWS = 24
"""Three environments, two groups of four rows each: one batch has all."""


def answer(body: dict[str, Any]) -> str:
    """A model that sometimes guesses rightly, and sometimes calls the tool."""
    first, last = body["messages"][0]["content"], body["messages"][-1]["content"]
    chance = zlib.crc32(json.dumps([body["messages"], body.get("seed")]).encode())
    if "<tools>" in first and "<tool_response>" in last:
        return f"It is {last.removeprefix('<tool_response>').removesuffix('</tool_response>')}."
    if "<tools>" in first and chance % 3:
        call = {"name": "add", "arguments": {"a": int(last.split()[2]), "b": 40 + chance % 2}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
    return f"I guess {chance % 4}."


@contextlib.contextmanager
def theirs(python: Path, port: int, folder: Path) -> Iterator[None]:
    """atroposlib's own server."""
    words = (python.with_name("run-api"), "--port", port, "--host", "127.0.0.1")
    with logged(folder / "run-api.log", *words) as process:
        until(lambda: _answers(port), lambda: "run-api", alive=process)
        yield


def _answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/", timeout=PATIENCE).is_success
    return False


def trained_on(python: Path, port: int, folder: Path) -> dict[str, Any]:
    """What atroposlib's example trainer got from three environments on the server at `port`."""
    url = f"http://127.0.0.1:{port}"
    tokenizer = shutil.copytree(ASSETS, folder / "tokenizer")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(answering(answer))
        for kind in KINDS:
            command = [python, PEER / "kinds.py", kind, "serve", "--env.rollout_server_url", url]
            command += ["--env.tokenizer_name", tokenizer, "--openai.base_url", engine]
            stack.enter_context(logged(folder / f"{kind}.log", *command))
        return trained_by(python, url, ROWS, 1, "--groups")


def test_the_same_groups_arrive_from_either_server(atropos_python: Path, tmp_path: Path) -> None:
    made = {}
    for name in ("theirs", "ours"):
        folder, port = tmp_path / name, free_port()
        folder.mkdir()
        server = (
            theirs(atropos_python, port, folder)
            if name == "theirs"
            else api_process(folder / "store.db", port)
        )
        with server:
            made[name] = trained_on(atropos_python, port, folder)
    groups = {name: sorted(map(_comparable, one["groups"])) for name, one in made.items()}
    assert groups["ours"] == groups["theirs"]
    assert len(groups["ours"]) == ROWS // 4
    for key in ("batches", "rows", "trained"):
        assert made["ours"][key] == made["theirs"][key]
    assert made["ours"]["spread"] == pytest.approx(made["theirs"]["spread"])
    assert len({score for group in made["ours"]["groups"] for score in group["scores"]}) > 2
    assert "<tool_response>" in json.dumps(groups["ours"])


def _comparable(group: dict[str, Any]) -> str:
    """A group as text, without the number that the server gave to its environment."""
    return json.dumps({**group, "env_id": None}, sort_keys=True)


BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_api.py"


@pytest.mark.slow
def test_batches_leases_status_memory_keep_budgets(atropos_python: Path, tmp_path: Path) -> None:
    # CPU time of the servers: what else the machine does changes the ratios little.
    printed(sys.executable, BENCHMARK, "--quick", folder=tmp_path, seconds=4 * PATIENCE)
