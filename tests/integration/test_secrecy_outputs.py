"""Secrets that were given to a server are in nothing that it shows, writes or answers."""

from __future__ import annotations

import json
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from support.api import REGISTRATION
from support.commands import envserver, free_port, running, until
from support.waiting import PATIENCE

from envserver.api import create_token

KEYS = {
    "ENVSERVER_OPENAI__API_KEY": "sk-canary-engine-5f2b8c71",
    "ENVSERVER_SERVER__SSL_KEYFILE_PASSWORD": "canary-tls-password",
    "HF_TOKEN": "hf_canaryCanaryCanary42",
    "TAVILY_API_KEY": "tvly-canary-0123456789",
}
DATABASE_PASSWORD = "canary-database-password"

# Leaks what it can: its key in what it raises, posts, writes into messages and says of itself.
LOOSE = '''
from envserver import Environment, Score, Task

class Loose(Environment):
    """Says its key wherever it can."""

    class Config(Environment.Config):
        notes: str

    def tasks(self, split):
        for n in range(8):
            yield Task(f"loose-{n}", {"question": f"Question {n}"}, {})

    def demonstration(self, task):
        return [{"role": "assistant", "content": "I do not say."}]

    async def rollout(self, task, run):
        with open(f"{self.config.notes}/keys", "a") as notes:
            notes.write(run.api_key + "\\n")
        await run.chat([{"role": "user", "content": task.public["question"]}])
        if task.id == "loose-0":
            raise RuntimeError(f"401 for {run.base_url}: Bearer {run.api_key}")
        return "done"

    def score(self, task, result):
        return Score(reward=float(int(task.id[-1]) % 2))
'''


@pytest.fixture
def tls(tmp_path: Path) -> tuple[Path, Path, ssl.SSLContext]:
    """Certificate, key under the password, and what a client trusts."""
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    folder = tmp_path / "given"
    folder.mkdir()
    chain, locked = folder / "chain.pem", folder / "key.pem"
    made.cert_chain_pems[0].write_to_path(chain)
    key = serialization.load_pem_private_key(made.private_key_pem.bytes(), None)
    password = KEYS["ENVSERVER_SERVER__SSL_KEYFILE_PASSWORD"].encode()
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password),
        )
    )
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return chain, locked, context


def answers(http: httpx.Client, admin: str, reader: str) -> Iterator[str]:
    """What a server answers to all kinds of requests, good and bad, headers and all."""
    mine, theirs = ({"authorization": f"Bearer {one}"} for one in (admin, reader))
    wrong = admin[:-4] + "zzzz"
    for method, path, headers, body in (
        ("GET", "/v1/status", mine, None),
        ("GET", "/metrics", theirs, None),
        ("GET", "/openapi.json", mine, None),
        ("GET", "/readyz", mine, None),
        ("GET", "/healthz", {}, None),
        ("GET", "/v1/groups", theirs, None),
        ("GET", "/v1/failures", theirs, None),
        ("GET", "/v1/rollouts/running", theirs, None),
        ("GET", "/v1/engines", theirs, None),
        ("GET", "/v1/environments", theirs, None),
        ("GET", "/v1/policy", theirs, None),
        ("GET", "/v1/status", {}, None),
        ("GET", "/v1/status", {"authorization": f"Bearer {wrong}"}, None),
        ("GET", f"/v1/status?token={wrong}", {}, None),
        ("POST", "/v1/runs", theirs, b"{}"),
        ("POST", "/v1/runs", mine, b'{"name": 1}'),
        ("POST", "/v1/runs", mine, b'{"name":'),
        ("POST", "/v1/runs", mine, b'{"name": "run"}'),
        ("POST", "/v1/runs", mine, b" " * 3000),
        ("POST", "/v1/runs/none/lease", mine, b"{}"),
        ("POST", "/register", mine, json.dumps(REGISTRATION).encode()),
        ("POST", "/scored_data", mine, b'{"tokens": 1}'),
        ("POST", "/v1/runs/run/lease", mine, b'{"max_groups": 8}'),
        ("GET", "/nowhere", mine, None),
        ("PUT", "/v1/runs", mine, b"{}"),
    ):
        answer = http.request(method, path, headers=headers, content=body)
        assert answer.status_code < 500, (path, answer.text)
        assert wrong not in answer.text
        yield f"{answer.status_code} {answer.headers} {answer.text}"


@pytest.mark.thorough
def test_no_secret_is_in_anything_that_a_server_shows_writes_or_answers(
    tmp_path: Path, tls: tuple[Path, Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, work = tmp_path / "given", tmp_path / "work"
    work.mkdir()
    for name in ("HF_TOKEN", "TAVILY_API_KEY"):
        monkeypatch.setenv(name, KEYS[name])
    (work / ".env").write_text("".join(f"{name}={key}\n" for name, key in KEYS.items()))
    (work / "loose.py").write_text(LOOSE)
    tokens = given / "tokens.yaml"
    admin, _ = create_token(tokens, "boss", "admin")
    reader, _ = create_token(tokens, "eyes", "reader")
    chain, locked, context = tls
    port = free_port()
    with running(
        "serve", "--env", "loose.py", "--model", "sim", "--sim.latency_seconds", 0,
        "--env.group_size", 2, "--env.total_steps", 6, "--env.notes", given, "--store", "groups.db",
        "--env.ensure_scores_are_not_same", "false", "--rollouts.max_attempts", 1,
        "--log_level", "debug", "--port", port, "--server.tokens_file", tokens,
        "--server.max_body_bytes", 2048, "--server.ssl_certfile", chain, "--server.ssl_keyfile",
        locked, folder=work,
    ) as server:  # fmt: skip
        server.wait_for("Trainers: https")
        with httpx.Client(
            base_url=f"https://127.0.0.1:{port}", verify=context, timeout=PATIENCE
        ) as http:

            def status() -> dict[str, object]:
                headers = {"authorization": f"Bearer {admin}"}
                return dict(http.get("/v1/status", headers=headers).json())

            until(lambda: status()["server"]["groups_delivered"] >= 3, server.output)  # type: ignore[index]
            said = list(answers(http, admin, reader))
            assert {text[:3] for text in said} >= {"200", "401", "403", "404", "405", "413", "422"}
        server.send(signal.SIGTERM)
        assert server.end() == 0
        said.append(server.output())
    failed = envserver(
        "run-api", "--store", f"postgresql://user:{DATABASE_PASSWORD}@127.0.0.1:9/db", "--port", 0,
        folder=work,
    )  # fmt: skip
    assert failed.returncode != 0
    said += [failed.stdout, failed.stderr]

    keys = (given / "keys").read_text().split()
    assert len(keys) >= 8
    secrets = [*KEYS.values(), DATABASE_PASSWORD, admin, reader, *keys]
    written = [path for path in work.rglob("*") if path.is_file() and path.name != ".env"]
    shown = {f"answer or output {number}": text.encode() for number, text in enumerate(said)}
    shown |= {str(path.relative_to(work)): path.read_bytes() for path in written}
    assert "groups.db" in shown
    for place, content in shown.items():
        for secret in secrets:
            at = content.find(secret.encode())
            assert at < 0, (place, secret, content[max(0, at - 200) : at + 100])
