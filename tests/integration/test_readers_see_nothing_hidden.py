"""A marker in each hidden place of a server; a reader looks through every route and finds none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import Running, free_port, running, until
from support.waiting import PATIENCE

from envserver.api import create_token
from envserver.api.access.rules import RULES
from envserver.server_config import Role

pytestmark = pytest.mark.thorough

ENVIRONMENT = '''
from contextlib import nullcontext

from pydantic import SecretStr

from envserver import AgentRole, Environment, SandboxSpec, Score, Services, Task, tool


class Loose(Environment):
    """Knows what must not be seen, and stumbles where it can."""

    class Config(Environment.Config):
        notes: str
        own_secret: SecretStr = SecretStr("")

    sandbox = SandboxSpec()

    def agents(self):
        return {"agent": AgentRole(), "critic": AgentRole(trained=False)}

    def tasks(self, split):
        for n in range(8):
            hidden = {
                "answer": f"MARKER-answer-{n}",
                "tests": f"def test():\\n    assert f() == 'MARKER-line-{n}'\\n",
                "nested": [{"deep": f"MARKER-deep-{n}"}],
            }
            yield Task(f"loose-{n}", {"question": f"Question {n}"}, hidden)

    def demonstration(self, task):
        return {"agent": [{"role": "assistant", "content": "I do not say."}]}

    @tool(on_server=True)
    async def ask(self, caller) -> str:
        """Ask the server."""
        return "long" if len(caller.task.hidden["answer"]) > 3 else "short"

    async def rollout(self, task, run):
        print(f"my key is {run.api_key} at {run.base_url}")
        run.log("asking", address=run.base_url, key=run.api_key)
        run.log_action("look", {"key": run.api_key}, "seen")
        async with run.open_tools([self.ask]) as tools, run.open_sandbox() as sandbox:
            await tools["ask"].function()
            await sandbox.exec(["/bin/echo", run.api_key])
        await run.chat([{"role": "user", "content": task.public["question"]}])
        with open(f"{self.config.notes}/keys", "a") as notes:
            notes.write(run.api_key + "\\n")
        if run.attempt == 1 and run.rollout_id.endswith("r0"):
            raise RuntimeError(f"401 for {run.base_url}: Bearer {run.api_key}")
        return {"attempt": run.attempt, "seen": [run.api_key, run.base_url]}

    def score(self, task, result):
        first = result.output["attempt"] == 1
        if first and task.id == "loose-1":
            raise ValueError(f"{task.hidden}")
        if first and task.id == "loose-2":
            raise KeyError(task.hidden["tests"])
        if task.id == "loose-3":
            return Score(reward=None, error=f"not {task.hidden['nested'][0]['deep']!r}")
        return Score(reward=float(result.output["attempt"] == 1))

    def score_group(self, task, results, scores):
        if task.id == "loose-4":
            raise ValueError(f"{task.hidden['nested']} cannot be compared")
        return scores
'''
SECRETS = {
    "ENVSERVER_OPENAI__API_KEY": "sk-MARKER-engine-5f2b8c71",
    "ENVSERVER_ENV__OWN_SECRET": "MARKER-own-secret",
    "ENVSERVER_ENV__AGENTS__CRITIC__API_KEY": "MARKER-critic-key",
    "HF_TOKEN": "hf_MARKERMarkerMarkerMarker",
}
_PARAMETER = re.compile(r"\{([a-z_]+)(?::path)?\}")


class House:
    """A server with markers; `reader` is a client with that role."""

    def __init__(self, url: str, tokens: Mapping[Role, str], server: Running, folder: Path) -> None:
        self.url = url
        self.tokens = tokens
        self.server = server
        self.folder = folder
        self.reader = self.client("reader")

    def client(self, role: Role) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.tokens[role]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    (tmp_path / "loose.py").write_text(ENVIRONMENT)
    (tmp_path / ".env").write_text("".join(f"{name}={key}\n" for name, key in SECRETS.items()))
    tokens_file = tmp_path / "tokens"
    roles: tuple[Role, ...] = ("reader", "trainer")
    tokens = {role: create_token(tokens_file, f"a-{role}", role)[0] for role in roles}
    port = free_port()
    words = (
        "serve", "--env", "loose.py", "--env.notes", tmp_path, "--model", "sim",
        "--sim.latency_seconds", 0, "--env.group_size", 2, "--workers.processes", 1,
        "--env.ensure_scores_are_not_same", "false", "--tokens.keep_calls", "true",
        "--total_groups", 7, "--server.tokens_file", tokens_file, "--port", port,
        "--store", "groups.db", "--rollouts.max_attempts", 3,
    )  # fmt: skip
    with running(*words, folder=tmp_path) as server:
        server.wait_for("Trainers: ")
        yield House(f"http://127.0.0.1:{port}", tokens, server, tmp_path)


def test_a_reader_finds_no_marker_in_any_route(house: House) -> None:
    def groups() -> list[dict[str, Any]]:
        return list(house.reader.get("/v1/groups").json()["groups"])

    until(lambda: len(groups()) >= 7, house.server.output, alive=house.server.process)
    with house.client("trainer") as trainer:
        made = trainer.post("/v1/runs", json={"name": "run-1", "batch_size": 2})
        assert made.status_code == 201, made.text
        leased = trainer.post("/v1/runs/run-1/lease", json={"max_groups": 2}).json()
    keys = set((house.folder / "keys").read_text().split())
    assert len(keys) >= 14
    markers = {"MARKER", leased["lease_id"], house.tokens["trainer"], *keys}
    seen = _everything(house, [one["group_id"] for one in groups()])

    # Each hidden place was really near what is shown.
    text = "".join(seen.values())
    for found in ("[hidden]", "***", "Question 1", "scorer_error", "agent_error", "my key is"):
        assert found in text, found
    for path, body in seen.items():
        for marker in markers:
            assert marker not in body, (path, body[max(0, body.find(marker) - 200) :][:400])
    output = house.server.output()
    assert "cannot be compared" in output
    assert "MARKER" not in output


def _everything(house: House, group_ids: list[str]) -> dict[str, str]:
    """Returns the answer of each GET route that a reader may ask, by path."""
    fills = {
        "run": ["run-1"], "group_id": group_ids, "number": ["0", "1"], "image": ["0"],
        "env": ["loose"], "alarm": ["0"], "name": ["loose"],
    }  # fmt: skip
    seen: dict[str, str] = {}
    for rule in RULES:
        if rule.method != "GET" or (rule.roles is not None and "reader" not in rule.roles):
            continue
        paths = [rule.path]
        for parameter in _PARAMETER.findall(rule.path):
            form = re.compile(r"\{" + parameter + r"(:path)?\}")
            paths = [form.sub(value, path) for path in paths for value in fills[parameter]]
        for path in paths:
            if rule.is_stream:
                seen[path] = _beginning(house, path)
                continue
            answer = house.reader.get(path)
            assert answer.status_code < 500, (path, answer.text)
            assert answer.status_code != 403, path
            seen[path] = answer.text + str(answer.headers)
    assert len(seen) > 40
    return seen


def _beginning(house: House, path: str) -> str:
    """Returns what a stream sends in a second or two."""
    parts: list[str] = []
    try:
        with house.reader.stream("GET", path, timeout=httpx.Timeout(60, read=2)) as answer:
            for part in answer.iter_text():
                parts.append(part)
                if sum(map(len, parts)) > 100_000:
                    break
    except httpx.ReadTimeout:
        pass
    return "".join(parts)
