"""Schemas of the company's database and the customer's phone. Names, defaults and order:
tau2-bench, commit a2c0247, data/tau2/domains/telecom (MIT, Sierra Research); results show them in
this order."""

from __future__ import annotations

from datetime import date, datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_MMSC_URL = "http://mms.carrier.com/mms/wapenc"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", use_enum_values=True, validate_default=True)


class Plan(_Record):
    plan_id: str
    name: str
    data_limit_gb: float
    price_per_month: float
    data_refueling_price_per_gb: float


class Address(_Record):
    street: str
    city: str
    state: str
    zip_code: str


class PaymentMethod(_Record):
    method_type: Literal["Credit Card", "Debit Card", "PayPal"]
    account_number_last_4: str
    expiration_date: str


class Customer(_Record):
    customer_id: str
    full_name: str
    date_of_birth: str
    email: str
    phone_number: str
    address: Address
    account_status: Literal["Active", "Suspended", "Pending Verification", "Closed"]
    payment_methods: list[PaymentMethod] = []
    line_ids: list[str] = []
    bill_ids: list[str] = []
    created_at: datetime
    last_extension_date: date | None = None
    goodwill_credit_used_this_year: float = 0.0


class Line(_Record):
    line_id: str
    phone_number: str
    status: Literal["Active", "Suspended", "Pending Activation", "Closed"]
    plan_id: str
    device_id: str | None = None
    data_used_gb: float = 0.0
    data_refueling_gb: float = 0.0
    roaming_enabled: bool = False
    contract_end_date: date | None = None
    last_plan_change_date: date | None = None
    last_sim_replacement_date: date | None = None
    suspension_start_date: date | None = None


class LineItem(_Record):
    description: str
    amount: float
    date: date
    item_type: str


class Bill(_Record):
    bill_id: str
    customer_id: str
    period_start: date
    period_end: date
    issue_date: date
    total_due: float
    due_date: date
    line_items: list[LineItem] = []
    status: Literal["Draft", "Issued", "Awaiting Payment", "Paid", "Overdue", "Disputed"]


class Device(_Record):
    device_id: str
    device_type: Literal["phone", "tablet", "router", "watch", "other"]
    model: str
    imei: str | None = None
    is_esim_capable: bool
    activated: bool = False
    activation_date: datetime | None = None
    last_esim_transfer_date: datetime | None = None


class TelecomDB(_Record):
    plans: list[Plan] = []
    customers: list[Customer] = []
    lines: list[Line] = []
    bills: list[Bill] = []
    devices: list[Device] = []


SimStatus = Literal["active", "missing", "locked_pin", "locked_puk"]
Technology = Literal["none", "2G", "3G", "4G", "5G"]
Signal = Literal["none", "poor", "fair", "good", "excellent"]
Connection = Literal["connected", "searching", "no_service", "emergency_only"]


class NetworkModePreference(StrEnum):
    PREFER_4G_5G = "4g_5g_preferred"
    ONLY_4G = "4g_only"
    ONLY_3G = "3g_only"
    ONLY_2G = "2g_only"


class APNNames(StrEnum):
    INTERNET = "internet"
    BROKEN = "broken"


class APNSettings(_Record):
    """The phone's settings for the carrier's data network."""

    apn_name: Annotated[APNNames, Field(description="Which access point is used.")] = (
        APNNames.INTERNET
    )
    reset_at_reboot: Annotated[
        bool, Field(description="Go back to the default settings at the next reboot?")
    ] = False
    mms_apn: Annotated[str | None, Field(description="Access point of picture messages.")] = "mms"
    mmsc_url: Annotated[
        str | None, Field(description="Server of picture messages; they need one.")
    ] = DEFAULT_MMSC_URL
    mms_proxy: Annotated[str | None, Field(description="Proxy of picture messages.")] = None
    mms_port: Annotated[int | None, Field(description="Port of that proxy.")] = None


class VpnDetails(_Record):
    server_address: str | None = None
    protocol: str | None = None
    server_performance: Literal["unknown", "poor", "fair", "good", "excellent"] = "unknown"


class AppPermissions(_Record):
    sms: bool = False
    storage: bool = False
    phone: bool = False
    network: bool = False


class App(_Record):
    app_name: str
    permissions: AppPermissions = AppPermissions()


class Handset(_Record):
    sim_card_status: SimStatus = "active"
    sim_card_missing: bool = False
    airplane_mode: bool = False
    network_signal_strength: Signal = "good"
    network_technology_connected: Technology = "5G"
    network_connection_status: Connection = "connected"
    battery_level: Annotated[int, Field(ge=0, le=100)] = 80
    data_enabled: bool = True
    roaming_enabled: bool = False
    network_mode_preference: NetworkModePreference = NetworkModePreference.PREFER_4G_5G
    active_apn_settings: APNSettings = APNSettings()
    wifi_enabled: bool = False
    wifi_connected: bool = False
    wifi_ssid: str | None = None
    wifi_signal_strength: Signal = "none"
    wifi_calling_enabled: bool = False
    wifi_calling_mms_over_wifi: bool = False
    data_saver_mode: bool = False
    vpn_enabled_setting: bool = False
    vpn_connected: bool = False
    vpn_details: VpnDetails | None = None
    app_statuses: dict[str, App] = {}


class PaymentRequest(_Record):
    bill_id: str
    amount_due: float
    paid: bool = False


class Surroundings(_Record):
    name: str | None = None
    phone_number: str | None = None
    is_abroad: bool = False
    roaming_allowed: bool = False
    signal_strength: dict[Technology, Signal] = {
        "2G": "poor",
        "3G": "fair",
        "4G": "good",
        "5G": "excellent",
    }
    mobile_data_usage_exceeded: bool = False
    line_active: bool = True
    payment_request: PaymentRequest | None = None


class TelecomUserDB(_Record):
    device: Handset = Handset()
    surroundings: Surroundings = Surroundings()
