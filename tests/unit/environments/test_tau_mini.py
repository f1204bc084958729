"""The domains that are shipped with tau, and tau2-bench's own where its data are there.

Their data are sound, every task can be done as its policy asks for, doing nothing or saying all
pays nothing, and scripted customers play along. What needs tau2-bench's data skips where
ENVSERVER_TAU2_DATA names no folder and inspect_evals is not installed; the hashes are facts about
tau2-bench v1.0.1.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.tau.domains.database import Database
from envserver_environments.tau.domains.kinds import find_domain, tau2_domain
from envserver_environments.tau.domains.world import Domain, World
from envserver_environments.tau.episodes import GREETING, TRANSFER, Episode, is_user_stop
from envserver_environments.tau.evaluation import (
    Evaluation,
    Strictness,
    evaluate,
    information_given,
)
from envserver_environments.tau.evaluation.confirmation import unconfirmed_writes
from envserver_environments.tau.evaluation.proof import HAND_OVER
from envserver_environments.tau.evaluation.rewards import expected_world, pays_for_nothing
from envserver_environments.tau.states import start
from envserver_environments.tau.tasks import Action, Criteria, TauTask, read_task
from envserver_environments.tau.users import ScriptedCustomer

from envserver import NotFoundError

SIZES = {"mini_retail": 12, "mini_airline": 12, "mini_mock": 4, "mini_telecom": 12}
SHOPS = ("mini_retail", "mini_airline")


def domain(name: str) -> Domain:
    return find_domain(name, None)


def criteria_of(task: TauTask) -> Criteria:
    assert task.evaluation_criteria is not None
    return task.evaluation_criteria


def tasks(*names: str) -> Iterator[tuple[Domain, TauTask, Criteria]]:
    for name in names or SIZES:
        owner = domain(name)
        for task in map(read_task, owner.tasks.values()):
            yield owner, task, criteria_of(task)


def writes(owner: Domain, criteria: Criteria) -> list[Action]:
    known = owner.world()
    return [
        action
        for action in criteria.actions or ()
        if (tool := known.tool(action.name)) is not None and tool.mutates
    ]


def met(world: World, task: TauTask) -> bool:
    return all(
        world.run_function(one.env_type, one.func_name, one.arguments) == one.assert_value
        for one in criteria_of(task).env_assertions or []
    )


def check_tasks(owner: Domain) -> None:
    """Expected actions go without an error and fulfil all; doing nothing fulfils no assertions."""
    for task in map(read_task, owner.tasks.values()):
        criteria = criteria_of(task)
        world = start(owner, task)
        assert criteria.reward_basis != ["ENV_ASSERTION"] or not met(world, task), task.id
        world = start(owner, task)
        for action in criteria.actions or ():
            result = world.call(action.requestor, action.name, action.arguments)
            assert not result.error, (task.id, result.content)
        assert met(world, task), task.id


@pytest.mark.parametrize("name", SIZES)
def test_a_domain_has_its_tasks_in_two_splits_and_all_can_be_done(name: str) -> None:
    owner, splits = domain(name), domain(name).splits
    assert list(owner.tasks) == splits["base"] and len(splits["base"]) == SIZES[name]
    assert sorted(splits["train"] + splits["test"]) == sorted(splits["base"])
    assert len(splits["test"]) == SIZES[name] // 4
    check_tasks(owner)


def test_orders_of_the_shop_are_of_its_goods_and_were_paid() -> None:
    data = domain("mini_retail").agent_base.tables
    for order in data["orders"].values():
        owner = data["users"][order["user_id"]]
        assert order["order_id"] in owner["orders"]
        for item in order["items"]:
            variant = data["products"][item["product_id"]]["variants"][item["item_id"]]
            assert (item["price"], item["options"]) == (variant["price"], variant["options"])
            assert (item["price"] * 4).is_integer()
        first = order["payment_history"][0]
        assert first["amount"] == sum(item["price"] for item in order["items"])
        assert first["payment_method_id"] in owner["payment_methods"]
    ordered = [order for user in data["users"].values() for order in user["orders"]]
    assert sorted(ordered) == sorted(data["orders"])


def test_reservations_of_the_airline_are_for_its_flights_and_were_paid() -> None:
    data = domain("mini_airline").agent_base.tables
    for reservation in data["reservations"].values():
        owner = data["users"][reservation["user_id"]]
        people = len(reservation["passengers"])
        assert reservation["reservation_id"] in owner["reservations"]
        for part in reservation["flights"]:
            flight = data["flights"][part["flight_number"]]
            assert [part[end] == flight[end] for end in ("origin", "destination")] == [True, True]
            assert part["date"] in flight["dates"]
        price = people * sum(part["price"] for part in reservation["flights"])
        price += 30 * people * (reservation["insurance"] == "yes")
        price += 50 * reservation["nonfree_baggages"]
        assert reservation["payment_history"][0]["amount"] == price
        assert reservation["payment_history"][0]["payment_id"] in owner["payment_methods"]


def test_no_task_pays_for_nothing_or_for_saying_all_there_is_to_say() -> None:
    for owner, task, criteria in tasks(*SHOPS, "mini_mock"):
        assert not pays_for_nothing(owner, task), task.id
        info = [
            text
            for row in owner.tasks.values()
            for text in row["evaluation_criteria"]["communicate_info"] or ()
        ]
        episode = Episode(owner, task)
        for words in ("Help.", ", ".join(info), "Thanks. ###STOP###"):
            episode.say(words)
        for rule in Strictness:
            found = evaluate(owner, task, episode.messages, "user_stop", strictness=rule)
            assert found.reward == 0, (task.id, criteria.reward_basis)
        for text in criteria.communicate_info or ():  # neither policy nor customer tells it
            opening = owner.tasks[task.id]["user_script"][-1]["say"]
            for known in (owner.policy, json.dumps(task.user_scenario), opening):
                told = [{"role": "assistant", "content": known}]
                assert information_given([text], told, Strictness.STRICT) == [False], task.id


@pytest.mark.parametrize(
    ("name", "task_id"),
    [
        ("mini_retail", "card_before_kettle"),
        ("mini_airline", "cheaper_flight_pays_the_bags"),
    ],
)
def test_where_one_change_makes_the_next_possible(name: str, task_id: str) -> None:
    owner = domain(name)
    first, second = writes(owner, criteria_of(read_task(owner.tasks[task_id])))
    world = owner.world()
    early = world.call("assistant", second.name, second.arguments)
    assert early.error and "gift card" in early.content.lower()
    for action in (first, second):
        assert not world.call("assistant", action.name, action.arguments).error


def test_order_matters_where_a_reset_needs_a_restart_after_it() -> None:
    owner = domain("mini_telecom")
    task = read_task(owner.tasks["access_point_broken"])
    world = start(owner, task)
    for name in ("reboot_device", "reset_apn_settings"):
        world.call("user", name, {})
    assert not met(world, task)
    assert "Resetting APN settings" in world.call("user", "reboot_device", {}).content
    assert met(world, task)


def played(owner: Domain, row: Mapping[str, Any]) -> tuple[Episode, list[str]]:
    """A polite assistant asks who writes, proposes, does what it may, and says what is to be said.

    Returns:
        The conversation, and what the customer answered to the proposal or the refusal.
    """
    task = read_task(row)
    criteria = criteria_of(task)
    episode, customer = Episode(owner, task), ScriptedCustomer(row["user_script"])
    answers: list[str] = []

    def hear(*said: str) -> None:
        for words in said:
            if words:
                episode.say(words)
                customer.hear(words)
            answers.append(str(customer.say().content))
            episode.say(answers[-1])

    over = any(action.name == HAND_OVER for action in criteria.actions or ())
    planned = [json.dumps(action.arguments) for action in writes(owner, criteria)]
    info = ", ".join(criteria.communicate_info or ())
    hear("", "Could you please give me your e-mail address or your user id?")
    if planned:
        hear(f"It would be this: {'; '.join(planned)}. {info} Shall I go ahead with all of it?")
    elif not over:
        hear("I am sorry, that is not possible.")
    for number, action in enumerate(criteria.actions or ()):
        call = {"id": str(number), "name": action.name, "arguments": action.arguments}
        results = episode.say(None, [call])
        assert not results[0]["error"], results[0]["content"]
    done = f"All of it has been done. {info} Is there anything else I can do for you?"
    hear("A colleague takes over now." if over else done if planned else f"It is this: {info}.")
    return episode, answers


@pytest.mark.parametrize("name", SHOPS)
def test_scripted_customers_play_along_with_an_assistant_who_keeps_to_the_policy(name: str) -> None:
    owner = domain(name)
    for task_id, row in owner.tasks.items():
        episode, answers = played(owner, row)
        assert episode.ending == "user_stop", (task_id, answers)
        assert not any("###" in answer for answer in answers[:-1]), (task_id, answers)
        over = row["evaluation_criteria"]["actions"][-1]["name"] == HAND_OVER
        assert (answers[-1] == TRANSFER) == over, task_id
        known = {name: tool.mutates for name, tool in owner.world().agent.tools().items()}
        assert not unconfirmed_writes(episode.messages, known.__getitem__), (task_id, answers)
        for rule in Strictness:
            found = evaluate(owner, read_task(row), episode.messages, "user_stop", strictness=rule)
            assert found.reward == 1, (task_id, found.components)


def test_scripts_come_to_an_end_and_customers_use_their_own_tools() -> None:
    for owner, task, _ in tasks():
        rules = owner.tasks[task.id]["user_script"]
        assert rules[-1]["if"] == "always"
        assert any(is_user_stop({"content": rule["say"]}) for rule in rules[:-1]), task.id
        world = start(owner, task)
        for rule in rules[:-1]:
            assert not re.search(rule["if"], GREETING, re.IGNORECASE), task.id
            for call in rule.get("calls", ()):
                assert not world.call("user", call["name"], call["arguments"]).error, task.id


# tau2-bench's own data.

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


def tau2(name: str) -> Domain:
    folder = os.environ.get("ENVSERVER_TAU2_DATA")
    try:
        return tau2_domain(name, Path(folder) if folder else None)
    except NotFoundError as error:
        pytest.skip(f"NOT CHECKED against tau2-bench's data: {error}")


def is_current(owner: Domain) -> bool:
    """Are the tasks those of v1.0.1, not of the older copy in inspect_evals?

    There, no task tells its reward basis; in v1.0.1 all do, but for six of the ten of mock.
    """
    told = sum("reward_basis" in row["evaluation_criteria"] for row in owner.tasks.values())
    return told == (4 if owner.name == "mock" else len(owner.tasks))


def talked(owner: Domain, task: TauTask, actions: list[Action], words: str) -> Episode:
    """Actions in order, by whoever has to do them, then words, and the customer stops."""
    episode = Episode(owner, task)
    if episode.speaker == "user":
        episode.say("Please help me.")
    for number, action in enumerate(actions):
        if episode.speaker == "assistant":
            call = {"id": str(number), "name": action.name, "arguments": action.arguments}
            episode.say(None, [call])
    episode.say(words)
    episode.say("Thanks. ###STOP###")
    return episode


def value(owner: Domain, episode: Episode, judged: bool, rule: Strictness) -> Evaluation:
    verdicts = [judged] * len(criteria_of(episode.task).nl_assertions or ())
    return evaluate(
        owner,
        episode.task,
        episode.messages,
        str(episode.ending),
        nl_verdicts=verdicts,
        strictness=rule,
    )


@pytest.mark.parametrize("name", FILES)
def test_tau2s_data_have_their_hashes_and_expected_actions_are_worth_everything(name: str) -> None:
    """But where the customer has to act himself."""
    owner = tau2(name)
    assert owner.world().agent_hash() == FILES[name]
    lost = []
    for task in map(read_task, owner.tasks.values()):
        criteria = criteria_of(task)
        if (name, task.id) in GOLD and is_current(owner):
            assert expected_world(owner, task, criteria).agent_hash() == GOLD[name, task.id]
        words = "Done. " + "; ".join(criteria.communicate_info or ())
        episode = talked(owner, task, criteria.actions or [], words)
        found = value(owner, episode, True, Strictness.UPSTREAM)
        assert found.predicted is None or found.predicted.same_as(episode.world)
        if found.reward < 1:
            lost.append(task.id)
    user_acts = {"update_task_with_user_tools", "update_task_with_history_and_env_assertions"}
    assert set(lost) <= user_acts
    assert Database(owner.agent_base).computed_hash() == FILES[name]


@pytest.mark.parametrize("name", FILES)
def test_doing_nothing_pays_as_upstream_but_not_strictly(name: str) -> None:
    owner = tau2(name)
    if not is_current(owner):
        pytest.skip("NOT CHECKED: the tasks are not those of tau2-bench v1.0.1")
    every = [read_task(row) for row in owner.tasks.values()]
    paid = [task for task in every if pays_for_nothing(owner, task)]
    assert len(paid) == PAID_FOR_NOTHING[name]
    for task in every:
        episode = talked(owner, task, [], "No.")
        assert value(owner, episode, False, Strictness.UPSTREAM).reward == float(task in paid)
        assert value(owner, episode, False, Strictness.STRICT).reward == 0.0


def test_tau2s_telecom_has_its_hashes_both_policies_and_tasks_that_can_be_done() -> None:
    owner, workflow = tau2("telecom"), tau2("telecom-workflow")
    assert len(owner.tasks) == len(owner.splits["full"]) == 2285
    assert all(task_id in owner.tasks for ids in owner.splits.values() for task_id in ids)
    world = owner.world()
    assert world.agent_hash().startswith("304cf5ef059852e1")
    assert (world.user_hash() or "").startswith("e1f3a8637388808")
    for policy in (owner.policy, workflow.policy):
        assert policy.startswith("<main_policy>\n") and policy.endswith("\n</tech_support_policy>")
    assert owner.policy != workflow.policy
    check_tasks(owner)
