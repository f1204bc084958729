"""The assistant's tools: look-ups and changes by a support agent of the phone company. Names,
parameters and outcomes are those of tau2-bench's domain telecom (MIT, Sierra Research); the
descriptions are original."""

from __future__ import annotations

import uuid
from calendar import monthrange
from datetime import date

from envserver_records.tasks import Json

from ..database import Record
from ..toolkit import DatabaseRow, Toolkit, tool
from .models import Bill, LineItem

# Look-ups return data that may be shared with other episodes, so it is only read; the `edited_`
# functions return data that may be changed. Wordings of errors: tau2-bench's domain telecom (MIT),
# since its agents read them.

TODAY = date(2025, 2, 25)
"""The day on which all conversations take place."""
END_OF_CYCLE = TODAY.replace(day=monthrange(TODAY.year, TODAY.month)[1])


class Accounts(Toolkit):
    def found(self, table: str, record_id: str) -> Record:
        kind = table.removesuffix("s")
        for record in self.db.table(table):
            if record[f"{kind}_id"] == record_id:
                return record  # type: ignore[no-any-return]
        raise ValueError(f"{kind.title()} with ID {record_id} not found")

    def edited(self, table: str, record_id: str) -> Record:
        """Returns the record `record_id` of `table`, to be changed in place."""
        self.found(table, record_id)
        self.db.edit_table(table)
        return self.found(table, record_id)

    def line_of(self, customer_id: str, line_id: str) -> Record:
        customer = self.found("customers", customer_id)
        if line_id not in customer["line_ids"]:
            raise ValueError(f"Line {line_id} not found for customer {customer_id}")
        return self.found("lines", line_id)

    def line_by_number(self, phone_number: str) -> Record:
        for line in self.db.table("lines"):
            if line["phone_number"] == phone_number:
                return line  # type: ignore[no-any-return]
        raise ValueError(f"Line with phone number {phone_number} not found")

    def customer_by_number(self, phone_number: str) -> Record:
        """Returns the customer with that number, or with a line of that number, to be read only."""
        lines = self.db.table("lines")
        owners = {line["line_id"] for line in lines if line["phone_number"] == phone_number}
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


LAST_PERIOD = (date(2025, 1, 1), date(2025, 1, 31))
"""Months are billed on their first day, so this is the last one that can be overdue."""
LAST_DUE_DATE = date(2025, 1, 15)
ENDED_CONTRACT = date(2025, 1, 31)


class AccountSetup(Accounts):
    def set_data_usage(self, customer_id: str, line_id: str, data_used_gb: float) -> None:
        self.line_of(customer_id, line_id)
        self.edited("lines", line_id)["data_used_gb"] = data_used_gb

    def suspend_line_for_overdue_bill(
        self, customer_id: str, line_id: str, new_bill_id: str, contract_ended: bool
    ) -> None:
        """Adds a new overdue bill of the plan's price as the reason."""
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


_TABLES = {"L": "lines", "D": "devices", "B": "bills", "C": "customers", "P": "plans"}
"""First letter of an id -> where to look for it."""


