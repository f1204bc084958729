"""tau2-bench's domain `retail`. Names, parameters, checks and their order, outcomes and the words
of errors are those of src/tau2/domains/retail/tools.py, quirks included (they are in the expected
hashes): `modify_pending_order_items` gives every item price and options of the *last* new one, its
payment is not rounded, and `exchange_delivered_order_items` sorts the two lists separately."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from .database import Record
from .toolkit import DatabaseRow, Toolkit, calculate, calculation, handover, tool
from .world import DomainKind, Side

# Names and order of the fields are upstream's: results and hashes are made of them.

Reason = Literal["no longer needed", "ordered by mistake"]
Status = Literal[
    "processed",
    "pending",
    "pending (item modified)",
    "delivered",
    "cancelled",
    "exchange requested",
    "return requested",
]


class Variant(BaseModel):
    item_id: str
    options: dict[str, str]
    available: bool
    price: float


class Product(BaseModel):
    name: str
    product_id: str
    variants: dict[str, Variant]


class UserName(BaseModel):
    first_name: str
    last_name: str


class UserAddress(BaseModel):
    address1: str
    address2: str
    city: str
    country: str
    state: str
    zip: str


class CreditCard(BaseModel):
    source: Literal["credit_card"]
    id: str
    brand: str
    last_four: str


class Paypal(BaseModel):
    source: Literal["paypal"]
    id: str


class GiftCard(BaseModel):
    source: Literal["gift_card"]
    id: str
    balance: float


class User(BaseModel):
    user_id: str
    name: UserName
    address: UserAddress
    email: str
    payment_methods: dict[str, CreditCard | Paypal | GiftCard]
    orders: list[str]


class OrderItem(BaseModel):
    name: str
    product_id: str
    item_id: str
    price: float
    options: dict[str, str]


class OrderFulfillment(BaseModel):
    tracking_id: list[str]
    item_ids: list[str]


class OrderPayment(BaseModel):
    transaction_type: Literal["payment", "refund"]
    amount: float
    payment_method_id: str


class Order(BaseModel):
    order_id: str
    user_id: str
    address: UserAddress
    items: list[OrderItem]
    status: Status
    fulfillments: list[OrderFulfillment]
    payment_history: list[OrderPayment]
    cancel_reason: Reason | None = None
    exchange_items: list[str] | None = None
    exchange_new_items: list[str] | None = None
    exchange_payment_method_id: str | None = None
    exchange_price_difference: float | None = None
    return_items: list[str] | None = None
    return_payment_method_id: str | None = None


class RetailDB(BaseModel):
    model_config = ConfigDict(extra="forbid")

    products: dict[str, Product]
    users: dict[str, User]
    orders: dict[str, Order]


class RetailTools(Toolkit):
    words = {
        "order_id": "Id of the order, with the '#' that it starts with, such as '#W0000000'.",
        "user_id": "Id of the user, such as 'sara_doe_496'.",
        "payment_method_id": "Id of the method by which a difference in price is paid or refunded, "
        "such as 'gift_card_0000000'; the user's and the order's details have it.",
        "new_item_ids": "Ids of the items to get for them, in the same order, each of the same "
        "product; may have duplicates.",
        "address1": "First line of the address, such as '123 Main St'.",
        "address2": "Second line, such as 'Apt 1', or ''.",
        "city": "City, such as 'San Francisco'.",
        "state": "State, such as 'CA'.",
        "country": "Country, such as 'USA'.",
        "zip": "Zip code, such as '12345'.",
    }

    @calculation
    def calculate(self, expression: str) -> str:
        return calculate(expression)

    @tool("write", reason="Why: 'no longer needed' or 'ordered by mistake'.")
    def cancel_pending_order(self, order_id: str, reason: str) -> DatabaseRow:
        """Cancels a pending order; one that was processed or delivered cannot be cancelled. Explain
        the details and get the user's explicit yes before. The payment is refunded: to a gift card
        at once, else within 5 to 7 business days. Returns the order as it is then."""
        order = self._order(order_id)
        if order["status"] != "pending":
            raise ValueError("Non-pending order cannot be cancelled")
        if reason not in {"no longer needed", "ordered by mistake"}:
            raise ValueError("Invalid reason")
        refunds = []
        for payment in order["payment_history"]:
            method_id = payment["payment_method_id"]
            refunds.append(_payment("refund", payment["amount"], method_id))
            self._change_balance(order["user_id"], method_id, payment["amount"])
        order = self.db.edit("orders", order_id)
        order["status"] = "cancelled"
        order["cancel_reason"] = reason
        order["payment_history"].extend(refunds)
        return DatabaseRow(order)

    @tool(
        "write",
        item_ids="Ids of the items to give back, each such as '1008292230'; may have duplicates.",
    )
    def exchange_delivered_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> DatabaseRow:
        """Exchanges items of a delivered order for others of the same products. A delivered order
        can be exchanged or returned only once. Explain the details and get the user's explicit yes
        before."""
        order = self._order(order_id)
        if order["status"] != "delivered":
            raise ValueError("Non-delivered order cannot be exchanged")
        _check_items(order, item_ids, "Number of {} not found.")
        if len(item_ids) != len(new_item_ids):
            raise ValueError("The number of items to be exchanged should match.")
        difference: Any = 0
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            item, variant = self._replacement(order, item_id, new_item_id)
            difference += variant["price"] - item["price"]
        difference = round(difference, 2)
        method = self._payment_method(order["user_id"], payment_method_id)
        _check_balance(method, difference, "the price difference")
        order = self.db.edit("orders", order_id)
        order["status"] = "exchange requested"
        order["exchange_items"] = sorted(item_ids)
        order["exchange_new_items"] = sorted(new_item_ids)
        order["exchange_payment_method_id"] = payment_method_id
        order["exchange_price_difference"] = difference
        return DatabaseRow(order)

    @tool(
        "read",
        first_name="First name of the customer, such as 'John'.",
        last_name="Last name of the customer, such as 'Doe'.",
        zip="Zip code of the customer, such as '12345'.",
    )
    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Finds the id of a user by name and zip code; an error if there is none. Try the email
        first, and this only if that fails or the user does not remember it."""
        for user in self.db.rows("users"):
            name = user["name"]
            if (
                name["first_name"].lower() == first_name.lower()
                and name["last_name"].lower() == last_name.lower()
                and user["address"]["zip"] == zip
            ):
                return str(user["user_id"])
        raise ValueError("User not found")

    @tool("read", email="Email of the user, such as 'something@example.com'.")
    def find_user_id_by_email(self, email: str) -> str:
        """Finds the id of a user by email; an error if there is none."""
        for user in self.db.rows("users"):
            if user["email"].lower() == email.lower():
                return str(user["user_id"])
        raise ValueError("User not found")

    @tool("read")
    def get_order_details(self, order_id: str) -> DatabaseRow:
        """Shows an order with its status."""
        return DatabaseRow(self._order(order_id))

    @tool("read", product_id="Id of the product (not of an item), such as '6086499569'.")
    def get_product_details(self, product_id: str) -> DatabaseRow:
        """Shows a product with all its variants."""
        return DatabaseRow(self._product(product_id))

    @tool("read", item_id="Id of the item (not of a product), such as '6086499569'.")
    def get_item_details(self, item_id: str) -> DatabaseRow:
        """Shows an item: its options, price, and whether it is available."""
        for product in self.db.rows("products"):
            if item_id in product["variants"]:
                return DatabaseRow(product["variants"][item_id])
        raise ValueError("Item not found")

    @tool("read")
    def get_user_details(self, user_id: str) -> DatabaseRow:
        """Shows a user with the ids of all orders."""
        return DatabaseRow(self._user(user_id))

    @tool("read")
    def list_all_product_types(self) -> str:
        """Lists the names of all product types with their product ids. Each comes in several items
        that differ in their options."""
        names = {product["name"]: product["product_id"] for product in self.db.rows("products")}
        return json.dumps(names, sort_keys=True)

    @tool("write")
    def modify_pending_order_address(
        self,
        order_id: str,
        address1: str,
        address2: str,
        city: str,
        state: str,
        country: str,
        zip: str,
    ) -> DatabaseRow:
        """Changes the shipping address of a pending order. Explain the details and get the user's
        explicit yes before."""
        if "pending" not in self._order(order_id)["status"]:
            raise ValueError("Non-pending order cannot be modified")
        address = _address(address1, address2, city, state, country, zip)
        order = self.db.edit("orders", order_id)
        order["address"] = address
        return DatabaseRow(order)

    @tool(
        "write",
        item_ids="Ids of the items to change, each such as '1008292230'; may have duplicates.",
    )
    def modify_pending_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> DatabaseRow:
        """Exchanges items of a pending order for others of the same products. It can be done only
        once for an order. Explain the details and get the user's explicit yes before."""
        order = self._order(order_id)
        if order["status"] != "pending":
            raise ValueError("Non-pending order cannot be modified")
        _check_items(order, item_ids, "{} not found")
        if len(item_ids) != len(new_item_ids):
            raise ValueError("The number of items to be exchanged should match")
        difference: Any = 0
        variant: Record = {}
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            if item_id == new_item_id:
                raise ValueError("The new item id should be different from the old item id")
            item, variant = self._replacement(order, item_id, new_item_id)
            difference += variant["price"] - item["price"]
        method = self._payment_method(order["user_id"], payment_method_id)
        _check_balance(method, difference, "the new item")
        kind = "payment" if difference > 0 else "refund"
        order = self.db.edit("orders", order_id)
        order["payment_history"].append(_payment(kind, abs(difference), payment_method_id))
        self._change_balance(order["user_id"], payment_method_id, -difference)
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            item = _item(order, item_id)
            item.update(
                item_id=new_item_id, price=variant["price"], options=dict(variant["options"])
            )
        order["status"] = "pending (item modified)"
        return DatabaseRow(order)

    @tool(
        "write",
        payment_method_id="Id of the method to pay by instead, such as 'credit_card_0000000'; the "
        "user's details have it.",
    )
    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> DatabaseRow:
        """Changes how a pending order is paid. Explain the details and get the user's explicit yes
        before."""
        order = self._order(order_id)
        if "pending" not in order["status"]:
            raise ValueError("Non-pending order cannot be modified")
        method = self._payment_method(order["user_id"], payment_method_id)
        history = order["payment_history"]
        if len(history) != 1 or history[0]["transaction_type"] != "payment":
            raise ValueError("There should be exactly one payment for a pending order")
        old_id, amount = history[0]["payment_method_id"], history[0]["amount"]
        if old_id == payment_method_id:
            raise ValueError("The new payment method should be different from the current one")
        _check_balance(method, amount, "the order")
        order = self.db.edit("orders", order_id)
        order["payment_history"] += [
            _payment("payment", amount, payment_method_id),
            _payment("refund", amount, old_id),
        ]
        self._change_balance(order["user_id"], payment_method_id, -amount)
        self._change_balance(order["user_id"], old_id, amount)
        return DatabaseRow(order)

    @tool("write")
    def modify_user_address(
        self,
        user_id: str,
        address1: str,
        address2: str,
        city: str,
        state: str,
        country: str,
        zip: str,
    ) -> DatabaseRow:
        """Changes the address of a user. Explain the details and get the user's explicit yes
        before."""
        self._user(user_id)
        address = _address(address1, address2, city, state, country, zip)
        user = self.db.edit("users", user_id)
        user["address"] = address
        return DatabaseRow(user)

    @tool(
        "write",
        item_ids="Ids of the items to return, each such as '1008292230'; may have duplicates.",
        payment_method_id="Id of the method by which the refund is made: the original one or a "
        "gift card, such as 'gift_card_0000000'.",
    )
    def return_delivered_order_items(
        self, order_id: str, item_ids: list[str], payment_method_id: str
    ) -> DatabaseRow:
        """Takes back items of a delivered order, whose status becomes 'return requested'; an email
        tells the user how to send them. Explain the details and get the user's explicit yes
        before."""
        order = self._order(order_id)
        if order["status"] != "delivered":
            raise ValueError("Non-delivered order cannot be returned")
        method = self._payment_method(order["user_id"], payment_method_id)
        original = order["payment_history"][0]["payment_method_id"]
        if method["source"] != "gift_card" and payment_method_id != original:
            raise ValueError("Payment method should be the original payment method")
        _check_items(order, item_ids, "Some item not found")
        items = sorted(item_ids)
        order = self.db.edit("orders", order_id)
        order["status"] = "return requested"
        order["return_items"] = items
        order["return_payment_method_id"] = payment_method_id
        return DatabaseRow(order)

    @handover
    def transfer_to_human_agents(self, summary: str) -> str:
        return "Transfer successful"

    def _order(self, order_id: str) -> Record:
        return self._existing("orders", order_id, "Order not found")

    def _user(self, user_id: str) -> Record:
        return self._existing("users", user_id, "User not found")

    def _product(self, product_id: str) -> Record:
        return self._existing("products", product_id, "Product not found")

    def _payment_method(self, user_id: str, method_id: str) -> Record:
        methods: dict[str, Record] = self._user(user_id)["payment_methods"]
        if method_id not in methods:
            raise ValueError("Payment method not found")
        return methods[method_id]

    def _replacement(self, order: Record, item_id: str, new_item_id: str) -> tuple[Record, Record]:
        item = _item(order, item_id)
        variants: dict[str, Record] = self._product(item["product_id"])["variants"]
        if new_item_id not in variants:
            raise ValueError("Variant not found")
        if not variants[new_item_id]["available"]:
            raise ValueError(f"New item {new_item_id} not found or available")
        return item, variants[new_item_id]

    def _change_balance(self, user_id: str, method_id: str, amount: float) -> None:
        if self._payment_method(user_id, method_id)["source"] == "gift_card":
            card = self.db.edit("users", user_id)["payment_methods"][method_id]
            card["balance"] = round(card["balance"] + amount, 2)


