"""Cursors of pages: the values of the last row, by the columns of an order, as opaque text.

The last column of every order is a whole number that no two rows share.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import msgspec
from envserver_records.errors import InputError
from sqlalchemy import ColumnElement, and_, or_

_MOST_NUMBER: Final = 2**63


def after(by: list[ColumnElement[Any]], values: list[Any], descends: bool) -> ColumnElement[bool]:
    """Returns the condition that a row follows `values` in the order of the columns `by`."""
    either = []
    for position, column in enumerate(by):
        equal = [one == value for one, value in zip(by[:position], values, strict=False)]
        value = values[position]
        either.append(and_(*equal, column < value if descends else column > value))
    return or_(*either)


def cursor_of(order: str, values: Any) -> str:
    """Returns the cursor of the page after a row with these values of its order's columns."""
    return base64.urlsafe_b64encode(msgspec.json.encode(_Cursor(order, list(values)))).decode()


def read_cursor(cursor: str, order: str, count: int) -> list[float]:
    """Returns the values in a cursor of `order`, which has `count` columns.
    Raises InputError: it is not one of this order.
    """
    try:
        made = msgspec.json.decode(base64.urlsafe_b64decode(cursor), type=_Cursor)
    except (binascii.Error, ValueError):
        made = _Cursor("", [])
    of_order = made.order == order and len(made.values) == count
    if not (of_order and 0 <= made.values[-1] < _MOST_NUMBER):
        raise InputError(
            f"The cursor {cursor[:80]!r} does not belong to the order {order!r}.",
            place="query.cursor",
            hint="Send `cursor` as the page before gave it, with the same parameters.",
        )
    return [*made.values[:-1], int(made.values[-1])]


class _Cursor(msgspec.Struct, array_like=True):
    order: str
    values: list[float]
