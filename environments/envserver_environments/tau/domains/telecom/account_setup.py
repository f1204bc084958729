"""Functions that prepare the company's records for tasks, and assertions on them; not for models.

Names and parameters are those of tau2-bench's telecom tasks (MIT, Sierra Research).
"""

from __future__ import annotations

from datetime import date

from .accounts import TODAY, Accounts
from .models import Bill, LineItem

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