class TelecomTools(AccountSetup):
    words = {"customer_id": "Id of the customer whose line it is.", "line_id": "Id of the line."}

    @tool("read", phone_number="The number.")
    def get_customer_by_phone(self, phone_number: str) -> DatabaseRow:
        """Finds the customer to whom a phone number belongs: his own one or one of his lines'."""
        return DatabaseRow(self.customer_by_number(phone_number))

    @tool("read", customer_id="Id of the customer.")
    def get_customer_by_id(self, customer_id: str) -> DatabaseRow:
        """Shows a customer."""
        return DatabaseRow(self.found("customers", customer_id))

    @tool("read", full_name="First and last name.", dob="Date of birth, as YYYY-MM-DD.")
    def get_customer_by_name(self, full_name: str, dob: str) -> list[DatabaseRow]:
        """Finds customers by name and date of birth; several people may share both."""
        return [
            DatabaseRow(customer)
            for customer in self.db.table("customers")
            if customer["full_name"].lower() == full_name.lower()
            and customer["date_of_birth"] == dob
        ]

    @tool("read", id="Its id, whose first letter tells what it is: C, L, D, B or P.")
    def get_details_by_id(self, id: str) -> DatabaseRow:
        """Shows a customer, line, device, bill or plan."""
        table = next((table for letter, table in _TABLES.items() if id.startswith(letter)), None)
        if table is None:
            raise ValueError(f"Unknown ID format or type: {id}")
        return DatabaseRow(self.found(table, id))

    @tool("write", reason="Why.")
    def suspend_line(self, customer_id: str, line_id: str, reason: str) -> Json:
        """Suspends an active line, for six months at most."""
        if self.line_of(customer_id, line_id)["status"] != "Active":
            raise ValueError("Line must be active to suspend")
        line = self.edited("lines", line_id)
        line["status"] = "Suspended"
        line["suspension_start_date"] = TODAY
        message = "Line suspended successfully. $5/month holding fee will apply."
        return {"message": message, "line": DatabaseRow(line)}

    @tool("write")
    def resume_line(self, customer_id: str, line_id: str) -> Json:
        """Makes a line active again that is suspended or waits for its activation."""
        if self.line_of(customer_id, line_id)["status"] not in ("Suspended", "Pending Activation"):
            raise ValueError("Line must be suspended to resume")
        line = self.edited("lines", line_id)
        line["status"] = "Active"
        line["suspension_start_date"] = None
        return {"message": "Line resumed successfully", "line": DatabaseRow(line)}

    @tool("read", customer_id="Id of the customer.", limit="How many at most.")
    def get_bills_for_customer(self, customer_id: str, limit: int = 12) -> list[DatabaseRow]:
        """Lists a customer's bills, the latest first."""
        bills = self.bills_of(self.found("customers", customer_id))
        latest_first = sorted(bills, key=lambda bill: bill["issue_date"], reverse=True)
        return [DatabaseRow(bill) for bill in latest_first[:limit]]

    @tool("write", customer_id="Id of the customer whose bill it is.", bill_id="Id of the bill.")
    def send_payment_request(self, customer_id: str, bill_id: str) -> str:
        """Asks a customer to pay a bill, whose status becomes Awaiting Payment. He can have one
        such bill at a time. Whether the bill is due or already paid is not checked here: look at
        its status before."""
        customer = self.found("customers", customer_id)
        if self.bills_of(customer, "Awaiting Payment"):
            raise ValueError("A bill is already awaiting payment for this customer")
        if bill_id not in customer["bill_ids"]:
            raise ValueError(f"Bill {bill_id} not found for customer {customer_id}")
        self.edited("bills", bill_id)["status"] = "Awaiting Payment"
        return f"Payment request sent to the customer for bill {bill_id}"

    @tool("read")
    def get_data_usage(self, customer_id: str, line_id: str) -> Json:
        """Shows how much data a line has used in this billing cycle, how much was added, how much
        its plan allows, and when the cycle ends."""
        line = self.line_of(customer_id, line_id)
        plan = self.found("plans", line["plan_id"])
        return {
            "line_id": line_id,
            "data_used_gb": line["data_used_gb"],
            "data_limit_gb": plan["data_limit_gb"],
            "data_refueling_gb": line["data_refueling_gb"],
            "cycle_end_date": END_OF_CYCLE,
        }

    @tool("write")
    def enable_roaming(self, customer_id: str, line_id: str) -> str:
        """Lets a line be used in networks abroad."""
        return self._set_roaming(customer_id, line_id, True)

    @tool("write")
    def disable_roaming(self, customer_id: str, line_id: str) -> str:
        """Keeps a line from being used in networks abroad."""
        return self._set_roaming(customer_id, line_id, False)

    @tool("generic", summary="What his issue is, in short.")
    def transfer_to_human_agents(self, summary: str) -> str:
        """Hands the customer over to a human colleague. Do so only if he asks for one, or if policy
        and tools leave you no way to solve his issue."""
        return "Transfer successful"

    @tool(
        "write",
        gb_amount="How many gigabytes.",
    )
    def refuel_data(self, customer_id: str, line_id: str, gb_amount: float) -> Json:
        """Adds data to an active line and puts what it costs by the line's plan on the customer's
        next bill."""
        line = self.line_of(customer_id, line_id)
        if gb_amount <= 0:
            raise ValueError("Refuel amount must be positive")
        if line["status"] != "Active":
            raise ValueError("Line must be active to refuel data")
        price = self.found("plans", line["plan_id"])["data_refueling_price_per_gb"]
        cost = gb_amount * price
        line = self.edited("lines", line_id)
        line["data_refueling_gb"] += gb_amount
        words = f"Data refueling: {gb_amount} GB at ${price}/GB"
        self.charge(customer_id, cost, words)
        return {
            "message": f"Successfully added {gb_amount} GB of data for line {line_id} "
            f"for ${cost:.2f}",
            "new_data_refueling_gb": line["data_refueling_gb"],
            "charge": cost,
        }

    def _set_roaming(self, customer_id: str, line_id: str, enabled: bool) -> str:
        word = "enabled" if enabled else "disabled"
        if self.line_of(customer_id, line_id)["roaming_enabled"] == enabled:
            return f"Roaming was already {word}"
        self.edited("lines", line_id)["roaming_enabled"] = enabled
        return f"Roaming {word} successfully"
