"""Computes from a phone's state whether it has service, data and picture messages, and how fast.

In: the records of a `Handset` and its `Surroundings`, read only. Out: plain values. Rules:
tau2-bench's domain telecom (MIT), as its reference runs show them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..database import Record

MEGABITS_PER_SECOND = {"2G": (0.1, 0.4), "3G": (1, 5), "4G": (10, 100), "5G": (50, 500)}
"""Slowest and fastest download of each technology; a speed test measures the middle."""
SHARE_BY_SIGNAL = {"poor": 0.2, "fair": 0.5, "good": 0.8, "excellent": 1.0}
SHARE_WITH_POOR_VPN = 0.1
SHARE_WITH_DATA_SAVER = 0.2
GRADES = ((1, "Very Poor"), (5, "Poor"), (25, "Fair"), (100, "Good"))
"""(megabits per second, grade of slower speeds); the rest is excellent."""
FASTEST_GRADE = "Excellent"
TECHNOLOGY_BY_MODE = {"4g_only": "4G", "3g_only": "3G", "2g_only": "2G"}


@dataclass(frozen=True)
class Registration:
    """The phone's connection to the cellular network."""

    connection: str
    technology: str
    signal: str


NOT_REGISTERED = Registration("no_service", "none", "none")


@dataclass(frozen=True)
class Speed:
    megabits_per_second: float
    grade: str


def sim_status(device: Record) -> str:
    """`active`, `missing`, `locked_pin` or `locked_puk`; a card that is not there is missing."""
    return "missing" if device["sim_card_missing"] else str(device["sim_card_status"])


def registration(device: Record, surroundings: Record) -> Registration:
    """Returns the result of a search for the network."""
    reachable = (
        sim_status(device) == "active"
        and not device["airplane_mode"]
        and device["active_apn_settings"]["apn_name"] != "broken"
        and surroundings["line_active"]
    )
    if not reachable:
        return NOT_REGISTERED
    signals = surroundings["signal_strength"]
    technology = TECHNOLOGY_BY_MODE.get(device["network_mode_preference"])
    if technology is None:
        technology = "5G" if signals.get("5G", "none") != "none" else "4G"
    return Registration("connected", technology, signals.get(technology, "none"))


def has_data(device: Record, surroundings: Record) -> bool:
    """Does mobile data work?"""
    in_service = (
        not device["airplane_mode"]
        and device["network_signal_strength"] != "none"
        and device["network_connection_status"] != "no_service"
    )
    may_roam = device["roaming_enabled"] and surroundings["roaming_allowed"]
    return (
        in_service
        and (may_roam or not surroundings["is_abroad"])
        and device["data_enabled"]
        and not surroundings["mobile_data_usage_exceeded"]
    )


def speed(device: Record, surroundings: Record) -> Speed | None:
    """Returns the download speed, or None without a connection."""
    if not has_data(device, surroundings):
        return None
    slowest, fastest = MEGABITS_PER_SECOND[device["network_technology_connected"]]
    rate = (slowest + fastest) / 2 * SHARE_BY_SIGNAL[device["network_signal_strength"]]
    vpn = device["vpn_details"]
    if device["vpn_connected"] and vpn and vpn["server_performance"] == "poor":
        rate *= SHARE_WITH_POOR_VPN
    if device["data_saver_mode"]:
        rate *= SHARE_WITH_DATA_SAVER
    rate = round(rate, 2)
    grade = next((grade for limit, grade in GRADES if rate < limit), FASTEST_GRADE)
    return Speed(rate, grade)


def can_send_mms(device: Record, surroundings: Record) -> bool:
    """Can the messaging app send picture messages?"""
    app = device["app_statuses"].get("messaging")
    over_wifi = device["wifi_calling_enabled"] and device["wifi_calling_mms_over_wifi"]
    return (
        has_data(device, surroundings)
        and device["network_technology_connected"] != "2G"
        and not over_wifi
        and device["active_apn_settings"]["mmsc_url"] is not None
        and app is not None
        and app["permissions"]["storage"]
        and app["permissions"]["sms"]
    )
