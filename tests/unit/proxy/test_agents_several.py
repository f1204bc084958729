"""Several agents in one rollout: their engines, which are trained, and whose limits count."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from envserver_records.records import Conversation, PublicTask, Trajectory, Usage
from support.cases import cases_of
from support.commands import read_jsonl
from support.engine_stand_in import fake_vllm
from support.proxy_house import ASK, TOOLS, House, chat
from support.serving import attempt_spec, serving
from support.waiting import until

from envserver import AgentRole, ConfigError, Environment, OpenAIConfig, Score, Settings, Task
from envserver.cli.command_line import CommandSpec
from envserver.environment import Rollout
from envserver.models.openai import OpenAIEngine
from envserver.proxy.attempts import AgentRoute, AttemptSpec, ProxyAttempt
from envserver.proxy.endpoint import EngineEndpoint
from envserver.proxy.server import Proxy
from envserver.registry import find
from envserver.rollouts.policy import judge_trajectory
from envserver.rollouts.rewards import roles_of
from envserver.running import ProcessSettings, RunSpec, alone, process_run
from envserver.running.options import with_environment
from envserver.tokens.builder import build
from envserver.tokens.flags import chosen

CASES = cases_of(__file__)


@pytest.mark.thorough
async def test_an_untrained_agent_on_a_text_engine_leaves_rows_as_they_are(tmp_path: Path) -> None:
    talk, output = tmp_path / "talk.py", tmp_path / "out.jsonl"
    talk.write_text(CASES["tau"])
    words = f"""--env {talk} --model sim --sim.latency_seconds 0 --env.group_size 2
        --env.total_steps 2 --env.max_turns 3 --env.include_actions --workers.heartbeat_seconds 60
        --env.data_path_to_save_groups {output} --env.agents.user.model_name gpt-user
        --env.agents.user.temperature 0.3 --env.agents.user.server_type openai"""
    async with fake_vllm(omit=frozenset({"token_ids", "logprobs", "prompt_token_ids"})) as fake:
        variables = {"ENVSERVER_ENV__AGENTS__USER__BASE_URL": fake.url}
        variables |= {"ENVSERVER_ENV__AGENTS__USER__API_KEY": "sk-of-the-user"}
        settings = CommandSpec("process", "", ProcessSettings).read(
            words.split(), environ=variables, folder=tmp_path
        )
        await process_run([alone(RunSpec(settings, str(talk), find(str(talk))))]).run()
    groups = read_jsonl(output)
    assert {body["model"] for body in fake.requests} == {"gpt-user"}
    assert {body["temperature"] for body in fake.requests} == {0.3}
    assert {headers.get("Authorization") for headers in fake.headers if headers} >= {
        "Bearer sk-of-the-user"
    }
    assert "sk-of-the-user" not in output.read_text()
    assert len(groups) == 2
    for group in groups:
        assert len(group["tokens"]) == 4, "a row for each trained agent of each rollout"
        for row, masks in zip(group["tokens"], group["masks"], strict=True):
            assert len(row) == len(masks)
            assert any(mask != -100 for mask in masks)
        agents = group["envserver"]["rendering"]["agents"]
        assert (agents["user"]["model"], agents["user"]["trained"]) == ("gpt-user", False)
        for rollout in group["envserver"]["rollouts"]:
            assert sorted(rollout["agents"]) == ["agent", "critic"]
            assert rollout["flags"] == []
            assert rollout["metrics"] == {"turns": 2, "actions": 4, "asked": 1}
            others = {other["agent"]: other for other in rollout["others"]}
            assert (others["user"]["trained"], others["user"]["turns"]) == (False, 3)
            assert others["critic"]["trained"]
            assert [one["step"] for one in rollout["actions"]] == [1, 2, 3, 4]
            assert rollout["actions"][-1]["input"] == {"secret": "***"}
            assert rollout["actions"][0]["output"] == "Hëllo."


class Several(Environment):
    def agents(self) -> Mapping[str, AgentRole]:
        return {"solver": AgentRole(), "judge": AgentRole(trained=False)}

    def tasks(self, split: Any) -> Any:
        yield Task("only", {})

    async def rollout(self, task: PublicTask, run: Rollout) -> None: ...

    def score(self, task: Task, result: Any) -> Score:
        return Score(reward=1.0)


def settings(*flags: str) -> Any:
    command = CommandSpec("", "", with_environment(Settings, Several.Config))
    return command.read(flags, environ={}, folder=Path("/nonexistent")).env


def test_who_is_trained_is_a_persons_choice() -> None:
    flags = ("--env.agents.judge.trained", "--env.agents.solver.trained=false")
    trained = {name: role.trained for name, role in roles_of(Several(settings(*flags))).items()}
    assert trained == {"solver": False, "judge": True}


def test_wrong_names_are_told_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match=r"--env.agents.solvr: .*Did you mean 'solver'\?"):
        roles_of(Several(settings("--env.agents.solvr.temperature", "1")))
    with pytest.raises(ConfigError, match=r"Did you mean --env.agents.judge.base_url\?"):
        settings("--env.agents.judge.bas_url", "http://x")


def seats(**changes: Any) -> AttemptSpec:
    """An attempt of a trained solver and a judge, asked elsewhere, that is not."""
    plain = attempt_spec(max_turns=2, max_completion_tokens=20)
    judge = AgentRoute(
        model="big",
        sampling={"temperature": 0.0, "top_p": 1.0, "max_tokens": 50},
        trained=False,
        endpoint="judge",
        follows_policy=False,
    )
    solver = AgentRoute(model=plain.model, sampling=plain.sampling)
    return AttemptSpec(
        **{name: getattr(plain, name) for name in plain.__struct_fields__ if name != "agents"},
        agents={"solver": solver, "judge": judge, **changes},
    )


async def test_each_agent_has_its_own_engine_turns_and_versions() -> None:
    async with (
        fake_vllm() as mine,
        fake_vllm(text="x" * 40) as other,
        OpenAIEngine(OpenAIConfig(base_url=mine.url), tries=1) as engine,
        OpenAIEngine(OpenAIConfig(base_url=other.url), tries=1) as elsewhere,
    ):
        proxy = Proxy(engine, endpoints={"judge": EngineEndpoint(elsewhere)})
        proxy.publish_version(7)
        async with serving(proxy.asgi()) as url:
            home = House(mine, proxy, url, None)  # type: ignore[arg-type]
            attempt = proxy.open(seats())
            solver, judge = (home.client(attempt.key, f"/a/{n}") for n in ("solver", "judge"))
            for _ in range(2):
                await chat(judge)
                await chat(solver)
            for one in (judge, solver):
                with pytest.raises(Exception, match="All 2 turns of the agent"):
                    await chat(one)
            assert [model.id async for model in judge.models.list()] == ["big"]
            for client in (solver, judge):
                await client.close()
    calls = attempt.calls
    assert [call.agent for call in calls] == ["judge", "solver"] * 2
    assert {body["model"] for body in other.requests} == {"big"}
    assert {body["temperature"] for body in other.requests} == {0.0}
    assert [call.versions[0].version for call in calls] == [-1, 7, -1, 7]
    assert sum(len(call.completion_ids) for call in calls if call.agent == "solver") <= 20
    assert len(calls[0].completion_ids) == 41, "the judge's tokens are not counted"
    assert [call.trained for call in calls] == [False, True] * 2
    rows = build([call for call in calls if call.trained])
    assert {row.agent for row in rows} == {"solver"}
    assert all(row.versions[row.mask == 1].min() == 7 for row in rows)


async def test_who_says_nothing_is_the_first_and_strangers_are_refused(home: House) -> None:
    attempt, client = home.open(agents=["solver", "critic", "judge"])
    await chat(client)
    await chat(home.client(attempt.key, "/a/critic"))
    await chat(client, extra_headers={"x-agent": "judge"})
    assert [call.agent for call in attempt.calls] == ["solver", "critic", "judge"]
    undeclared, client = home.open()
    for one in (client, home.client(undeclared.key, "/a/ghost")):
        with pytest.raises(Exception, match=r"There is no agent 'ghost'.*none is declared"):
            await chat(one, extra_headers={"x-agent": "ghost"})
    await chat(client)
    assert [call.agent for call in undeclared.calls] == [None]


async def test_one_agents_failure_is_not_overcome_by_anothers_answer(home: House) -> None:
    attempt = home.proxy.open(seats(judge=AgentRoute(model="tiny", sampling={}, trained=False)))
    home.fake.faults.extend([500, 500])
    told = []
    for agent in ("judge", "solver", "judge"):
        path = f"a/{agent}/v1/chat/completions"
        status, _ = await home.post(attempt.key, path, {"messages": ASK})
        told.append((status, attempt.engine_failure is None))
    assert told == [(502, False), (200, False), (200, True)]


def test_a_rollout_in_which_no_trained_agent_spoke_is_not_delivered() -> None:
    user = Conversation(
        agent="user", trained=False, model="big", messages=ASK, tools=[], turns=1,
        completion_tokens=3,
    )  # fmt: skip
    silent = Trajectory(
        rollout_id="r", attempt=1, task_id="t", env="talk", sequences=[], messages=[], tools=[],
        output=None, score=Score(reward=0.0), finish_reason=None, truncated=False, limit=None,
        turns=0, usage=Usage(), others=[user],
    )  # fmt: skip
    actions = chosen()
    assert judge_trajectory(silent, need_exact=False, actions=actions) is not None
    silent.turns = 1  # at an engine that gives text only
    assert judge_trajectory(silent, need_exact=False, actions=actions) is None


# Titles and summaries of coding programs are of the agent "side", and not trained

OPENCODE = "opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14"
SCRIPT = "AsyncOpenAI/Python 3.54.0"
TITLE = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}


async def ask(
    home: House, attempt: ProxyAttempt, text: str, *, program: str = OPENCODE, **more: Any
) -> int:
    body = {"model": "any", "messages": [{"role": "user", "content": text}], **more}
    status, _ = await home.post(attempt.key, "v1/chat/completions", body, **{"user-agent": program})
    return status


def recorded(attempt: ProxyAttempt) -> list[tuple[str, str | None, bool]]:
    return [(call.messages[0]["content"], call.agent, call.trained) for call in attempt.calls]


async def test_what_programs_ask_sans_tools_beside_the_talk_is_not_trained(home: House) -> None:
    attempt, _ = home.open(max_turns=2)
    await ask(home, attempt, "Title?")
    assert recorded(attempt) == [("Title?", None, True)]  # it could be all that is asked
    for text, tools in (("Work.", TOOLS), ("Summary?", None), ("More.", TOOLS)):
        await ask(home, attempt, text, tools=tools)
    conversation, beside = (None, True), ("side", False)
    assert recorded(attempt) == [
        ("Title?", *beside),
        ("Work.", *conversation),
        ("Summary?", *beside),
        ("More.", *conversation),
    ]
    # Each has its own turns.
    assert await ask(home, attempt, "Even more.", tools=TOOLS) == 400
    assert await ask(home, attempt, "Another summary?") == 400
    # Other agents are trained on it, but for titles.
    other, _ = home.open()
    form = {"type": "json_schema", "json_schema": {"name": "output", "schema": TITLE}}
    for text, more in (
        ("Plan.", {}),
        ("Work.", {"tools": TOOLS}),
        ("Title?", {"response_format": form}),
        ("Answer.", {}),
    ):
        await ask(home, other, text, program=SCRIPT, **more)
    assert recorded(other) == [
        ("Plan.", *conversation),
        ("Work.", *conversation),
        ("Title?", *beside),
        ("Answer.", *conversation),
    ]


async def test_a_title_that_comes_late_is_known_too(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, _ = home.open(agents=["main", "helper"])
    title = asyncio.create_task(ask(home, attempt, "Title?"))
    await until(lambda: home.fake.requests)
    work = asyncio.create_task(ask(home, attempt, "Work.", tools=TOOLS))
    await until(lambda: len(home.fake.requests) == 2)
    home.fake.held.set()
    await asyncio.gather(title, work)
    assert sorted(recorded(attempt)) == [("Title?", "side", False), ("Work.", "main", True)]
