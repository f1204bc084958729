"""The domain: both sides' tools, and the effects of one side's changes on the other."""

from __future__ import annotations

from dataclasses import replace

from ..world import DomainKind, Side
from .models import TelecomDB, TelecomUserDB
from .tools_agent import TelecomTools
from .tools_user import TelecomUserTools


def sync(company: TelecomTools, phone: TelecomUserTools) -> None:
    """Carries over line, usage and payments between the company's records and the phone; a phone
    without a number belongs to no customer."""
    around = phone.surroundings
    if around["phone_number"] is None:
        return
    line = company.line_by_number(around["phone_number"])
    request = around["payment_request"]
    if request is not None and request["paid"]:
        company.edited("bills", request["bill_id"])["status"] = "Paid"
        request = None
    customer = company.customer_by_number(around["phone_number"])
    awaiting = company.bills_of(customer, "Awaiting Payment")
    if awaiting:
        bill = awaiting[0]
        request = {"bill_id": bill["bill_id"], "amount_due": bill["total_due"], "paid": False}
    phone.surround(
        line_active=line["status"] == "Active",
        roaming_allowed=line["roaming_enabled"],
        mobile_data_usage_exceeded=company.is_data_used_up(line),
        payment_request=request,
    )


TELECOM = DomainKind(
    name="telecom",
    agent=Side(TelecomTools, TelecomDB, keyed=()),
    user=Side(TelecomUserTools, TelecomUserDB, keyed=(), file="user_db"),
    sync=sync,
    policy_parts=(
        ("main_policy", "main_policy.md"),
        ("tech_support_policy", "tech_support_manual.md"),
    ),
    folder="telecom",
)

TELECOM_WORKFLOW = replace(
    TELECOM,
    name="telecom-workflow",
    policy_parts=(
        ("main_policy", "main_policy.md"),
        ("tech_support_policy", "tech_support_workflow.md"),
    ),
)
