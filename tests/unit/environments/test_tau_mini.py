"""Our own shop, airline and to-do lists of tau: their data are sound, every task can be done as its
policy asks for, doing less, more or other things pays nothing, and scripted customers play along.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from envserver_environments.tau.domains.kinds import find_domain
from envserver_environments.tau.domains.world import Domain
from envserver_environments.tau.env import Tau
from envserver_environments.tau.episodes import GREETING, TRANSFER, Episode, is_user_stop
from envserver_environments.tau.evaluation import Strictness, evaluate, information_given
from envserver_environments.tau.evaluation.confirmation import unconfirmed_writes
from envserver_environments.tau.evaluation.proof import HAND_OVER
from envserver_environments.tau.evaluation.rewards import pays_for_nothing
from envserver_environments.tau.tasks import Action, Criteria, TauTask, read_task
from envserver_environments.tau.users import ScriptedCustomer

SIZES = {"mini_retail": 12, "mini_airline": 12, "mini_mock": 4}
SHOPS = ("mini_retail", "mini_airline")


def domain(name: str) -> Domain:
    return find_domain(name, None)


def tasks() -> Iterator[tuple[Domain, TauTask, Criteria]]:
    for name in SIZES:
        for row in domain(name).tasks.values():
            task = read_task(row)
            assert task.evaluation_criteria is not None
            yield domain(name), task, task.evaluation_criteria


def writes(owner: Domain, criteria: Criteria) -> list[Action]:
    known = owner.world()
    return [
        action
        for action in criteria.actions or ()
        if (tool := known.tool(action.name)) is not None and tool.mutates
    ]


@pytest.mark.parametrize("name", SIZES)
def test_a_domain_has_its_tasks_in_two_splits(name: str) -> None:
    splits = domain(name).splits
    assert list(domain(name).tasks) == splits["base"]
    assert sorted(splits["train"] + splits["test"]) == sorted(splits["base"])
    assert len(splits["base"]) == SIZES[name]
    assert len(splits["test"]) == SIZES[name] // 4


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
            assert (part["origin"], part["destination"]) == (
                flight["origin"],
                flight["destination"],
            )
            assert part["date"] in flight["dates"]
        price = people * sum(part["price"] for part in reservation["flights"])
        price += 30 * people * (reservation["insurance"] == "yes")
        price += 50 * reservation["nonfree_baggages"]
        assert reservation["payment_history"][0]["amount"] == price
        assert reservation["payment_history"][0]["payment_id"] in owner["payment_methods"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", SIZES)
def test_only_what_is_expected_pays(name: str, strict: bool) -> None:
    env = Tau(Tau.Config(domain=name, task_split="base", strict=strict))
    for task in env.tasks("train"):
        known = list(env.known_results(task))
        assert known[0].name == "gold"
        for one in known:
            score = env.score(task, one.result)
            assert score.reward is not None
            assert one.least <= score.reward <= one.most, (task.id, one.name)


def test_expected_actions_go_without_an_error() -> None:
    for owner, task, criteria in tasks():
        episode = Episode(owner, task)
        for action in criteria.actions or ():
            result = episode.world.call(action.requestor, action.name, action.arguments)
            assert not result.error, (task.id, result.content)


def test_no_task_pays_for_nothing_or_for_saying_all_there_is_to_say() -> None:
    for owner, task, criteria in tasks():
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


def test_what_is_to_be_said_is_told_neither_by_the_policy_nor_by_the_customer() -> None:
    for owner, task, criteria in tasks():
        for text in criteria.communicate_info or ():
            opening = owner.tasks[task.id]["user_script"][-1]["say"]
            for known in (owner.policy, json.dumps(task.user_scenario), opening):
                told = [{"role": "assistant", "content": known}]
                assert information_given([text], told, Strictness.STRICT) == [False], task.id


@pytest.mark.parametrize("name", SHOPS)
def test_the_mix_of_tasks(name: str) -> None:
    refused, handed_over, told = 0, 0, 0
    for owner, _, criteria in tasks():
        if owner.name == name and not writes(owner, criteria):
            over = any(action.name == HAND_OVER for action in criteria.actions or ())
            handed_over += over
            refused += not over
            assert "ACTION" in criteria.reward_basis  # a look-up proves that it is no guess
        told += owner.name == name and bool(criteria.communicate_info)
    assert (refused, handed_over) == (3, 2)  # one of the three is only a question
    assert told >= 5


@pytest.mark.parametrize(
    ("name", "task_id"),
    [
        ("mini_retail", "card_before_kettle"),
        ("mini_airline", "cheaper_flight_pays_the_bags"),
    ],
)
def test_where_one_change_makes_the_next_possible(name: str, task_id: str) -> None:
    owner = domain(name)
    task = read_task(owner.tasks[task_id])
    assert task.evaluation_criteria is not None
    first, second = writes(owner, task.evaluation_criteria)
    world = owner.world()
    early = world.call("assistant", second.name, second.arguments)
    assert early.error
    assert "gift card" in early.content.lower()
    assert not world.call("assistant", first.name, first.arguments).error
    assert not world.call("assistant", second.name, second.arguments).error


def played(owner: Domain, row: Mapping[str, Any]) -> tuple[Episode, list[str]]:
    """A polite assistant asks who writes, proposes, does what it may, and says what is to be said.

    Returns:
        The conversation, and what the customer answered to the proposal or the refusal.
    """
    task = read_task(row)
    criteria = task.evaluation_criteria
    assert criteria is not None
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
        task = read_task(row)
        over = row["evaluation_criteria"]["actions"][-1]["name"] == HAND_OVER
        assert (answers[-1] == TRANSFER) == over, task_id
        known = {name: tool.mutates for name, tool in owner.world().agent.tools().items()}
        assert not unconfirmed_writes(episode.messages, known.__getitem__), (task_id, answers)
        for rule in Strictness:
            found = evaluate(owner, task, episode.messages, "user_stop", strictness=rule)
            assert found.reward == 1, (task_id, found.components)


def test_scripts_come_to_an_end_and_customers_use_their_own_tools() -> None:
    for name in SIZES:
        for task_id, row in domain(name).tasks.items():
            rules = row["user_script"]
            assert rules[-1]["if"] == "always"
            assert any(is_user_stop({"content": rule["say"]}) for rule in rules[:-1]), task_id
            world = domain(name).world()
            for rule in rules[:-1]:
                assert not re.search(rule["if"], GREETING, re.IGNORECASE), task_id
                for call in rule.get("calls", ()):
                    assert not world.call("user", call["name"], call["arguments"]).error, task_id


def test_a_customer_changes_his_mind_before_something_is_cancelled() -> None:
    row = domain("mini_retail").tasks["rather_keep_it"]
    customer = ScriptedCustomer(row["user_script"])
    customer.hear(GREETING)
    assert "cancel order #W7300117" in str(customer.say().content)
    customer.hear("I would cancel the whole order, 160.00 go back to PayPal. Do you confirm?")
    assert "do not cancel it" in str(customer.say().content)
    customer.hear("The white bookshelf is 10.00 cheaper, back to PayPal. Shall I change it?")
    assert str(customer.say().content).startswith("Yes")


def test_a_customer_looks_into_his_inbox_and_dismisses_what_is_settled() -> None:
    owner = domain("mini_mock")
    row = owner.tasks["what_the_inbox_says"]
    episode, customer = Episode(owner, read_task(row)), ScriptedCustomer(row["user_script"])

    def answered(*said: str) -> str:
        for words in said:
            episode.say(words)
            customer.hear(words)
        turn = customer.say()
        if turn.calls:
            customer.receive(episode.say(None, turn.calls))
            turn = customer.say()
        episode.say(turn.content)
        return str(turn.content)

    answered()
    assert "task_4" in answered("Please look into your inbox and name what is completed.")
    for name in ("task_4", "task_1"):
        call = {"name": "update_task_status", "arguments": {"task_id": name, "status": "completed"}}
        assert not episode.say(None, [call])[0]["error"]
    assert "###STOP###" in answered("Both are marked. Please dismiss the notifications about them.")
    found = evaluate(owner, episode.task, episode.messages, str(episode.ending))
    assert found.reward == 1, found.components
