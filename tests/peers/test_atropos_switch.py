"""The same environments and the same trainer on atroposlib's own server and on ours: one address
is all that differs, and the same groups arrive."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.answering import answering
from support.api import api_process
from support.commands import free_port, until
from support.waiting import PATIENCE

from envserver.models import ASSETS

PEER = Path(__file__).parents[1] / "support" / "atropos_peer"
KINDS = ("single", "turns", "tools")
ROWS = 24
"""Three environments, two groups of four rows each: one batch has all."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}


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
    with (folder / "run-api.log").open("wb") as log:
        command = [python.with_name("run-api"), "--port", str(port), "--host", "127.0.0.1"]
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            until(lambda: _answers(port), lambda: "run-api", alive=process)
            yield
        finally:
            process.terminate()
            process.wait(PATIENCE)


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
            log = stack.enter_context((folder / f"{kind}.log").open("wb"))
            process = subprocess.Popen(
                list(map(str, command)),
                cwd=folder,
                env=os.environ | OFFLINE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        trainer = [str(python), str(PEER / "trainer.py"), url, str(ROWS), "1", "--groups"]
        run = subprocess.run(trainer, capture_output=True, text=True, timeout=PATIENCE, check=False)
    logs = "".join(log.read_text()[-1500:] for log in folder.glob("*.log"))
    assert run.returncode == 0, run.stderr[-3000:] + logs
    told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return told


def test_the_same_groups_arrive_from_either_server(atropos_python: Path, tmp_path: Path) -> None:
    told = {}
    for name in ("theirs", "ours"):
        folder, port = tmp_path / name, free_port()
        folder.mkdir()
        server = (
            theirs(atropos_python, port, folder)
            if name == "theirs"
            else api_process(folder / "store.db", port)
        )
        with server:
            told[name] = trained_on(atropos_python, port, folder)
    groups = {name: sorted(map(_comparable, one["groups"])) for name, one in told.items()}
    assert groups["ours"] == groups["theirs"]
    assert len(groups["ours"]) == ROWS // 4
    for key in ("batches", "rows", "trained"):
        assert told["ours"][key] == told["theirs"][key]
    assert told["ours"]["spread"] == pytest.approx(told["theirs"]["spread"])
    scores = [score for group in told["ours"]["groups"] for score in group["scores"]]
    assert len(set(scores)) > 2
    assert "<tool_response>" in json.dumps(groups["ours"])


def _comparable(group: dict[str, Any]) -> str:
    """A group as text, without the number that the server gave to its environment."""
    return json.dumps({**group, "env_id": None}, sort_keys=True)
