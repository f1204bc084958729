"""What nobody may see is nowhere: answers and secrets in a worker's memory, in what a server shows,
writes or answers, in what a reader may look at; and graders in the view of a program.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from support.api import REGISTRATION
from support.cases import cases_of
from support.commands import Running, read_jsonl, served, typed
from support.installed import ASK, LOOK, ROOT, add_libraries, build_wheels, run
from support.waiting import PATIENCE

from envserver.http.access import RULES, create_token
from envserver.sandbox import service
from envserver.settings.server import Role

CASES = cases_of(__file__)

# In a worker's memory: its own attempt. No answer, no secret, nothing of another rollout.

SECRET = "sk-secret-5f2b8c"
SPIES = CASES["spies"]
LOOK_AT_MEMORY = (
    "process --env spies.py:{} --model sim --env.group_size {} --workers.heartbeat_seconds 60"
    " --env.data_path_to_save_groups out.jsonl {}"  # reading all memory holds the worker up
)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_no_answer_and_no_secret_is_anywhere_in_a_workers_memory(tmp_path: Path) -> None:
    (tmp_path / "spies.py").write_text(SPIES)
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / ".env").write_text(f"ENVSERVER_OPENAI__API_KEY={SECRET}\n")
    ran = typed(LOOK_AT_MEMORY.format("Nosy", 1, f"--env.notes {notes}"), tmp_path)
    seen = sorted(notes.glob("*.memory"))
    assert len(seen) == len(read_jsonl(tmp_path / "out.jsonl")) == 3
    for path in seen:
        memory = path.read_bytes()
        assert b"Question" in memory  # it was really read
        for hidden in (SECRET, *(sha(f"answer {n}") for n in range(3))):
            assert hidden.encode() not in memory
    assert SECRET not in (tmp_path / "out.jsonl").read_text() + ran.stdout + ran.stderr


@pytest.mark.thorough
def test_a_service_knows_the_secret_and_a_sandboxed_worker_never_holds_it(tmp_path: Path) -> None:
    (tmp_path / "spies.py").write_text(SPIES)
    typed(LOOK_AT_MEMORY.format("Guesser", 2, ""), tmp_path)
    groups = read_jsonl(tmp_path / "out.jsonl")
    assert [group["scores"] for group in groups] == [[1.0, 1.0]] * 2
    for group in groups:
        for rollout in group["envserver"]["rollouts"]:
            output = rollout["output"]
            assert [answer["asked"] for answer in output["answers"]] == [1, 2]
            # All of its memory was read: what it planted itself is found, and nothing else.
            assert output["found"] == ["canary-" + "0" * 16]
    for n in range(2):
        assert sha(f"secret {n}")[:16] not in (tmp_path / "out.jsonl").read_text()


# In what a server shows, writes or answers: a marker is in each place that is hidden or secret.

SECRETS = CASES["secrets"]
DATABASE_PASSWORD = "canary-database-password"
SERVE = (
    "--env loose.py --env.notes {given} --model sim --sim.latency_seconds 0 --env.group_size 2"
    " --workers.processes 1 --env.ensure_scores_are_not_same false --tokens.keep_calls true"
    " --total_groups 7 --rollouts.max_attempts 3 --store groups.db --log_level debug"
    " --server.tokens_file {given}/tokens --server.max_body_bytes 2048"
    " --server.ssl_certfile {given}/chain.pem --server.ssl_keyfile {given}/key.pem"
)
_PARAMETER = re.compile(r"\{([a-z_]+)(?::path)?\}")


def tls(folder: Path) -> ssl.SSLContext:
    """Writes a certificate and its key under the password; returns what a client trusts."""
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    made.cert_chain_pems[0].write_to_path(folder / "chain.pem")
    key = serialization.load_pem_private_key(made.private_key_pem.bytes(), None)
    password = SECRETS["ENVSERVER_SERVER__SSL_KEYFILE_PASSWORD"].encode()
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    locked = key.private_bytes(*form, serialization.BestAvailableEncryption(password))
    (folder / "key.pem").write_bytes(locked)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


class House:
    """A server with markers, and clients of each role."""

    def __init__(
        self, server: Running, url: str, work: Path, tokens: dict[Role, str], trust: ssl.SSLContext
    ) -> None:
        self.server, self.work, self.tokens = server, work, tokens
        self.http = httpx.Client(base_url=url, verify=trust, timeout=PATIENCE)

    def ask(self, method: str, path: str, token: str | None, body: Any = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return self.http.request(method, path, headers=headers, content=body)

    def read(self, path: str) -> httpx.Response:
        return self.ask("GET", path, self.tokens["reader"])


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    given, work = tmp_path / "given", tmp_path / "work"
    given.mkdir()
    work.mkdir()
    for name in ("HF_TOKEN", "TAVILY_API_KEY"):
        monkeypatch.setenv(name, SECRETS[name])
    (work / "loose.py").write_text(CASES["loose"])
    (work / ".env").write_text("".join(f"{name}={key}\n" for name, key in SECRETS.items()))
    roles: tuple[Role, ...] = ("admin", "reader", "trainer")
    tokens = {role: create_token(given / "tokens", f"a-{role}", role)[0] for role in roles}
    trust = tls(given)
    with served(SERVE.format(given=given), work) as (server, url):
        assert url.startswith("https://")
        yield House(server, url, work, tokens, trust)


def answers(house: House) -> Iterator[str]:
    """What a server answers to all kinds of requests, good and bad, headers and all."""
    mine, theirs = house.tokens["admin"], house.tokens["reader"]
    wrong = mine[:-4] + "zzzz"
    for method, path, token, body in (
        *(("GET", path, mine, None) for path in ("/v1/status", "/openapi.json", "/nowhere")),
        *(("GET", path, theirs, None) for path in ("/metrics", "/v1/policy", "/v1/groups")),
        ("GET", "/readyz", mine, None),
        ("GET", "/healthz", None, None),
        ("GET", "/v1/status", None, None),
        ("GET", "/v1/status", wrong, None),
        ("GET", f"/v1/status?token={wrong}", None, None),
        ("POST", "/v1/runs", theirs, b"{}"),
        ("POST", "/v1/runs", mine, b'{"name": 1}'),
        ("POST", "/v1/runs", mine, b'{"name":'),
        ("POST", "/v1/runs", mine, b'{"name": "run"}'),
        ("POST", "/v1/runs", mine, b" " * 3000),
        ("POST", "/v1/runs/none/lease", mine, b"{}"),
        ("POST", "/register", mine, json.dumps(REGISTRATION).encode()),
        ("POST", "/scored_data", mine, b'{"tokens": 1}'),
        ("POST", "/v1/runs/run/lease", mine, b'{"max_groups": 2}'),
        ("PUT", "/v1/runs", mine, b"{}"),
    ):
        answer = house.ask(method, path, token, body)
        assert answer.status_code < 500, (path, answer.text)
        assert wrong not in answer.text
        yield f"{answer.status_code} {answer.headers} {answer.text}"


def everything(house: House, group_ids: list[str]) -> dict[str, str]:
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
                seen[path] = beginning(house, path)
                continue
            answer = house.read(path)
            assert answer.status_code < 500, (path, answer.text)
            assert answer.status_code != 403, path
            seen[path] = answer.text + str(answer.headers)
    assert len(seen) > 40
    return seen


def beginning(house: House, path: str) -> str:
    """Returns what a stream sends in a second or two."""
    parts: list[str] = []
    headers = {"authorization": f"Bearer {house.tokens['reader']}"}
    times = httpx.Timeout(60, read=2)
    try:
        with house.http.stream("GET", path, headers=headers, timeout=times) as answer:
            for part in answer.iter_text():
                parts.append(part)
                if sum(map(len, parts)) > 100_000:
                    break
    except httpx.ReadTimeout:
        pass
    return "".join(parts)


@pytest.mark.thorough
def test_no_secret_is_in_anything_that_a_server_shows_writes_or_answers(house: House) -> None:
    def groups() -> list[dict[str, Any]]:
        return list(house.read("/v1/groups").json()["groups"])

    house.server.until(lambda: len(groups()) >= 7)
    trainer = house.tokens["trainer"]
    made = house.ask("POST", "/v1/runs", trainer, b'{"name": "run-1", "batch_size": 2}')
    assert made.status_code == 201, made.text
    lease = house.ask("POST", "/v1/runs/run-1/lease", trainer, b'{"max_groups": 2}').json()
    # A reader looks through every route.
    seen = everything(house, [one["group_id"] for one in groups()])
    text = "".join(seen.values())
    for found in ("[hidden]", "***", "Question 1", "scorer_error", "agent_error", "my key is"):
        assert found in text, found  # each hidden place was really near what is shown
    said = list(answers(house))
    assert {text[:3] for text in said} >= {"200", "401", "403", "404", "405", "413", "422"}
    house.server.send(signal.SIGTERM)
    assert house.server.end() == 0
    # What an agent prints is logged as it is, at the level debug.
    lines = house.server.output().splitlines()
    output = "\n".join(line for line in lines if "line='my key is" not in line)
    assert "cannot be compared" in output
    store = f"postgresql://user:{DATABASE_PASSWORD}@127.0.0.1:9/db"
    failed = typed(f"run-api --port 0 --store {store}", house.work, status=1)
    said += [output, failed.stdout, failed.stderr]

    keys = (house.work.parent / "given" / "keys").read_text().split()
    assert len(keys) >= 14
    secrets = {*SECRETS.values(), DATABASE_PASSWORD, *house.tokens.values(), *keys}
    for path, body in seen.items():
        check(path, body.encode(), {"MARKER", lease["lease_id"], *secrets})
    for number, text in enumerate(said):
        check(f"answer or output {number}", text.encode(), {"MARKER", *secrets})
    given = (".env", house.server.log.name)  # the output was looked at
    written = [one for one in house.work.rglob("*") if one.is_file() and one.name not in given]
    assert house.work / "groups.db" in written
    for file in written:
        check(file.name, file.read_bytes(), secrets)


def check(place: str, content: bytes, markers: set[str]) -> None:
    for marker in markers:
        at = content.find(marker.encode())
        assert at < 0, (place, marker, content[max(0, at - 200) : at + 100])


# However envserver is installed, no program sees its graders and their data. Each way of installing
# gets a small environment of its own, with wheels that are built once; the libraries come from the
# environment of these tests. A program of each sandbox looks for the graders, whatever the probe
# says.

PIP = (sys.executable, "-m", "pip", "--python")
INSTALL = ("install", "--quiet", "--no-deps", "--no-compile", "--no-warn-script-location")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that every user can read, as sandboxes of a root server need it."""
    place = Path(tempfile.mkdtemp(prefix="installed-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def wheels(folder: Path) -> list[str]:
    return build_wheels(folder)


def base_python() -> str:
    """Python without an environment; one that all users may execute."""
    name = f"bin/python3.{sys.version_info.minor}"
    for path in map(os.path.realpath, (f"{sys.base_prefix}/{name}", f"/usr/{name}")):
        open_to_all = all(parent.stat().st_mode & 1 for parent in Path(path).parents)
        if Path(path).exists() and open_to_all:
            return path
    pytest.skip("every Python is in a closed folder")


def in_venv(folder: Path, wheels: list[str]) -> tuple[Path, Path]:
    run(base_python(), "-m", "venv", "--without-pip", folder / "standard")
    python = folder / "standard/bin/python"
    run(*PIP, python, *INSTALL, "--no-index", *wheels)
    return python, folder / "standard"


def editable(folder: Path, wheels: list[str]) -> tuple[Path, Path]:
    place = folder / "editable"
    run(base_python(), "-m", "venv", "--without-pip", place)
    add_libraries(*place.glob("lib/python*/site-packages"))
    for project in (ROOT, ROOT / "clients"):
        run(*PIP, place / "bin/python", *INSTALL, "--no-build-isolation", "--editable", project)
    return place / "bin/python", place


def for_the_user(folder: Path, wheels: list[str]) -> tuple[Path, Path]:
    python, place = Path(base_python()), folder / "user"
    more = ("--no-index", "--break-system-packages", "--user", *wheels)
    run(*PIP, python, *INSTALL, *more, env={"PYTHONUSERBASE": str(place)})
    return python, place


Install = Callable[[Path, list[str]], tuple[Path, Path]]


@pytest.mark.thorough
@pytest.mark.parametrize("install", [in_venv, editable, for_the_user])
def test_no_program_sees_the_graders(install: Install, folder: Path, wheels: list[str]) -> None:
    python, place = install(folder, wheels)
    variables = {"PYTHONUSERBASE": str(place)} if install is for_the_user else {}
    add_libraries(*place.glob("lib/python*/site-packages"))
    refused = {}
    for backend in service.ORDER:
        told = run(python, "-c", ASK, backend, LOOK, env=variables, cwd=folder)
        seen, tries = orjson.loads(told.splitlines()[-1])
        if tries < 0:
            refused[backend] = seen
            assert "graders" not in seen, "the view of programs is wrong, not the machine"
        else:
            assert tries > 20
            assert seen == "", backend
    if len(refused) == len(service.ORDER):
        pytest.skip(f"no backend works here: {refused}")
