"""The telecom domain of tau: a phone company's records, a customer's phone, and what links them.

Most cases need only the small company that is shipped (mini_telecom); those of tau2-bench's own
data skip where ENVSERVER_TAU2_DATA names no folder and inspect_evals is not installed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.tau.domains.loading import data_folder, load_domain
from envserver_environments.tau.domains.mini_telecom import MINI_TELECOM
from envserver_environments.tau.domains.telecom.domain import TELECOM, TELECOM_WORKFLOW
from envserver_environments.tau.domains.telecom.tools_user import TelecomUserTools
from envserver_environments.tau.domains.world import Domain, World
from envserver_environments.tau.episodes import GREETING
from envserver_environments.tau.states import start
from envserver_environments.tau.tasks import TauTask, read_task
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples

from envserver import NotFoundError

SHIPPED = (
    Path(__file__).parents[3]
    / "environments"
    / "envserver_environments"
    / "tau"
    / "data"
    / "mini_telecom"
)
ADA = {"name": "Ada Okafor", "phone_number": "555-0201"}
LINE = {"customer_id": "C21", "line_id": "L21"}

PLAIN_TOOLS = [
    name
    for name, tool in TelecomUserTools.tools().items()
    if not tool.schema["function"]["parameters"].get("required")
]
"""The customer's tools without arguments."""


@pytest.fixture(scope="module")
def mini() -> Domain:
    return load_domain(MINI_TELECOM, SHIPPED)


@pytest.fixture(scope="module")
def tau2() -> Path:
    given_folder = os.environ.get("ENVSERVER_TAU2_DATA")
    try:
        return data_folder("telecom", Path(given_folder) if given_folder else None)
    except NotFoundError as error:
        pytest.skip(f"NOT CHECKED against tau2-bench's data: {error}")


def world_of(domain: Domain) -> World:
    world = domain.world()
    world.run_function("user", "set_user_info", ADA)
    return world


def met(world: World, task: TauTask) -> bool:
    criteria = task.evaluation_criteria
    assert criteria is not None
    return all(
        world.run_function(a.env_type, a.func_name, a.arguments) == a.assert_value
        for a in criteria.env_assertions or []
    )


def check_tasks(domain: Domain) -> None:
    """Reference actions fulfil every task; doing nothing fulfils none by assertions alone."""
    for row in domain.tasks.values():
        task = read_task(row)
        criteria = task.evaluation_criteria
        assert criteria is not None
        if criteria.reward_basis == ["ENV_ASSERTION"]:
            assert not met(start(domain, task), task), task.id
        world = start(domain, task)
        for action in criteria.actions or []:
            result = world.call(action.requestor, action.name, action.arguments)
            assert not result.error, (task.id, result.content)
        assert met(world, task), task.id


def test_every_task_of_ours_can_be_done_and_is_not_done_already(mini: Domain) -> None:
    assert len(mini.tasks) == 12
    check_tasks(mini)


def test_scripts_of_customers_use_his_tools_and_come_to_an_end(mini: Domain) -> None:
    for task_id, row in mini.tasks.items():
        rules = row["user_script"]
        assert rules[-1]["if"] == "always"
        assert any("###" in rule["say"] for rule in rules[:-1]), task_id
        world = start(mini, read_task(row))
        for rule in rules:
            assert not re.search(rule["if"], GREETING, re.IGNORECASE), task_id
            for call in rule.get("calls", ()):
                assert not world.call("user", call["name"], call["arguments"]).error, task_id


def test_order_matters_where_a_reset_needs_a_restart_after_it(mini: Domain) -> None:
    task = read_task(mini.tasks["access_point_broken"])
    world = start(mini, task)
    for name in ("reboot_device", "reset_apn_settings"):
        world.call("user", name, {})
    assert not met(world, task)
    assert "Resetting APN settings" in world.call("user", "reboot_device", {}).content
    assert met(world, task)


def test_a_payment_takes_both_sides(mini: Domain) -> None:
    world = world_of(mini)
    nothing_asked = world.call("user", "make_payment", {})
    assert nothing_asked.content == "You do not have a payment request."
    bill = {"customer_id": "C21", "bill_id": "B22"}
    assert not world.call("assistant", "send_payment_request", bill).error
    again = world.call("assistant", "send_payment_request", bill)
    assert again.content == "Error: A bill is already awaiting payment for this customer"
    asked = world.call("user", "check_payment_request", {})
    assert asked.content == "You have a payment request for bill B22 of 61.4 USD."
    world.call("user", "make_payment", {})
    assert '"status": "Paid"' in world.call("assistant", "get_details_by_id", {"id": "B22"}).content
    assert world.call("user", "check_payment_request", {}).content.startswith("No payment request")


