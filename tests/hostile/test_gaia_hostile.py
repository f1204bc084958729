"""Live agents of `gaia` whose model looks for answers, forges results, hangs, eats and dies.

One command runs them all beside ordinary ones: real engine's interface, proxy, walled workers,
agents, scorer. The answer stands in the server's variables, memory and files; none may show it.
"""

import json
import secrets
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.commands import ENVSERVER, environment_variables, read_jsonl
from support.gaia_hostile import IN_PROCESS, LOOKS, TROUBLE, Hostile
from support.waiting import PATIENCE

ZOO = Path(__file__).parents[1] / "support" / "gaia_hostile.py"
AGENTS = ("code", "tools", "plain")
BY_ALL = ("memory", "forge a result", "kill")
ORDINARY = "is ordinary"
WORKER_SECONDS = 40.0


@dataclass
class Ran:
    """What came of the run: `rollouts` by agent and what its model does."""

    secret: str
    text: str
    visitors: list[Any]
    stderr: str
    rollouts: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    made_at: dict[tuple[str, str], float] = field(default_factory=dict)
    steps: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    pytest.importorskip("smolagents", reason="smolagents (extra gaia) is not installed")
    folder = tmp_path_factory.mktemp("hostile")
    secret, canary = (f"{word}-{secrets.token_hex(8)}" for word in ("plover", "wren"))
    doings = [(1, "code", name) for name in (*TROUBLE, IN_PROCESS)]
    doings += [(3, "code", name) for name in LOOKS]
    doings += [(3, agent, name) for agent in ("tools", "plain") for name in BY_ALL]
    doings += [(number, agent, ORDINARY) for number in (2, 4) for agent in AGENTS]
    rows = [
        {
            "task_id": str(number),
            "Question": " | ".join([str(when), agent, name, canary]),
            "Level": 1,
            "Final answer": "42" if name == ORDINARY else secret,
        }
        for number, (when, agent, name) in enumerate(doings)
    ]
    (folder / "copy").mkdir()
    (folder / "copy" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with listening(secret) as (port, visitors):
        command = [
            ENVSERVER, "process", "--env", f"{ZOO}:Hostile", "--model", "sim",
            "--sim.solve_probability", 1, "--sim.latency_seconds", 0, "--env.group_size", 1,
            "--env.data_path", folder / "copy", "--env.worker_timeout", WORKER_SECONDS,
            "--env.canary_port", port, "--env.host", own_address(), "--workers.memory_mb", 500,
            "--workers.dedicated", 12, "--sampling.max_tokens", 6000,
            "--env.step_seconds", 10, "--env.include_actions", "true",
            "--env.data_path_to_save_groups", "out.jsonl",
        ]  # fmt: skip
        done = subprocess.run(
            list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=PATIENCE,
            env=environment_variables() | {"TAVILY_API_KEY": secret, "PLOVER": secret}, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = Ran(secret, (folder / "out.jsonl").read_text(), visitors, done.stderr)
    config = Hostile.Config(data_path=folder / "copy")
    questions = {task.id: task.public["question"] for task in Hostile(config).tasks("train")}
    for group in read_jsonl(folder / "out.jsonl"):
        number, agent, name = questions[group["envserver"]["task_id"]].split(" | ")[:3]
        key = (agent, f"{name} {number}" if name == ORDINARY else name)
        (found.rollouts[key],) = group["envserver"]["rollouts"]
        found.made_at[key] = group["envserver"]["created_at"]
        found.steps[key] = (found.rollouts[key]["output"] or {}).get("steps", [])
    yield found


@contextmanager
def listening(secret: str) -> Iterator[tuple[int, list[Any]]]:
    """A server of this machine that gives its visitors the secret, and remembers them."""
    visitors: list[Any] = []

    def serve() -> None:
        while True:
            try:
                visitor, address = listener.accept()
            except OSError:
                return
            visitors.append(address)
            visitor.sendall(secret.encode())
            visitor.close()

    with socket.create_server(("", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], visitors
        listener.shutdown(socket.SHUT_RDWR)


def own_address() -> str:
    """Of this machine in its network, where it has one."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def notes_of(ran: Ran, name: str) -> dict[str, Any]:
    """What the model's code of a CodeAgent printed of its search: what it tried, and what came."""
    *_, told = searches(ran, "code", name)
    notes: dict[str, Any] = told["notes"]
    return notes


def searches(ran: Ran, agent: str, name: str) -> list[dict[str, Any]]:
    """Returns the lines that the searches printed; none found an answer."""
    printed = [step["observation"].splitlines()[0] for step in ran.steps[agent, name]]
    told = [json.loads(line) for line in printed if line.startswith('{"found"')]
    assert all(search["found"] == [] for search in told)
    return told


def test_nobody_is_paid_for_looking_and_ordinary_ones_are(ran: Ran) -> None:
    for (agent, name), rollout in ran.rollouts.items():
        assert rollout["reward"] == float(name.startswith(ORDINARY)), (agent, name, rollout)
    assert len([name for _, name in ran.rollouts if name.startswith(ORDINARY)]) == 6
    every = {("code", name) for name in LOOKS} | {(a, name) for a in AGENTS for name in BY_ALL}
    missing = every - set(ran.rollouts)
    # Tried again, then dropped; where looking for the key took its step's time, it is paid nothing.
    assert missing <= {("code", "forge a failure")}
    # The answer was nowhere.
    assert ran.secret not in ran.text and ran.secret not in ran.stderr
    assert ran.visitors == []


def test_what_is_in_memory_is_found_and_no_answer_is(ran: Ran) -> None:
    for agent in AGENTS:
        first, second = searches(ran, agent, "memory")
        assert first["canaries"] == 0  # the first interpreter has nothing of its agent
        assert second["canaries"] == 1  # a fork of the agent has the question: the search works


def test_other_processes_cannot_be_entered(ran: Ran) -> None:
    notes = notes_of(ran, "processes")
    others = [name for name in notes if name.startswith(("write", "ptrace", "vm"))]
    assert len(others) >= 3
    assert all(notes[name] == -1 or "Error" in notes[name] for name in others), notes
    assert "descriptor taken" not in notes
    peers = [told for name, told in notes_of(ran, "descriptors").items() if "peer" in name]
    assert peers == ["''"]  # the one socket to the agent


def test_files_of_others_are_not_there(ran: Ran) -> None:
    notes = notes_of(ran, "files")
    assert notes.pop("others") == []
    notes.pop("walk", None)
    notes.pop("/proc/self/cwd/..", None)
    assert len(notes) >= 8
    assert all("Error" in told for told in notes.values()), notes


def test_nothing_but_the_own_attempt_can_be_reached(ran: Ran) -> None:
    notes = notes_of(ran, "network")
    assert len(notes) >= 18
    refused = ("Error", "error", "HTTP/1.1 400", "HTTP/1.1 404")
    assert all(any(word in told for word in refused) for told in notes.values()), notes


def test_a_forged_result_is_an_answer_like_any_other(ran: Ran) -> None:
    rollout = ran.rollouts["code", "forge a result"]
    assert rollout["output"]["answer"] == "forged"
    assert rollout["components"]["correct"] == 0.0
    assert rollout["turns"] > 1  # calls with the attempt's key count as the attempt's
    assert ran.rollouts["code", "forge a frame"]["output"]["answer"] == "forged"


STEPS = {
    "crashes": {"died"},
    "eats": {"exception"},
    "exits": {"died"},
    # The limit of processes refuses a fork, or the children outlive the step: both at once.
    "forks": {"timeout", "exception"},
    "hangs": {"timeout"},
    "is deaf": {"timeout"},
    "loops": {"timeout"},
}


def test_trouble_ends_typed_and_what_was_done_is_kept(ran: Ran) -> None:
    for name, kinds in STEPS.items():
        first, second, *_ = ran.steps["code", name]
        assert first["observation"] == "Value: 42", name
        assert second["error"]["kind"] in kinds, name
    for name in ("hangs", "is deaf"):
        assert ran.rollouts["code", name]["output"]["state"] == "time"


def test_a_worker_that_the_model_ended_is_scored_at_once(ran: Ran) -> None:
    rollout = ran.rollouts["code", IN_PROCESS]
    assert (rollout["limit"], rollout["reward"], rollout["attempt"]) == ("crash", 0.0, 1)
    assert rollout["turns"] == 1 and rollout["rows"]


def test_memory_of_many_processes_ends_the_run_and_what_was_done_is_kept(ran: Ran) -> None:
    rollout = ran.rollouts["code", "eats by many"]
    if rollout["limit"] != "crash":  # a busy machine may stop the step before it is full
        assert ran.steps["code", "eats by many"][1]["error"]["kind"] == "timeout"
    thought, before = rollout["actions"][:2]
    assert (thought["tool"], before["tool"]) == ("reason", "python")
    assert (before["input"], before["output"]) == ({"code": "6 * 7"}, "Value: 42")


def test_others_go_on_beside_those_that_hang(ran: Ran) -> None:
    last = max(ran.made_at[agent, f"{ORDINARY} 2"] for agent in AGENTS)
    assert last < min(ran.made_at["code", name] for name in ("hangs", "is deaf"))
