"""tau against tau2-bench's own data: all tasks of airline, retail and mock.

Skips where ENVSERVER_TAU2_DATA names no folder and inspect_evals is not installed. The hashes are
facts about tau2-bench v1.0.1; the tasks of other versions may differ, so those that hang on one
task are only checked where its reward basis is that of v1.0.1.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from envserver_environments.tau.domains.database import Database
from envserver_environments.tau.domains.kinds import tau2_domain
from envserver_environments.tau.domains.world import Domain
from envserver_environments.tau.episodes import Episode
from envserver_environments.tau.evaluation import Evaluation, Strictness, evaluate
from envserver_environments.tau.evaluation.rewards import expected_world, pays_for_nothing
from envserver_environments.tau.tasks import TauTask, read_task

from envserver import NotFoundError

FILES = {
    "mock": "107f83a70b7bf4f616e283b0b0b8451346fe7681173398d4498a1ec15c5fdfc6",
    "retail": "b25c9cb211f5efcaee5dd646054a73c4a9f43f4f5acc32c10713cd9f9ac20e9c",
    "airline": "124e39a664b56402bcd09cb8a6a9cece6acb8462337c969799d5658e3250f263",
}
GOLD = {
    ("mock", "create_task_1"): "3b82583d5c026d816c5a32430fb3ab8d42b72ec2b91cd5cafaab817e0e05b00c",
    ("retail", "0"): "a109be174767fde0ebb50fe3be37cdb2f1ce017fefd7bd29ea3e4d38bd3ac25a",
    ("retail", "4"): "f333ec4241d5094cb2743ac960689951e397a80cc62a73792f88976bb483caa3",
    ("retail", "21"): "079ef03ab35d99a940e5aded4318e11a97edf61ae6738ffc347057ab43812819",
    ("airline", "8"): "00766aa3e0341b497a623f93983c8d951b8d48ad541a15123a1e2b902e644a82",
    ("airline", "19"): "e5defef608c9ccc36abb18a9cb995cc76f8941d8bd5aa6d24f52ab0a50fddc8d",
}
PAID_FOR_NOTHING = {"mock": 1, "retail": 6, "airline": 23}


@pytest.fixture(scope="module", params=list(FILES))
def domain(request: pytest.FixtureRequest) -> Domain:
    folder = os.environ.get("ENVSERVER_TAU2_DATA")
    try:
        return tau2_domain(request.param, Path(folder) if folder else None)
    except NotFoundError as error:
        pytest.skip(f"NOT CHECKED against tau2-bench's data: {error}")


def tasks_of(domain: Domain) -> list[TauTask]:
    return [read_task(row) for row in domain.tasks.values()]


def is_current(domain: Domain) -> bool:
    """Are the tasks those of v1.0.1, not of the older copy in inspect_evals?

    There, no task tells its reward basis; in v1.0.1 all do, but for six of the ten of mock.
    """
    told = sum("reward_basis" in row["evaluation_criteria"] for row in domain.tasks.values())
    return told == (4 if domain.name == "mock" else len(domain.tasks))


def by_the_book(domain: Domain, task: TauTask) -> Episode:
    """The expected actions in order, by whoever has to do them, then all that is to be said."""
    criteria = task.evaluation_criteria
    assert criteria is not None
    episode = Episode(domain, task)
    if episode.speaker == "user":
        episode.say("Please help me.")
    for number, action in enumerate(criteria.actions or ()):
        if episode.speaker == "assistant":
            call = {"id": str(number), "name": action.name, "arguments": action.arguments}
            episode.say(None, [call])
    episode.say("Done. " + "; ".join(criteria.communicate_info or ()))
    episode.say("Thanks. ###STOP###")
    return episode


def by_silence(domain: Domain, task: TauTask) -> Episode:
    episode = Episode(domain, task)
    if episode.speaker == "user":
        episode.say("Please help me.")
    episode.say("No.")
    episode.say("Then not. ###STOP###")
    return episode


def value(domain: Domain, episode: Episode, *, judged: bool, strict: bool = False) -> Evaluation:
    criteria = episode.task.evaluation_criteria
    assert criteria is not None
    return evaluate(
        domain,
        episode.task,
        episode.messages,
        str(episode.ending),
        nl_verdicts=[judged] * len(criteria.nl_assertions or ()),
        strictness=Strictness.STRICT if strict else Strictness.UPSTREAM,
    )


def test_data_have_upstreams_hashes(domain: Domain) -> None:
    world = domain.world()
    assert world.agent_hash() == FILES[domain.name]
    for (name, task_id), expected in GOLD.items():
        if name == domain.name and is_current(domain):
            task = read_task(domain.tasks[task_id])
            assert task.evaluation_criteria is not None
            found = expected_world(domain, task, task.evaluation_criteria)
            assert found.agent_hash() == expected


def test_the_expected_actions_are_worth_everything(domain: Domain) -> None:
    """But where the customer has to act himself."""
    lost = []
    for task in tasks_of(domain):
        episode = by_the_book(domain, task)
        found = value(domain, episode, judged=True)
        if found.predicted is not None:
            assert found.predicted.same_as(episode.world)
        if found.reward < 1:
            lost.append(task.id)
    assert set(lost) <= {
        "update_task_with_user_tools",
        "update_task_with_history_and_env_assertions",
    }
    assert Database(domain.agent_base).computed_hash() == FILES[domain.name]


def test_doing_nothing_pays_as_upstream_but_not_strictly(domain: Domain) -> None:
    if not is_current(domain):
        pytest.skip("NOT CHECKED: the tasks are not those of tau2-bench v1.0.1")
    tasks = tasks_of(domain)
    paid = [task for task in tasks if pays_for_nothing(domain, task)]
    assert len(paid) == PAID_FOR_NOTHING[domain.name]
    for task in tasks:
        episode = by_silence(domain, task)
        assert value(domain, episode, judged=False).reward == float(task in paid)
        assert value(domain, episode, judged=False, strict=True).reward == 0.0