@pytest.mark.parametrize(
    ("requestor", "name", "arguments", "content"),
    [
        ("assistant", "get_details_by_id", {"id": "X1"}, "Unknown ID format or type: X1"),
        ("assistant", "get_details_by_id", {"id": "L99"}, "Line with ID L99 not found"),
        ("assistant", "get_data_usage", {**LINE, "line_id": "L23"}, "Line L23 not found for"),
        ("assistant", "refuel_data", {**LINE, "gb_amount": -1}, "Refuel amount must be positive"),
        ("assistant", "resume_line", LINE, "Line must be suspended to resume"),
        ("assistant", "toggle_data", {}, "Tool 'toggle_data' not found."),
        ("user", "get_data_usage", LINE, "Tool 'get_data_usage' not found."),
        ("assistant", "refuel_data", LINE, "TelecomTools.refuel_data() missing 1 required"),
        ("user", "toggle_data", {"on": True}, "TelecomUserTools.toggle_data() got an unexpected"),
        ("user", "set_apn_settings", {"apn_settings": {"apn_name": "x"}}, "apn_name: "),
        ("user", "set_user_info", ADA, "Tool 'set_user_info' not found."),
    ],
)
def test_wrong_calls_are_answered_and_change_nothing(
    mini: Domain, requestor: Any, name: str, arguments: dict[str, Any], content: str
) -> None:
    world = world_of(mini)
    before = world.agent_hash(), world.user_hash()
    result = world.call(requestor, name, arguments)
    assert result.error and result.content.startswith(f"Error: {content}")
    assert (world.agent_hash(), world.user_hash()) == before


def test_what_is_used_up_can_be_bought(mini: Domain) -> None:
    world = world_of(mini)
    world.run_function("assistant", "set_data_usage", {**LINE, "data_used_gb": 12.0})
    assert world.call("user", "run_speed_test", {}).content.endswith("No Connection.")
    bought = world.call("assistant", "refuel_data", {**LINE, "gb_amount": 2})
    assert '"charge": "7.0"' in bought.content  # numbers of plain results are strings
    assert world.call("user", "run_speed_test", {}).content.startswith("Speed Test Result: 275.00")
    draft = world.call("assistant", "get_details_by_id", {"id": "B23"})
    assert '"total_due": 7.0' in draft.content  # numbers of records are not


@pytest.mark.parametrize(("mode", "rate"), [("2g_only", 0.05), ("3g_only", 1.5), ("4g_only", 44.0)])
def test_speed_goes_by_technology_and_signal(mini: Domain, mode: str, rate: float) -> None:
    world = world_of(mini)
    world.call("user", "set_network_mode_preference", {"mode": mode})
    assert f" {rate:.2f} Mbps" in world.call("user", "run_speed_test", {}).content
    able = world.call("user", "can_send_mms", {}).content
    assert ("cannot" in able) == (mode == "2g_only")


@settings(max_examples=examples(60), deadline=None)
@given(names=st.lists(st.sampled_from(PLAIN_TOOLS), max_size=12))
def test_a_customer_can_press_anything(names: list[str]) -> None:
    """No call fails, each tells the state after it, and nothing reaches the company or others."""
    domain = load_domain(MINI_TELECOM, SHIPPED)
    world = world_of(domain)
    for name in names:
        result = world.call("user", name, {})
        assert not result.error
        if domain.user_base and TelecomUserTools.tools()[name].mutates and "\n" in result.content:
            bar = world.call("user", "check_status_bar", {}).content
            assert result.content.endswith(bar)
    assert world.agent_hash() == domain.agent_base.hash
    assert domain.world().user_hash() == domain.user_base.hash if domain.user_base else False


@settings(max_examples=examples(30), deadline=None)
@given(name=st.sampled_from([name for name in PLAIN_TOOLS if name.startswith("toggle_")]))
def test_a_switch_pressed_twice_is_where_it_was(name: str) -> None:
    world = world_of(load_domain(MINI_TELECOM, SHIPPED))
    before = world.user_hash()
    world.call("user", name, {})
    assert world.user_hash() != before
    world.call("user", name, {})
    assert world.user_hash() == before


def test_all_tasks_of_tau2_can_be_done_and_are_not_done_already(tau2: Path) -> None:
    domain = load_domain(TELECOM, tau2)
    assert len(domain.tasks) == len(domain.splits["full"]) == 2285
    assert all(task_id in domain.tasks for ids in domain.splits.values() for task_id in ids)
    check_tasks(domain)


def test_data_of_tau2_have_its_hashes_and_both_policies(tau2: Path) -> None:
    domain = load_domain(TELECOM, tau2)
    world = domain.world()
    assert world.agent_hash().startswith("304cf5ef059852e1")
    assert (world.user_hash() or "").startswith("e1f3a8637388808")
    workflow = load_domain(TELECOM_WORKFLOW, tau2)
    for policy in (domain.policy, workflow.policy):
        assert policy.startswith("<main_policy>\n")
        assert policy.endswith("\n</tech_support_policy>")
    assert domain.policy != workflow.policy
