"""tau2-bench's shop and airline on a few records of our own: rules, quirks, words of errors.

Expected outcomes are facts about tau2-bench's own tools.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from envserver_environments.tau.domains.airline import AIRLINE
from envserver_environments.tau.domains.airline_data import FlightDB
from envserver_environments.tau.domains.database import Base, Database, hash_of
from envserver_environments.tau.domains.retail import RETAIL
from envserver_environments.tau.domains.retail_data import RetailDB
from envserver_environments.tau.domains.world import Domain, DomainKind, World
from envserver_environments.tau.episodes import Episode, EpisodeRules
from envserver_environments.tau.tasks import TauTask
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples

ADDRESS = {
    "address1": "1 Elm St",
    "address2": "",
    "city": "Ely",
    "country": "USA",
    "state": "NV",
    "zip": "89301",
}


def variant(item_id: str, price: float, color: str, *, available: bool = True) -> dict[str, Any]:
    return {
        "item_id": item_id,
        "price": price,
        "options": {"color": color},
        "available": available,
    }


def order(number: str, status: str, method: str, *items: tuple[str, float]) -> dict[str, Any]:
    paid = round(sum(price for _, price in items), 2)
    return {
        "order_id": number,
        "user_id": "ann_lee_1",
        "address": ADDRESS,
        "items": [
            {"name": "Cup", "product_id": "P", "item_id": i, "price": price, "options": {}}
            for i, price in items
        ],
        "status": status,
        "fulfillments": [],
        "payment_history": [
            {"transaction_type": "payment", "amount": paid, "payment_method_id": method}
        ],
    }


SHOP: dict[str, Any] = {
    "products": {
        "P": {
            "name": "Cup",
            "product_id": "P",
            "variants": {
                "red": variant("red", 10.1, "red"),
                "blue": variant("blue", 12.4, "blue"),
                "gold": variant("gold", 99.0, "gold"),
                "gone": variant("gone", 11.0, "none", available=False),
            },
        }
    },
    "users": {
        "ann_lee_1": {
            "user_id": "ann_lee_1",
            "name": {"first_name": "Ann", "last_name": "Lee"},
            "address": ADDRESS,
            "email": "ann@example.com",
            "payment_methods": {
                "card": {"source": "credit_card", "id": "card", "brand": "visa", "last_four": "1"},
                "gift": {"source": "gift_card", "id": "gift", "balance": 30},
                "pal": {"source": "paypal", "id": "pal"},
            },
            "orders": ["#1", "#2", "#3"],
        }
    },
    "orders": {
        "#1": order("#1", "pending", "gift", ("red", 10.1), ("red", 10.1), ("blue", 12.4)),
        "#2": order("#2", "delivered", "card", ("red", 10.1), ("blue", 12.4)),
        "#3": order("#3", "processed", "card", ("red", 10.1)),
    },
}


def seats(count: int) -> dict[str, int]:
    return {"basic_economy": count, "economy": count, "business": count}


def flight(number: str, origin: str, destination: str, leaves: str, lands: str) -> dict[str, Any]:
    prices = {"basic_economy": 50, "economy": 100, "business": 300}
    day = {"status": "available", "available_seats": seats(2), "prices": prices}
    return {
        "flight_number": number,
        "origin": origin,
        "destination": destination,
        "scheduled_departure_time_est": leaves,
        "scheduled_arrival_time_est": lands,
        "dates": {
            "2024-05-20": day,
            "2024-05-21": day,
            "2024-05-14": {"status": "cancelled"},
        },
    }


SKY: dict[str, Any] = {
    "flights": {
        "F1": flight("F1", "JFK", "ATL", "08:00:00", "10:00:00"),
        "F2": flight("F2", "ATL", "SEA", "11:00:00", "15:00:00"),
        "F3": flight("F3", "JFK", "ATL", "22:00:00", "00:30:00+1"),
    },
    "users": {
        "bo_ray_2": {
            "user_id": "bo_ray_2",
            "name": {"first_name": "Bo", "last_name": "Ray"},
            "address": ADDRESS,
            "email": "bo@example.com",
            "dob": "1990-01-01",
            "payment_methods": {
                "card": {"source": "credit_card", "id": "card", "brand": "visa", "last_four": "2"},
                "gift": {"source": "gift_card", "id": "gift", "amount": 120},
                "cert": {"source": "certificate", "id": "cert", "amount": 250},
            },
            "saved_passengers": [],
            "membership": "gold",
            "reservations": ["R1"],
        }
    },
    "reservations": {
        "R1": {
            "reservation_id": "R1",
            "user_id": "bo_ray_2",
            "origin": "JFK",
            "destination": "ATL",
            "flight_type": "one_way",
            "cabin": "economy",
            "flights": [
                {
                    "flight_number": "F1",
                    "origin": "JFK",
                    "destination": "ATL",
                    "date": "2024-05-20",
                    "price": 80,
                }
            ],
            "passengers": [{"first_name": "Bo", "last_name": "Ray", "dob": "1990-01-01"}],
            "payment_history": [{"payment_id": "card", "amount": 80}],
            "created_at": "2024-05-01T00:00:00",
            "total_baggages": 1,
            "nonfree_baggages": 0,
            "insurance": "no",
        }
    },
}


def domain_of(kind: DomainKind, model: Any, content: Any) -> Domain:
    base = Base(model, content, kind.agent.keyed)
    return Domain(kind, agent_base=base, user_base=None, policy="")


RETAIL_DOMAIN = domain_of(RETAIL, RetailDB, SHOP)
AIRLINE_DOMAIN = domain_of(AIRLINE, FlightDB, SKY)


def asked(world: World, name: str, **arguments: Any) -> Any:
    """What a call gives: parsed where it is JSON; errors as they are."""
    result = world.call("assistant", name, arguments)
    assert result.error == result.content.startswith("Error: ")
    try:
        return json.loads(result.content)
    except ValueError:
        return result.content


@pytest.fixture
def shop() -> World:
    return RETAIL_DOMAIN.world()


@pytest.fixture
def sky() -> World:
    return AIRLINE_DOMAIN.world()


def balance(world: World) -> float:
    methods = asked(world, "get_user_details", user_id="ann_lee_1")["payment_methods"]
    return float(methods["gift"]["balance"])


def test_a_cancelled_order_is_refunded(shop: World) -> None:
    cancel = {"order_id": "#1", "reason": "no longer needed"}
    assert asked(shop, "cancel_pending_order", **cancel | {"reason": "why"}) == (
        "Error: Invalid reason"
    )
    cancelled = asked(shop, "cancel_pending_order", **cancel)
    assert cancelled["status"] == "cancelled"
    assert [p["transaction_type"] for p in cancelled["payment_history"]] == ["payment", "refund"]
    assert balance(shop) == 62.6
    assert asked(shop, "cancel_pending_order", **cancel) == (
        "Error: Non-pending order cannot be cancelled"
    )


def test_all_modified_items_become_the_last_one(shop: World) -> None:
    modified = asked(
        shop,
        "modify_pending_order_items",
        order_id="#1",
        item_ids=["red", "blue"],
        new_item_ids=["blue", "red"],
        payment_method_id="gift",
    )
    # The first "blue" is by then the item that was red before.
    assert [item["item_id"] for item in modified["items"]] == ["red", "red", "blue"]
    assert [item["price"] for item in modified["items"]] == [10.1, 10.1, 12.4]
    assert modified["items"][0]["options"] == {"color": "red"}
    assert modified["status"] == "pending (item modified)"
    assert modified["payment_history"][-1] == {
        "transaction_type": "refund",
        "amount": 0.0,
        "payment_method_id": "gift",
    }


def test_differences_are_paid_unrounded_and_balances_rounded(shop: World) -> None:
    change = {"order_id": "#1", "item_ids": ["red"], "payment_method_id": "gift"}
    modified = asked(shop, "modify_pending_order_items", **change, new_item_ids=["blue"])
    assert modified["payment_history"][-1]["amount"] == 12.4 - 10.1 != 2.3
    assert balance(shop) == 27.7


@pytest.mark.parametrize(
    ("items", "new", "method", "error"),
    [
        (["red", "red", "red"], ["blue"] * 3, "card", "red not found"),
        (["red"], [], "card", "The number of items to be exchanged should match"),
        (["red"], ["red"], "card", "The new item id should be different from the old item id"),
        (["red"], ["none"], "card", "Variant not found"),
        (["red"], ["gone"], "card", "New item gone not found or available"),
        (["red"], ["gold"], "gift", "Insufficient gift card balance to pay for the new item"),
        (["red"], ["blue"], "none", "Payment method not found"),
        (5, ["blue"], "card", "'int' object is not iterable"),
    ],
)
def test_what_modifying_items_refuses(
    shop: World, items: Any, new: Any, method: str, error: str
) -> None:
    refused = asked(
        shop,
        "modify_pending_order_items",
        order_id="#1",
        item_ids=items,
        new_item_ids=new,
        payment_method_id=method,
    )
    assert refused == f"Error: {error}"
    assert shop.same_as(RETAIL_DOMAIN.world())


def test_exchanges_and_returns_of_delivered_orders(shop: World) -> None:
    exchanged = asked(
        shop,
        "exchange_delivered_order_items",
        order_id="#2",
        item_ids=["red", "blue"],
        new_item_ids=["gold", "red"],
        payment_method_id="card",
    )
    assert exchanged["exchange_items"] == ["blue", "red"]
    assert exchanged["exchange_new_items"] == ["gold", "red"]
    assert exchanged["exchange_price_difference"] == 86.6
    assert [item["item_id"] for item in exchanged["items"]] == ["red", "blue"]
    back = {"order_id": "#2", "item_ids": ["red"], "payment_method_id": "pal"}
    refused = asked(shop, "return_delivered_order_items", **back)
    assert refused == "Error: Non-delivered order cannot be returned"
    other = RETAIL_DOMAIN.world()
    refused = asked(other, "return_delivered_order_items", **back)
    assert refused == "Error: Payment method should be the original payment method"
    returned = asked(other, "return_delivered_order_items", **back | {"payment_method_id": "gift"})
    assert (returned["status"], returned["return_items"]) == ("return requested", ["red"])


def test_paying_otherwise_moves_the_money(shop: World) -> None:
    change = {"order_id": "#1", "payment_method_id": "card"}
    changed = asked(shop, "modify_pending_order_payment", **change)
    kinds = [(p["transaction_type"], p["payment_method_id"]) for p in changed["payment_history"]]
    assert kinds == [("payment", "gift"), ("payment", "card"), ("refund", "gift")]
    assert balance(shop) == 62.6
    again = asked(shop, "modify_pending_order_payment", **change)
    assert again == "Error: There should be exactly one payment for a pending order"


def test_wrong_arguments_are_told_in_pythons_and_pydantics_words(shop: World) -> None:
    assert asked(shop, "get_user_details") == (
        "Error: RetailTools.get_user_details() missing 1 required positional argument: 'user_id'"
    )
    assert asked(shop, "get_user_details", user_id="ann_lee_1", x=1) == (
        "Error: RetailTools.get_user_details() got an unexpected keyword argument 'x'"
    )
    assert asked(shop, "get_order_details", order_id=["#1"]) == "Error: unhashable type: 'list'"
    assert asked(shop, "nope") == "Error: Tool 'nope' not found."
    assert asked(shop, "get_user_details", requestor="user").endswith(
        "make_tool_call() got multiple values for keyword argument 'requestor'"
    )
    moved = asked(shop, "modify_user_address", **{**ADDRESS, "zip": 1}, user_id="ann_lee_1")
    assert moved.startswith("Error: 1 validation error for UserAddress\nzip\n  Input should be")
    assert shop.call("user", "get_user_details", {}).content == "Error: User tools not available"


def book(**changes: Any) -> dict[str, Any]:
    return {
        "user_id": "bo_ray_2",
        "origin": "JFK",
        "destination": "ATL",
        "flight_type": "one_way",
        "cabin": "economy",
        "flights": [{"flight_number": "F1", "date": "2024-05-20"}],
        "passengers": [{"first_name": "Bo", "last_name": "Ray", "dob": "1990-01-01"}],
        "payment_methods": [{"payment_id": "cert", "amount": 180}],
        "total_baggages": 1,
        "nonfree_baggages": 1,
        "insurance": "yes",
        **changes,
    }


def test_a_booking_takes_seats_money_and_the_next_id(sky: World) -> None:
    booked = asked(sky, "book_reservation", **book(total_baggages="1"))
    assert (booked["reservation_id"], booked["total_baggages"]) == ("HATHAT", 1)
    user = asked(sky, "get_user_details", user_id="bo_ray_2")
    assert user["reservations"] == ["R1", "HATHAT"]
    assert "cert" not in user["payment_methods"]
    found = asked(sky, "search_direct_flight", origin="JFK", destination="ATL", date="2024-05-20")
    assert [f["available_seats"]["economy"] for f in found] == [1, 2]
    pay = [{"payment_id": "gift", "amount": 180.0}]
    again = asked(sky, "book_reservation", **book(payment_methods=pay))
    assert again == "Error: Not enough balance in payment method gift"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"user_id": "x"}, "User x not found"),
        ({"cabin": "first"}, "1 validation error for Reservation\ncabin\n"),
        ({"passengers": [{"first_name": "Bo"}]}, "2 validation errors for Passenger\nlast_name\n"),
        ({"flights": [{"flight_number": "F9", "date": "2024-05-20"}]}, "Flight F9 not found"),
        (
            {"flights": [{"flight_number": "F1", "date": "2024-06-01"}]},
            "Flight F1 not found on date 2024-06-01",
        ),
        (
            {"flights": [{"flight_number": "F1", "date": "2024-05-14"}]},
            "Flight F1 not available on date 2024-05-14",
        ),
        ({"passengers": book()["passengers"] * 3}, "Not enough seats on flight F1"),
        (
            {"payment_methods": [{"payment_id": "card", "amount": 100}]},
            "Payment amount does not add up, total price is 180, but paid 100",
        ),
        ({"nonfree_baggages": "1"}, "unsupported operand type(s) for +=: 'int' and 'str'"),
        ({"flights": ["F1"]}, "'str' object has no attribute 'flight_number'"),
    ],
)
def test_what_a_booking_refuses(sky: World, changes: dict[str, Any], error: str) -> None:
    refused = asked(sky, "book_reservation", **book(**changes))
    assert refused.startswith(f"Error: {error}")
    assert sky.same_as(AIRLINE_DOMAIN.world())


def test_changed_flights_keep_what_stays_at_its_price(sky: World) -> None:
    legs = [
        {"flight_number": "F1", "date": "2024-05-20"},
        {"flight_number": "F2", "date": "2024-05-20"},
    ]
    change = {"reservation_id": "R1", "cabin": "economy", "flights": legs}
    refused = asked(sky, "update_reservation_flights", **change, payment_id="cert")
    assert refused == "Error: Certificate cannot be used to update reservation"
    changed = asked(sky, "update_reservation_flights", **change, payment_id="gift")
    assert [leg["price"] for leg in changed["flights"]] == [80, 100]
    assert changed["payment_history"][-1] == {"payment_id": "gift", "amount": 100}
    business = {**change, "cabin": "business", "flights": legs[:1]}
    refused = asked(sky, "update_reservation_flights", **business, payment_id="gift")
    assert refused == "Error: Gift card balance is not enough"
    unknown = {**change, "cabin": "first"}
    assert asked(sky, "update_reservation_flights", **unknown, payment_id="card") == (
        "Error: 'first'"
    )


@pytest.mark.parametrize("whole", [False, True])
def test_numbers_are_stored_as_they_are_given_or_whole(sky: World, whole: bool) -> None:
    bags = {"reservation_id": "R1", "nonfree_baggages": 0, "payment_id": "card"}
    asked(sky, "update_reservation_baggages", **bags, total_baggages=2)
    episode = Episode(AIRLINE_DOMAIN, TauTask(id="bags"), EpisodeRules(whole_numbers=whole))
    episode.say("Two bags, please.")
    arguments = {**bags, "total_baggages": 2.0}
    call = {"id": "1", "name": "update_reservation_baggages", "arguments": arguments}
    episode.say(None, [call])
    assert episode.world.same_as(sky) is whole
    assert (episode.world.agent_hash() == sky.agent_hash()) is whole


def test_connections_leave_after_the_arrival(sky: World) -> None:
    found = asked(sky, "search_onestop_flight", origin="JFK", destination="SEA", date="2024-05-20")
    legs = [[(leg["flight_number"], leg["date"]) for leg in pair] for pair in found]
    assert legs == [
        [("F1", "2024-05-20"), ("F2", "2024-05-20")],
        [("F3", "2024-05-20"), ("F2", "2024-05-21")],
    ]


def test_certificates_and_cancellations(sky: World) -> None:
    for number in (3221322, 3221323, 3221324):
        assert asked(sky, "send_certificate", user_id="bo_ray_2", amount=50) == (
            f"Certificate certificate_{number} added to user bo_ray_2 with amount 50."
        )
    refused = asked(sky, "send_certificate", user_id="bo_ray_2", amount=50)
    assert refused == "Error: Too many certificates"
    cancelled = asked(sky, "cancel_reservation", reservation_id="R1")
    assert [p["amount"] for p in cancelled["payment_history"]] == [80, -80]
    assert cancelled["status"] == "cancelled"


@pytest.mark.parametrize("domain", [RETAIL_DOMAIN, AIRLINE_DOMAIN], ids=lambda d: d.name)
def test_every_tool_and_argument_is_described(domain: Domain) -> None:
    for tool in domain.kind.agent.toolkit.tools().values():
        function = tool.schema["function"]
        assert len(function["description"]) > 10
        for described in function["parameters"]["properties"].values():
            assert described["description"]


SHOP_CALLS = st.one_of(
    st.tuples(
        st.just("modify_pending_order_items"),
        st.fixed_dictionaries(
            {
                "order_id": st.sampled_from(["#1", "#2"]),
                "item_ids": st.lists(st.sampled_from(["red", "blue"]), max_size=2),
                "new_item_ids": st.lists(st.sampled_from(["red", "blue", "gold"]), max_size=2),
                "payment_method_id": st.sampled_from(["card", "gift"]),
            }
        ),
    ),
    st.tuples(
        st.just("cancel_pending_order"),
        st.fixed_dictionaries(
            {"order_id": st.sampled_from(["#1", "#3"]), "reason": st.just("no longer needed")}
        ),
    ),
    st.tuples(
        st.just("modify_user_address"),
        st.fixed_dictionaries({key: st.sampled_from(["A", "B"]) for key in ADDRESS}).map(
            lambda address: {"user_id": "ann_lee_1", **address}
        ),
    ),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(SHOP_CALLS, max_size=4), st.lists(SHOP_CALLS, max_size=4))
def test_worlds_share_data_and_nothing_else(first: list[Any], second: list[Any]) -> None:
    worlds = [RETAIL_DOMAIN.world(), RETAIL_DOMAIN.world()]
    for world, calls in zip(worlds, (first, second), strict=True):
        for name, arguments in calls:
            world.call("assistant", name, arguments)
    hashes = [world.agent_hash() for world in worlds]
    assert hashes == [hash_of(world.agent.db.content()) for world in worlds]
    assert worlds[0].same_as(worlds[1]) == (hashes[0] == hashes[1])
    assert hash_of(Database(RETAIL_DOMAIN.agent_base).content()) == RETAIL_DOMAIN.agent_base.hash
