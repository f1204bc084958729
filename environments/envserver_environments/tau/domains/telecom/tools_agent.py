"""The assistant's tools: look-ups and changes by a support agent of the phone company.

Names, parameters and outcomes are those of tau2-bench's domain telecom (MIT, Sierra Research); the
descriptions are original.
"""

from __future__ import annotations

from typing import Any

from ..toolkit import DatabaseRow, tool
from .accounts import END_OF_CYCLE, TODAY, AccountSetup

_CUSTOMER = "Id of the customer whose line it is."
_TABLES = {"L": "lines", "D": "devices", "B": "bills", "C": "customers", "P": "plans"}
"""First letter of an id -> where to look for it."""


class TelecomTools(AccountSetup):
    """The assistant's functions."""

    @tool(
        "read",
        "Finds the customer to whom a phone number belongs: his own one or one of his lines'.",
        phone_number="The number.",
    )
    def get_customer_by_phone(self, phone_number: str) -> DatabaseRow:
        return DatabaseRow(self.customer_by_number(phone_number))

    @tool("read", "Shows a customer.", customer_id="Id of the customer.")
    def get_customer_by_id(self, customer_id: str) -> DatabaseRow:
        return DatabaseRow(self.found("customers", customer_id))

    @tool(
        "read",
        "Finds customers by name and date of birth; several people may share both.",
        full_name="First and last name.",
        dob="Date of birth, as YYYY-MM-DD.",
    )
    def get_customer_by_name(self, full_name: str, dob: str) -> list[DatabaseRow]:
        return [
            DatabaseRow(customer)
            for customer in self.db.table("customers")
            if customer["full_name"].lower() == full_name.lower()
            and customer["date_of_birth"] == dob
        ]

    @tool(
        "read",
        "Shows a customer, line, device, bill or plan.",
        id="Its id, whose first letter tells what it is: C, L, D, B or P.",
    )
    def get_details_by_id(self, id: str) -> DatabaseRow:
        table = next((table for letter, table in _TABLES.items() if id.startswith(letter)), None)
        if table is None:
            raise ValueError(f"Unknown ID format or type: {id}")
        return DatabaseRow(self.found(table, id))

    @tool(
        "write",
        "Suspends an active line, for six months at most.",
        customer_id=_CUSTOMER,
        line_id="Id of the line.",
        reason="Why.",
    )
    def suspend_line(self, customer_id: str, line_id: str, reason: str) -> dict[str, Any]:
        if self.line_of(customer_id, line_id)["status"] != "Active":
            raise ValueError("Line must be active to suspend")
        line = self.edited("lines", line_id)
        line["status"] = "Suspended"
        line["suspension_start_date"] = TODAY
        message = "Line suspended successfully. $5/month holding fee will apply."
        return {"message": message, "line": DatabaseRow(line)}

    @tool(
        "write",
        "Makes a line active again that is suspended or waits for its activation.",
        customer_id=_CUSTOMER,
        line_id="Id of the line.",
    )
    def resume_line(self, customer_id: str, line_id: str) -> dict[str, Any]:
        if self.line_of(customer_id, line_id)["status"] not in ("Suspended", "Pending Activation"):
            raise ValueError("Line must be suspended to resume")
        line = self.edited("lines", line_id)
        line["status"] = "Active"
        line["suspension_start_date"] = None
        return {"message": "Line resumed successfully", "line": DatabaseRow(line)}

    @tool(
        "read",
        "Lists a customer's bills, the latest first.",
        customer_id="Id of the customer.",
        limit="How many at most.",
    )
    def get_bills_for_customer(self, customer_id: str, limit: int = 12) -> list[DatabaseRow]:
        bills = self.bills_of(self.found("customers", customer_id))
        latest_first = sorted(bills, key=lambda bill: bill["issue_date"], reverse=True)
        return [DatabaseRow(bill) for bill in latest_first[:limit]]

    @tool(
        "write",
        "Asks a customer to pay a bill, whose status becomes Awaiting Payment. He can have one "
        "such bill at a time. Whether the bill is due or already paid is not checked here: look "
        "at its status before.",
        customer_id="Id of the customer whose bill it is.",
        bill_id="Id of the bill.",
    )
    def send_payment_request(self, customer_id: str, bill_id: str) -> str:
        customer = self.found("customers", customer_id)
        if self.bills_of(customer, "Awaiting Payment"):
            raise ValueError("A bill is already awaiting payment for this customer")
        if bill_id not in customer["bill_ids"]:
            raise ValueError(f"Bill {bill_id} not found for customer {customer_id}")
        self.edited("bills", bill_id)["status"] = "Awaiting Payment"
        return f"Payment request sent to the customer for bill {bill_id}"

    @tool(
        "read",
        "Shows how much data a line has used in this billing cycle, how much was added, how much "
        "its plan allows, and when the cycle ends.",
        customer_id=_CUSTOMER,
        line_id="Id of the line.",
    )
    def get_data_usage(self, customer_id: str, line_id: str) -> dict[str, Any]:
        line = self.line_of(customer_id, line_id)
        plan = self.found("plans", line["plan_id"])
        return {
            "line_id": line_id,
            "data_used_gb": line["data_used_gb"],
            "data_limit_gb": plan["data_limit_gb"],
            "data_refueling_gb": line["data_refueling_gb"],
            "cycle_end_date": END_OF_CYCLE,
        }

    @tool(
        "write",
        "Lets a line be used in networks abroad.",
        customer_id=_CUSTOMER,
        line_id="Id of the line.",
    )
    def enable_roaming(self, customer_id: str, line_id: str) -> str:
        return self._set_roaming(customer_id, line_id, True)

    @tool(
        "write",
        "Keeps a line from being used in networks abroad.",
        customer_id=_CUSTOMER,
        line_id="Id of the line.",
    )
    def disable_roaming(self, customer_id: str, line_id: str) -> str:
        return self._set_roaming(customer_id, line_id, False)

    @tool(
        "generic",
        "Hands the customer over to a human colleague. Do so only if he asks for one, or if "
        "policy and tools leave you no way to solve his issue.",
        summary="What his issue is, in short.",
    )
    def transfer_to_human_agents(self, summary: str) -> str:
        return "Transfer successful"

    @tool(
        "write",
        "Adds data to an active line and puts what it costs by the line's plan on the customer's "
        "next bill.",
        customer_id=_CUSTOMER,
        line_id="Id of the line.",
        gb_amount="How many gigabytes.",
    )
    def refuel_data(self, customer_id: str, line_id: str, gb_amount: float) -> dict[str, Any]:
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
