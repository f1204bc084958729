"""Programs of others play the agents: `--agent`."""

import asyncio
import base64
import json
import secrets
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.http_stand_in import standing_in
from support.process_tree import alive_with

import envserver
from envserver import ConfigError, NotFoundError, ProcessResult
from envserver.workers.harness import CallRecord, Ending, ending_of
from envserver.workers.output import OutputLimiter
from envserver.workers.run import Answer, HttpClient, RequestFailed

SUPPORT = Path(__file__).parents[2] / "support"
ERRAND = str(SUPPORT / "harness_env.py")
TINY = {"command": "python3 {folder}/agent.py {instruction_file}", "folder": SUPPORT / "tiny_agent"}


@contextmanager
def posted_to(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[str]:
    """Serves POSTs of JSON; yields the address."""

    def reply(path: str, headers: object, body: bytes) -> tuple[int, bytes]:
        return 200, json.dumps(answer(json.loads(body))).encode()

    with standing_in(reply) as url:
        yield f"{url}/play"


def played(*ways: str, seconds: float = 60.0, agent: dict[str, Any] | None = None) -> ProcessResult:
    return envserver.process(
        ERRAND,
        model="sim",
        env={"ways": list(ways), "group_size": 2, "worker_timeout": seconds},
        sim={"solve_probability": 1.0, "latency_seconds": 0.0},
        rollouts={"max_attempts": 1},
        agent=agent or TINY,
    )


def test_a_program_plays_the_agent_and_is_recorded() -> None:
    (group,) = played("at once").groups
    assert group.provenance["agent"] == {"name": "command", "command": TINY["command"]}
    for trajectory in group.trajectories:
        assert (trajectory.score.reward, trajectory.limit) == (1.0, None)
        assert (trajectory.turns, len(trajectory.sequences)) == (3, 1)
        assert trajectory.flags == ["foreign_agent"]
        (step,) = trajectory.actions
        assert step["input"] == group.provenance["agent"]
        assert (step["output"]["ending"], step["output"]["status"]) == ("finished", 7)
        assert "It is there." in step["output"]["output"]


@pytest.mark.thorough
def test_a_program_that_does_not_end_is_ended_and_one_that_asks_nothing_is_no_rollout() -> None:
    result = played("slowly", "silently", seconds=20.0)
    (group,) = result.groups
    for trajectory in group.trajectories:
        assert (trajectory.score.reward, trajectory.limit) == (0.0, "time")
        assert trajectory.actions[0]["output"]["ending"] == "timed_out"
    assert result.dropped == {"incomplete": 1}
    assert "there is no ***" in str(result.messages), "its last words, without its key"
    assert not alive_with("1234")


@pytest.mark.thorough
@pytest.mark.parametrize("is_far", [False, True])
def test_an_agent_elsewhere_gets_the_task_by_post_and_answers_with_its_files(is_far: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tunnel = {"port": port, "base_url": f"http://localhost:{port}/"} if is_far else {}

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        asked = {"model": body["model"], "messages": [{"role": "user", "content": "How?"}]}
        assert body["base_url"].startswith(f"http://localhost:{port}/r/") == is_far
        url = f"{body['base_url']}/chat/completions"
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(asked).encode())
        ) as said:
            assert b"echo plum" in said.read()
        assert base64.b64decode(body["files"]["given.txt"]) == b"given"
        written = base64.b64encode(b"plum\n").decode()
        return {"output": "It is there.", "files": {"answer.txt": written}}

    with posted_to(answer) as url:
        (group,) = played("at once", agent={"url": url, **tunnel}).groups
    for trajectory in group.trajectories:
        assert (trajectory.score.reward, trajectory.turns) == (1.0, 1)
        assert len(trajectory.sequences) == 1


def test_how_a_program_ended_is_judged_by_the_record_not_by_its_status() -> None:
    def ending(
        status: int | None, calls: int = 3, limit: str | None = None, **seen: bool
    ) -> Ending:
        record = CallRecord(calls, limit, "words", seen.get("pending", False))
        return ending_of(status, record, in_time=seen.get("in_time", True))

    assert ending(0) == ending(1) == "finished"
    assert ending(0, limit="turns") == ending(1, limit="turns", pending=True) == "limit"
    assert ending(-9, in_time=False) == "timed_out"
    assert ending(0, calls=0) == ending(None, calls=0) == "not_started"
    assert ending(-11, pending=True) == ending(1, pending=True) == "crashed"
    assert ending(0, pending=True) == "finished", "its own limit of turns, perhaps"


def test_what_cannot_be_played_is_told_at_the_start() -> None:
    with pytest.raises(ConfigError, match="'duel' cannot be used with --agent"):
        envserver.process(str(SUPPORT / "duel.py"), model="sim", agent=TINY)
    with pytest.raises(NotFoundError, match="There is no agent 'claud-code'"):
        envserver.process("math", model="sim", agent={"name": "claud-code"})
    with pytest.raises(ConfigError, match=r"one of agent\.name, agent\.command and agent\.url"):
        envserver.process("math", model="sim", agent={**TINY, "name": "codex"})


# The parts of workers: what is kept of their output, and their HTTP client


def test_output_holds_no_key_of_an_attempt() -> None:
    lines = OutputLimiter(0.0)
    key = secrets.token_urlsafe(24)
    passed = lines.feed(f"HTTP Request: POST http://127.0.0.1:1/r/{key}/v1/models\n".encode(), 0.0)
    assert passed == ["HTTP Request: POST http://127.0.0.1:1/r/***/v1/models"]
    assert key not in lines.tail()


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


@pytest.mark.parametrize("answer", [b"", OK[:-1], b"220 mail ready\r\n"])
async def test_without_a_whole_answer_a_request_fails_and_is_not_sent_again(answer: bytes) -> None:
    answers = [OK.replace(b"\r\n", b"\r\nconnection: close\r\n", 1), answer, OK]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, HttpClient() as client:
        url = "http://127.0.0.1:{1}/r/key".format(*server.sockets[0].getsockname())
        assert await client.request("GET", url, seconds=30) == Answer(200, b"hi")
        with pytest.raises(RequestFailed):
            await client.request("GET", url, seconds=30)
    assert answers == [OK]
