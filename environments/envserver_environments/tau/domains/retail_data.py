"""The shape of the data of tau2-bench's domain `retail` (src/tau2/domains/retail/data_model.py).

Names and order of the fields are upstream's: results and hashes are made of them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

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
    """One version of a product, which can be bought."""

    item_id: str
    options: dict[str, str]
    available: bool
    price: float


class Product(BaseModel):
    """A kind of goods and its variants by item id."""

    name: str
    product_id: str
    variants: dict[str, Variant]


class UserName(BaseModel):
    """The name of a customer."""

    first_name: str
    last_name: str


class UserAddress(BaseModel):
    """A delivery address."""

    address1: str
    address2: str
    city: str
    country: str
    state: str
    zip: str


class CreditCard(BaseModel):
    """A way to pay."""

    source: Literal["credit_card"]
    id: str
    brand: str
    last_four: str


class Paypal(BaseModel):
    """A way to pay."""

    source: Literal["paypal"]
    id: str


class GiftCard(BaseModel):
    """A way to pay that has a balance."""

    source: Literal["gift_card"]
    id: str
    balance: float


class User(BaseModel):
    """A customer."""

    user_id: str
    name: UserName
    address: UserAddress
    email: str
    payment_methods: dict[str, CreditCard | Paypal | GiftCard]
    orders: list[str]


class OrderItem(BaseModel):
    """A thing that was ordered."""

    name: str
    product_id: str
    item_id: str
    price: float
    options: dict[str, str]


class OrderFulfillment(BaseModel):
    """A parcel."""

    tracking_id: list[str]
    item_ids: list[str]


class OrderPayment(BaseModel):
    """Money that went one way or the other."""

    transaction_type: Literal["payment", "refund"]
    amount: float
    payment_method_id: str


class Order(BaseModel):
    """A customer's order and its state."""

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
    """The shop's data."""

    model_config = ConfigDict(extra="forbid")

    products: dict[str, Product]
    users: dict[str, User]
    orders: dict[str, Order]
