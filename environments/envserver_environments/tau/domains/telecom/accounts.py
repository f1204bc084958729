"""Customers, their lines and their bills: look-ups, and the changes that several tools share.

Look-ups return data that may be shared with other episodes, so it is only read; the `edited_`
functions return data that may be changed. Wordings of errors: tau2-bench's domain telecom (MIT),
since its agents read them.
"""

from __future__ import annotations

import uuid
from calendar import monthrange
from collections.abc import Iterator
from datetime import date

from ..database import Record
from ..toolkit import Toolkit
from .models import Bill, LineItem

TODAY = date(2025, 2, 25)
"""The day on which all conversations take place."""
END_OF_CYCLE = TODAY.replace(day=monthrange(TODAY.year, TODAY.month)[1])

_LABELS = {
    "customers": ("Customer", "customer_id"),
    "lines": ("Line", "line_id"),
    "devices": ("Device", "device_id"),
    "bills": ("Bill", "bill_id"),
    "plans": ("Plan", "plan_id"),
}
"""Table -> the name of its records, and the field that holds their id."""


class Accounts(Toolkit):
    """The company's records of one episode."""

    def found(self, table: str, record_id: str) -> Record:
        """Returns the record `record_id` of `table`, to be read only."""
        label, field = _LABELS[table]
        for record in self.db.table(table):
            if record[field] == record_id:
                return record  # type: ignore[no-any-return]
        raise ValueError(f"{label} with ID {record_id} not found")

    def edited(self, table: str, record_id: str) -> Record:
        """Returns the record `record_id` of `table`, to be changed in place."""
        self.found(table, record_id)
        self.db.edit_table(table)
        return self.found(table, record_id)

    def line_of(self, customer_id: str, line_id: str) -> Record:
        """Returns a line of that customer, to be read only."""
        customer = self.found("customers", customer_id)
        if line_id not in customer["line_ids"]:
            raise ValueError(f"Line {line_id} not found for customer {customer_id}")
        return self.found("lines", line_id)

    def line_by_number(self, phone_number: str) -> Record:
        """Returns the line with that number, to be read only."""
        for line in self.db.table("lines"):
            if line["phone_number"] == phone_number:
                return line  # type: ignore[no-any-return]
        raise ValueError(f"Line with phone number {phone_number} not found")

    def customer_by_number(self, phone_number: str) -> Record:
        """Returns the customer with that number, or with a line of that number, to be read only."""
        owners = {line["line_id"] for line in self._lines_with(phone_number)}
        for customer in self.db.table("customers"):
            if customer["phone_number"] == phone_number or owners & {*customer["line_ids"]}:
                return customer  # type: ignore[no-any-return]
        raise ValueError(f"Customer with phone number {phone_number} not found")

    def bills_of(self, customer: Record, status: str | None = None) -> list[Record]:
        """Returns the bills of a customer, in the order of the record; with a status: only such."""
        bills = (self.found("bills", bill_id) for bill_id in customer["bill_ids"])
        return [bill for bill in bills if status is None or bill["status"] == status]

    def is_data_used_up(self, line: Record) -> bool:
        """Returns whether the line has used all data of its plan and its refuels."""
        allowed = self.found("plans", line["plan_id"])["data_limit_gb"] + line["data_refueling_gb"]
        return bool(line["data_used_gb"] >= allowed)

    def charge(self, customer_id: str, dollars: float, description: str) -> None:
        """Adds an amount to the customer's draft bill, which is created if there is none."""
        drafts = self.bills_of(self.found("customers", customer_id), "Draft")
        bill_id = drafts[0]["bill_id"] if drafts else self._new_draft(customer_id)
        bill = self.edited("bills", bill_id)
        item = LineItem(
            description=description,
            amount=dollars,
            date=TODAY,
            item_type="Credit" if dollars < 0 else "Charge",
        )
        bill["line_items"].append(item.model_dump())
        bill["total_due"] = round(bill["total_due"] + dollars, 2)

    def add_bill(self, bill: Bill) -> None:
        """Adds a bill to the database and to its customer."""
        self.db.edit_table("bills").append(bill.model_dump())
        self.edited("customers", bill.customer_id)["bill_ids"].append(bill.bill_id)

    def _new_draft(self, customer_id: str) -> str:
        start = END_OF_CYCLE.replace(day=1)
        start = start.replace(year=start.year + start.month // 12, month=start.month % 12 + 1)
        bill = Bill(
            bill_id=f"B{uuid.uuid4().hex[:8]}",
            customer_id=customer_id,
            period_start=start,
            period_end=start.replace(day=monthrange(start.year, start.month)[1]),
            issue_date=start,
            total_due=0.0,
            due_date=start.replace(day=15),
            status="Draft",
        )
        self.add_bill(bill)
        return bill.bill_id

    def _lines_with(self, phone_number: str) -> Iterator[Record]:
        return (line for line in self.db.table("lines") if line["phone_number"] == phone_number)


LAST_PERIOD = (date(2025, 1, 1), date(2025, 1, 31))
"""Months are billed on their first day, so this is the last one that can be overdue."""
LAST_DUE_DATE = date(2025, 1, 15)
ENDED_CONTRACT = date(2025, 1, 31)


class AccountSetup(Accounts):
    """Steps of the set-up, and assertions; these give booleans."""

    def set_data_usage(self, customer_id: str, line_id: str, data_used_gb: float) -> None:
        self.line_of(customer_id, line_id)
        self.edited("lines", line_id)["data_used_gb"] = data_used_gb

    def suspend_line_for_overdue_bill(
        self, customer_id: str, line_id: str, new_bill_id: str, contract_ended: bool
    ) -> None:
        """Suspends a line, with a new overdue bill of its plan's price as the reason.

        Args:
            contract_ended: its contract has also run out.
        """
        line = self.line_of(customer_id, line_id)
        if line["status"] != "Active":
            raise ValueError("Line must be active to suspend for unpaid bill")
        price = self.found("plans", line["plan_id"])["price_per_month"]
        item = LineItem(
            description=f"Charge for line {line_id}", amount=price, date=TODAY, item_type="Charge"
        )
        first, last = LAST_PERIOD
        self.add_bill(
            Bill(
                bill_id=new_bill_id,
                customer_id=customer_id,
                period_start=first,
                period_end=last,
                issue_date=first,
                total_due=price,
                due_date=LAST_DUE_DATE,
                line_items=[item],
                status="Overdue",
            )
        )
        line = self.edited("lines", line_id)
        line["status"] = "Suspended"
        line["suspension_start_date"] = TODAY
        if contract_ended:
            line["contract_end_date"] = ENDED_CONTRACT

    def assert_data_refueling_amount(
        self, customer_id: str, line_id: str, expected_amount: float
    ) -> bool:
        line = self.line_of(customer_id, line_id)
        return bool(abs(line["data_refueling_gb"] - expected_amount) < 1e-6)

    def assert_line_status(self, customer_id: str, line_id: str, expected_status: str) -> bool:
        return bool(self.line_of(customer_id, line_id)["status"] == expected_status)

    def assert_no_overdue_bill(self, overdue_bill_id: str) -> bool:
        """Returns whether that bill is paid, or does not exist."""
        bills = [b for b in self.db.table("bills") if b["bill_id"] == overdue_bill_id]
        return all(bill["status"] == "Paid" for bill in bills)
