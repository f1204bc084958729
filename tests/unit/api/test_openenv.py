"""Environments as OpenEnv servers: played over the wire, bounded, and nothing hidden leaves."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import pytest
from support.cases import cases_of
from support.commands import Running, free_port, running, until
from support.conversations import alike, conversations
from support.openenv import socket
from support.openenv_server import call, played, transcript
from support.waiting import PATIENCE

from envserver import NotFoundError
from envserver.http.access import create_token
from envserver.models.engine import PlayedEngine
from envserver.rollouts.episodes import Episodes, EpisodesFull

CASES = cases_of(__file__)

LENGTHS = CASES["lengths"]
QUIET = ("--model", "sim", "--workers.processes", 1, "--rollouts.max_queued_groups", 0)


def served(folder: Path, *words: object) -> Iterator[tuple[Running, str]]:
    port = free_port()
    with running("serve", *words, *QUIET, "--port", port, folder=folder) as server:
        server.wait_for("Trainers: ")
        yield server, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of one environment, for two episodes at a time."""
    folder = tmp_path_factory.mktemp("openenv")
    (folder / "lengths.py").write_text(LENGTHS)
    for _, url in served(folder, "--env", "lengths.py", "--server.openenv_sessions", 2):
        yield url


SESSIONS = conversations(Path(__file__).with_name("openenv.txt"))


@pytest.mark.parametrize("title", SESSIONS)
async def test_a_session_answers_as_openenv_and_hides_what_is_hidden(url: str, title: str) -> None:
    async with socket(url, "lengths") as session:
        for line in SESSIONS[title]:
            told, _, expected = line.partition(" -> ")
            kind, _, data = told.partition(" ")
            if kind == "raw":
                await session.connection.send_str(data)
                answer = await session.connection.receive_json()
            else:
                if kind == "deep":
                    kind, _, data = data.replace("[]", "[" * 300 + "]" * 300).partition(" ")
                answer = await session.ask(kind, json.loads(data) if data else None)
            assert "hidden" not in json.dumps(answer)
            wanted = json.loads(expected) if expected.startswith("{") else {"code": expected}
            assert (answer["type"] == "error") == ("code" in wanted), (line, answer)
            alike(answer["data"], wanted)


async def test_episodes_are_bounded_and_closed_sessions_free_them(url: str) -> None:
    async with socket(url, "lengths") as one, socket(url, "lengths") as two:
        await one.seen("reset")
        await two.seen("reset")
        async with socket(url, "lengths") as three:
            full = (await three.ask("reset"))["data"]
            assert (full["code"], full["max_sessions"]) == ("CAPACITY_REACHED", 2)
            await one.connection.close()  # in the middle of its episode
            until(lambda: open_episodes(url) == 1, str)
            await three.seen("reset")
        await two.ask("step", {"message": "3"})
    until(lambda: open_episodes(url) == 0, str)


async def test_an_episode_whose_task_is_being_read_has_its_place() -> None:
    class Slow:
        async def find(self, split: str, ids: list[str]) -> list[Any]:
            await asyncio.sleep(0)
            raise NotFoundError("There is no such task.")

    environment = SimpleNamespace(name="one", config=SimpleNamespace(split="train"))
    scorer = SimpleNamespace(needs_token_ids=False)
    part: Any = SimpleNamespace(environment=environment, scorer=scorer, agents={})
    index: Any = Slow()
    episodes = Episodes([part], PlayedEngine(), lambda name: index, 1)
    begun = (episodes.begin("one", task_id="a") for _ in range(3))
    errors = await asyncio.gather(*begun, return_exceptions=True)
    assert [type(one) for one in errors] == [NotFoundError, EpisodesFull, EpisodesFull]
    with pytest.raises(NotFoundError):  # its place is free again
        await episodes.begin("one", task_id="a")


def open_episodes(url: str) -> int:
    return int(httpx.get(f"{url}/v1/status", timeout=PATIENCE).json()["server"]["open_episodes"])


def test_over_http_each_request_is_an_episode(url: str) -> None:
    half = r'{"task_id": "to", "action": {"tool_calls": [{"name": "x", "arguments": '
    half += r'{"a": "\ud800"}}]}}'
    with httpx.Client(base_url=f"{url}/openenv/lengths", timeout=PATIENCE) as http:

        def post(path: str, body: Any) -> httpx.Response:
            head = {"content-type": "application/json"}
            content = body if isinstance(body, str) else json.dumps(body)
            answer = http.post(path, content=content, headers=head)
            assert "hidden" not in answer.text
            return answer

        assert http.post("/reset").json()["observation"]["messages"]
        answer = post("/step", {"task_id": "to", "action": {"message": "2"}}).json()
        assert (answer["reward"], answer["done"]) == (0.75, True)
        for body, status in (
            ({"task_id": "nowhere", "action": {"message": "2"}}, 404),
            ({"action": {"jump": 1}}, 422),
            ({"task_id": "to", "action": {"message": "break"}}, 500),
            (half, 422),
        ):
            assert post("/step", body).status_code == status, body
        assert post("/mcp", {}).json()["error"]["code"] == -32600
        assert post("/mcp", r'{"jsonrpc": "2.0", "id": "\ud800"}').status_code == 200


def test_a_silent_session_ends_and_tokens_and_pages_count(tmp_path: Path) -> None:
    (tmp_path / "lengths.py").write_text(LENGTHS)
    trainer, _ = create_token(tmp_path / "tokens.yaml", "one", "trainer")
    reader, _ = create_token(tmp_path / "tokens.yaml", "two", "reader")
    words = ("--env", "lengths.py", "--server.openenv_idle_seconds", 3)
    for _, url in served(tmp_path, *words, "--server.tokens_file", "tokens.yaml"):
        asyncio.run(guarded(url, trainer, reader))


async def guarded(url: str, trainer: str, reader: str) -> None:
    def bearer(token: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}"}

    foreign = {**bearer(trainer), "Origin": "http://evil.example"}
    for headers, status in (({}, 401), (bearer(reader), 403), (foreign, 403)):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with socket(url, "lengths", **headers):
                pass
        assert refused.value.status == status
    async with socket(url, "lengths", **bearer(trainer)) as session:
        assert not (await session.seen("reset"))["done"]
        last = await session.connection.receive_json(timeout=PATIENCE)
        assert last["data"]["code"] == "SESSION_ERROR"
        assert (await session.connection.receive(timeout=PATIENCE)).type is aiohttp.WSMsgType.CLOSE


@pytest.mark.thorough
async def test_a_server_of_ours_is_an_environment_of_ours(url: str, tmp_path: Path) -> None:
    script = transcript(tmp_path / "t.json", "How long is 'the'?", call("measure", word="the"), "3")
    result = await played(f"{url}/openenv/lengths", script, reset={"task_id": "the"})
    assert [one.score.reward for one in result.groups[0].trajectories] == [0.75, 0.75]