def _check_balance(method: Record, amount: float, what: str) -> None:
    if method["source"] == "gift_card" and method["balance"] < amount:
        raise ValueError(f"Insufficient gift card balance to pay for {what}")


def _check_items(order: Record, item_ids: list[str], otherwise: str) -> None:
    """Does the order have each of the items as often as they are named?"""
    ordered = [item["item_id"] for item in order["items"]]
    for item_id in item_ids:
        if item_ids.count(item_id) > ordered.count(item_id):
            raise ValueError(otherwise.format(item_id))


def _item(order: Record, item_id: str) -> Record:
    for item in order["items"]:
        if item["item_id"] == item_id:
            found: Record = item
            return found
    raise ValueError(f"Item {item_id} not found")


def _payment(kind: Any, amount: float, method_id: str) -> Record:
    payment = OrderPayment(transaction_type=kind, amount=amount, payment_method_id=method_id)
    return payment.model_dump()


def _address(
    address1: str, address2: str, city: str, state: str, country: str, zip_code: str
) -> Record:
    return UserAddress(
        address1=address1,
        address2=address2,
        city=city,
        state=state,
        country=country,
        zip=zip_code,
    ).model_dump()


RETAIL = DomainKind(
    name="retail", agent=Side(RetailTools, RetailDB, keyed=("products", "users", "orders"))
)
