"""The domains of tau: rules, quirks and words of errors of tau2-bench's own tools.

The shop, the airline and what is expected of their tools, in tau_calls.json, are records of our own
and facts about tau2-bench. The phone company is the shipped one (mini_telecom).
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from envserver_environments.tau.domains.airline import AIRLINE, FlightDB
from envserver_environments.tau.domains.database import Base, Database, hash_of
from envserver_environments.tau.domains.loading import find_domain
from envserver_environments.tau.domains.retail import RETAIL, RetailDB
from envserver_environments.tau.domains.telecom.tools_user import TelecomUserTools
from envserver_environments.tau.domains.toolkit import calculate, result_text
from envserver_environments.tau.domains.world import Domain, DomainKind, World
from envserver_records.tasks import Json
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.extent import examples

CASES = cases_of(__file__, "tau_calls.json")


def domain_of(kind: DomainKind, model: Any, content: Any) -> Domain:
    base = Base(model, content, kind.agent.keyed)
    return Domain(kind, agent_base=base, user_base=None, policy="")


SHOP, SKY = domain_of(RETAIL, RetailDB, CASES["shop"]), domain_of(AIRLINE, FlightDB, CASES["sky"])
DOMAINS = {"shop": SHOP, "sky": SKY, "phone": find_domain("mini_telecom", None)}


def world_of(domain: str) -> World:
    world = DOMAINS[domain].world()
    if domain == "phone":
        ada = {"name": "Ada Okafor", "phone_number": "555-0201"}
        world.run_function("user", "set_user_info", ada)
    return world


def called(world: World, call: str, arguments: Json) -> Any:
    """Calls "assistant TOOL" or "user TOOL"; of a booking, the arguments are changes."""
    who, _, name = call.partition(" ")
    given = CASES["booking"] | arguments if name == "book_reservation" else arguments
    result = world.call(who, name, given)  # type: ignore[arg-type]
    assert result.error == result.content.startswith("Error: ")
    return result


def fits(text: str, expected: str) -> bool:
    """Is `text` the expected one, in which an ellipsis stands for anything?"""
    return bool(re.fullmatch(".*".join(map(re.escape, expected.split("…"))), text, re.DOTALL))


def at(value: Any, path: str) -> Any:
    """What lies at a path such as `items.*.price` or `payment_history.-1`."""
    name, _, rest = path.partition(".")
    if name == "*":
        return [at(one, rest) for one in value]
    inner = value[int(name) if isinstance(value, list) else name]
    return at(inner, rest) if rest else inner


@pytest.mark.parametrize("name", CASES["calls"])
def test_calls_do_and_say_what_tau2s_do(name: str) -> None:
    world = world_of(name.partition(":")[0])
    for call, arguments, expected in CASES["calls"][name]:
        if call.startswith("function "):
            world.run_function("assistant", call.removeprefix("function "), arguments)
            continue
        content = called(world, call, arguments).content
        if isinstance(expected, str):
            assert fits(content, expected.removeprefix("!")) != expected.startswith("!"), content
        else:
            found = json.loads(content)
            assert {path: at(found, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("domain", "call", "arguments", "error"),
    CASES["refused"],
    ids=[f"{row[0]}-{row[1]}-{number}" for number, row in enumerate(CASES["refused"])],
)
def test_wrong_calls_are_told_in_tau2s_words_and_change_nothing(
    domain: str, call: str, arguments: Json, error: str
) -> None:
    world, fresh = world_of(domain), world_of(domain)
    assert fits(called(world, call, arguments).content, f"Error: {error}")
    assert world.same_as(fresh)
    assert (world.agent_hash(), world.user_hash()) == (fresh.agent_hash(), fresh.user_hash())


def call_of(name: str, **arguments: Any) -> Any:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


ADDRESS = CASES["shop"]["users"]["ann_lee_1"]["address"]
SHOP_CALLS = st.one_of(
    call_of(
        "modify_pending_order_items",
        order_id=st.sampled_from(["#1", "#2"]),
        item_ids=st.lists(st.sampled_from(["red", "blue"]), max_size=2),
        new_item_ids=st.lists(st.sampled_from(["red", "blue", "gold"]), max_size=2),
        payment_method_id=st.sampled_from(["card", "gift"]),
    ),
    call_of(
        "cancel_pending_order",
        order_id=st.sampled_from(["#1", "#3"]),
        reason=st.just("no longer needed"),
    ),
    call_of(
        "modify_user_address",
        user_id=st.just("ann_lee_1"),
        **{key: st.sampled_from(["A", "B"]) for key in ADDRESS},
    ),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(SHOP_CALLS, max_size=4), st.lists(SHOP_CALLS, max_size=4))
def test_worlds_share_data_and_nothing_else(first: list[Any], second: list[Any]) -> None:
    worlds = [SHOP.world(), SHOP.world()]
    for world, calls in zip(worlds, (first, second), strict=True):
        for name, arguments in calls:
            world.call("assistant", name, arguments)
    hashes = [world.agent_hash() for world in worlds]
    assert hashes == [hash_of(world.agent.db.content()) for world in worlds]
    assert worlds[0].same_as(worlds[1]) == (hashes[0] == hashes[1])
    assert hash_of(Database(SHOP.agent_base).content()) == SHOP.agent_base.hash


TOOLS = TelecomUserTools.tools()
BUTTONS = [
    name for name, t in TOOLS.items() if not t.schema["function"]["parameters"].get("required")
]
"""The customer's tools without arguments."""


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from(BUTTONS), max_size=12))
def test_a_customer_can_press_anything(names: list[str]) -> None:
    """No call fails, each tells the state after it, and nothing reaches the company or others."""
    world, domain = world_of("phone"), DOMAINS["phone"]
    for name in names:
        result = world.call("user", name, {})
        assert not result.error
        if TOOLS[name].mutates and "\n" in result.content:
            assert result.content.endswith(world.call("user", "check_status_bar", {}).content)
    assert domain.user_base is not None
    assert world.agent_hash() == domain.agent_base.hash
    assert domain.world().user_hash() == domain.user_base.hash


@pytest.mark.parametrize("name", [name for name in BUTTONS if name.startswith("toggle_")])
def test_a_switch_pressed_twice_is_where_it_was(name: str) -> None:
    world = world_of("phone")
    before = world.user_hash()
    world.call("user", name, {})
    assert world.user_hash() != before
    world.call("user", name, {})
    assert world.user_hash() == before


@pytest.mark.parametrize(("result", "text"), CASES["results"])
def test_how_results_are_written(result: Any, text: str) -> None:
    assert result_text(result) == text


def outcome(expression: str, compute: Callable[[str], str]) -> str:
    try:
        return compute(expression)
    except Exception as error:  # noqa: BLE001 - errors are outcomes here
        return f"Error: {error}"


def by_python(expression: str) -> str:
    return str(round(float(eval(expression, {"__builtins__": None}, {})), 2))


@settings(max_examples=examples(300), deadline=None)
@given(st.text("0123456789+-*/(). ", max_size=9).filter(lambda text: "**" not in text))
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_calculate_is_python_on_arithmetic(expression: str) -> None:
    assert outcome(expression, calculate) == outcome(expression, by_python)


@pytest.mark.parametrize(("expression", "result"), CASES["calculated"])
def test_what_calculate_gives(expression: str, result: str) -> None:
    assert outcome(expression, calculate) == result
