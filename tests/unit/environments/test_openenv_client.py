"""`--env openenv:URL`: a server's episodes are rollouts, and its failures are never scored."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from envserver_integrations.openenv.env import OpenEnv
from envserver_integrations.openenv.server import InvalidAction, action_schema, session
from support.openenv_server import OPENING, call, openenv_server, played, transcript

from envserver import ConfigError, ServiceError
from envserver.registry import find

QUICK = OpenEnv.Config(connect_seconds=5, answer_seconds=30)


async def test_steps_are_turns_with_rewards_and_a_lost_server_is_tried_again(
    tmp_path: Path,
) -> None:
    script = transcript(tmp_path / "t.json", OPENING, "<a>four</a>", "no", "<a>4</a>", "<a>7</a>")
    async with openenv_server("gone", most=1) as server:
        result = await played(f"{server.url}/guess", script, answer="<a>(.*?)</a>")
        assert server.open == 0 and server.most_open == 1  # the second rollout waited for the first
    (group,) = result.groups
    for trajectory in group.trajectories:
        assert trajectory.score.reward == pytest.approx(1.1)
        turns = [(one.turn, one.value) for one in trajectory.score.turns]
        assert [value for _, value in turns] == [0.1, 1.0]
        told = [one["content"] for one in trajectory.messages if one["role"] == "user"]
        assert told[0] == OPENING and "not a number" in told[1] and told[3] == "More."
    assert max(trajectory.attempt for trajectory in group.trajectories) > 1
    assert "service_error" in [failure.kind for failure in group.failures], group.failures
    assert {one["seed"] for one in server.resets} == {0} and len(server.resets) > 2


BOARD = '{"board": "...", "turn": 1}'
TEMPLATE = {"prompt": "Play: {board}", "action": '{"row": 1, "column": "{answer}"}'}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("game", "opening", "answers", "env"),
    [
        ("desk", BOARD, [call("save", number=1), call("save", number=7)], {}),
        ("board", BOARD, [call("act", row=1), call("act", row=1, column=2)], {}),
        ("board", "Play: ...", ["2", "2"], TEMPLATE),
    ],
)
async def test_the_model_acts_by_tools_or_by_a_template(
    tmp_path: Path, game: str, opening: str, answers: list[Any], env: dict[str, Any]
) -> None:
    script = transcript(tmp_path / "t.json", opening, *answers)
    async with openenv_server() as server:
        result = await played(f"{server.url}/{game}", script, reward="last", max_turns=2, **env)
    rewards = [one.score.reward for one in result.groups[0].trajectories]
    # The template's column is text: the move is another one, and the turns are used up.
    assert rewards == ([0.0, 0.0] if env else [1.0, 1.0])


@pytest.mark.thorough
async def test_arguments_that_cannot_be_sent_are_the_models_fault(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    answers = [call("save", number=one) for one in (deep, 2**70, 7)]
    script = transcript(tmp_path / "t.json", BOARD, *answers)
    async with openenv_server() as server:
        result = await played(f"{server.url}/desk", script, reward="last", max_turns=3)
    (group,) = result.groups
    assert [one.score.reward for one in group.trajectories] == [1.0, 1.0]
    told = [one["content"] for one in group.trajectories[0].messages if one["role"] == "tool"]
    assert told[0].startswith("Error: the arguments are not JSON") and "Only 7" in told[1]
    assert not group.failures


@pytest.mark.parametrize("fault", ["gone", "garbage", "slow", "raises", "nan", "other"])
async def test_a_failing_server_is_a_failure_of_ours(fault: str) -> None:
    config = OpenEnv.Config(answer_seconds=0.2 if fault == "slow" else 30)
    async with (
        openenv_server(fault) as server,
        aiohttp.ClientSession() as http,
        session(http, f"{server.url}/guess", config) as one,
    ):
        assert (await one.reset({"seed": 3}))["observation"] == {"text": OPENING}
        with pytest.raises(ServiceError):
            await one.step({"guess": "7"})


async def test_what_the_server_raises_may_be_the_models_affair() -> None:
    async with openenv_server("raises", most=1) as server, aiohttp.ClientSession() as http:
        config = OpenEnv.Config(server_errors="model")
        async with session(http, f"{server.url}/guess", config) as one:
            await one.reset({})
            with pytest.raises(InvalidAction):
                await one.step({"guess": "7"})


async def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    async with openenv_server() as server, aiohttp.ClientSession() as http:
        assert "guess" in (await action_schema(http, f"{server.url}/guess", QUICK))["properties"]
        with pytest.raises(ServiceError, match="no schema"):
            await action_schema(http, f"{server.url}/nothing", QUICK)
    async with aiohttp.ClientSession() as http:
        with pytest.raises(ServiceError, match="does not answer"):
            async with session(http, server.url, QUICK):
                pass
        with pytest.raises(ServiceError, match="does not answer"):
            await action_schema(http, f"{server.url}/guess", QUICK)


def test_addresses_tasks_and_settings_are_checked(tmp_path: Path) -> None:
    for wrong in ("localhost", "ftp://host", "http://"):
        with pytest.raises(ConfigError, match="is not the address"):
            find(f"openenv:{wrong}")
    kind = find("openenv:http://user:secret@host:8000/openenv/math")
    assert kind.name == "openenv_host_8000_openenv_math"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"task_id": "a"}\n{"task_id": "b"}\n')
    config = kind.Config(rows=rows, reset={"split": "test"})  # type: ignore[call-arg]
    resets = [task.public["reset"] for task in kind(config).tasks("train")]
    assert resets == [{"split": "test", "task_id": "a"}, {"split": "test", "task_id": "b"}]
    for settings in ({"action": "{"}, {"answer": "no group"}):
        with pytest.raises(ValueError, match=r"action|answer"):
            kind.Config(**settings)


async def test_an_image_needs_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = find("openenv:docker://echo:latest")
    with pytest.raises(ConfigError, match="needs Docker"):
        async with environment(environment.Config()).services():
            pass
