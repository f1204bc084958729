"""The customer's phone: what can be done to it, without words about it. A change makes the phone
search for the network again exactly where it does in tau2-bench's domain telecom (MIT): the outcome
is part of its hashes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partialmethod
from typing import Any

from ..database import Record
from ..toolkit import Toolkit
from .models import APNSettings, VpnDetails

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


HOME_VPN = VpnDetails(
    server_address="192.168.1.1", protocol="OpenVPN", server_performance="excellent"
)


class Phone(Toolkit):
    @property
    def device(self) -> Record:
        found: Record = self.db.table("device")
        return found

    @property
    def surroundings(self) -> Record:
        found: Record = self.db.table("surroundings")
        return found

    def change(self, **fields: Any) -> None:
        self.db.edit_table("device").update(fields)

    def surround(self, **fields: Any) -> None:
        self.db.edit_table("surroundings").update(fields)

    def change_and_search(self, **fields: Any) -> None:
        self.change(**fields)
        self.simulate_network_search()

    def simulate_network_search(self) -> None:
        found = registration(self.device, self.surroundings)
        self.change(
            network_connection_status=found.connection,
            network_technology_connected=found.technology,
            network_signal_strength=found.signal,
        )

    def switch_airplane_mode(self, on: bool) -> None:
        """Sets airplane mode, which also ends Wi-Fi and VPN connections."""
        self.change(airplane_mode=on)
        if on:
            self.change(wifi_connected=False, wifi_ssid=None, wifi_signal_strength="none")
            self.leave_vpn()
        self.simulate_network_search()

    def switch_wifi(self, on: bool) -> None:
        self.change(wifi_enabled=on)
        if not on:
            self.change(wifi_connected=False, wifi_ssid=None, wifi_signal_strength="none")

    def change_apn(self, **fields: Any) -> None:
        """Sets some of the APN settings; no search follows."""
        self.change(active_apn_settings={**self.device["active_apn_settings"], **fields})

    def seat_sim(self, seated: bool) -> None:
        """Takes the SIM card out or puts it in; a locked card stays locked."""
        self.change_and_search(sim_card_missing=not seated)

    def join_vpn(self, details: VpnDetails = HOME_VPN) -> None:
        self.change(vpn_connected=True, vpn_details=details.model_dump())

    def leave_vpn(self) -> None:
        self.change(vpn_connected=False, vpn_details=None)

    def permit(self, app_name: str, permission: str, allowed: bool) -> None:
        app = self.db.edit_table("device")["app_statuses"][app_name]
        app["permissions"][permission] = allowed

    def restart(self) -> bool:
        """Restarts the phone; returns whether that reset the APN settings, as requested before."""
        resets = bool(self.device["active_apn_settings"]["reset_at_reboot"])
        if resets:
            self.change(active_apn_settings=APNSettings().model_dump())
        self.simulate_network_search()
        return resets


SIM_LOCKS = {"pin": "locked_pin", "puk": "locked_puk"}


class PhoneSetup(Phone):
    def set_user_info(self, name: str, phone_number: str) -> None:
        """Whose phone it is: the sync with the company's side goes by its number."""
        self.surround(name=name, phone_number=phone_number)

    def set_user_location(self, abroad: bool) -> None:
        self.surround(is_abroad=abroad)

    turn_airplane_mode_on = partialmethod(Phone.switch_airplane_mode, True)
    turn_airplane_mode_off = partialmethod(Phone.switch_airplane_mode, False)
    turn_data_on = partialmethod(Phone.change_and_search, data_enabled=True)
    turn_data_off = partialmethod(Phone.change_and_search, data_enabled=False)
    turn_roaming_on = partialmethod(Phone.change_and_search, roaming_enabled=True)
    turn_roaming_off = partialmethod(Phone.change_and_search, roaming_enabled=False)
    turn_data_saver_mode_on = partialmethod(Phone.change, data_saver_mode=True)
    unseat_sim_card = partialmethod(Phone.seat_sim, False)
    break_apn_mms_setting = partialmethod(Phone.change_apn, mmsc_url=None)
    remove_app_permission = partialmethod(Phone.permit, allowed=False)
    turn_data_saver_mode_off = partialmethod(Phone.change, data_saver_mode=False)

    def set_wifi_calling(self, enabled: bool, mms_over_wifi: bool | None = None) -> None:
        """Args: mms_over_wifi: do picture messages go over Wi-Fi then? Unset: as it was."""
        self.change(wifi_calling_enabled=enabled)
        if mms_over_wifi is not None:
            self.change(wifi_calling_mms_over_wifi=mms_over_wifi)

    def lock_sim_card(self, mode: str) -> None:
        self.change_and_search(sim_card_status=SIM_LOCKS[mode])

    def break_apn_settings(self) -> None:
        self.change_apn(apn_name="broken")
        self.simulate_network_search()

    def break_vpn(self) -> None:
        """Connects the phone to a VPN whose server is slow."""
        self.join_vpn(HOME_VPN.model_copy(update={"server_performance": "poor"}))

    def assert_service_status(self, expected_status: str) -> bool:
        return bool(self.device["network_connection_status"] == expected_status)

    def assert_mobile_data_status(self, expected_status: bool) -> bool:
        return has_data(self.device, self.surroundings) == expected_status

    def assert_internet_speed(
        self, expected_speed: float, expected_desc: str | None = None
    ) -> bool:
        """Is it at least so fast (megabits per second), and of that grade if one is given?"""
        measured = speed(self.device, self.surroundings)
        if measured is None:
            return False
        if expected_desc is not None and measured.grade.lower() != expected_desc.lower():
            return False
        return measured.megabits_per_second >= expected_speed

    def assert_can_send_mms(self, expected_status: bool) -> bool:
        return can_send_mms(self.device, self.surroundings) == expected_status


_SIGNALS = {
    "none": "📵 No Signal",
    "poor": "📶¹ Poor",
    "fair": "📶² Fair",
    "good": "📶³ Good",
    "excellent": "📶⁴ Excellent",
}
SIM_CARDS = {
    "active": "Your SIM card is active and working.",
    "missing": "No SIM card was found in the phone.",
    "locked_pin": "The SIM card is locked and asks for its PIN code.",
    "locked_puk": "The SIM card is locked and asks for its PUK code.",
}
_SPEEDS = {
    "Very Poor": "Connection is very slow. Even messages may take long.",
    "Poor": "Connection is slow. Web browsing may be sluggish, streaming difficult.",
    "Fair": "Connection is fit for web browsing and videos of low quality.",
    "Good": "Connection is good for most activities, including HD streaming.",
    "Excellent": "Connection is very fast.",
}


def status_bar(device: Record) -> str:
    icons = ["✈️ Airplane Mode"] if device["airplane_mode"] else _cellular_icons(device)
    if device["wifi_connected"]:
        icons.append(f"📡 Connected to {device['wifi_ssid'] or 'Wi-Fi'}")
    elif device["wifi_enabled"]:
        icons.append("📡 Enabled")
    if device["vpn_connected"]:
        icons.append("🔒 VPN Connected")
    icons.append(f"🔋 {device['battery_level']}%")
    return f"Status Bar: {' | '.join(icons)}"


def network_status(device: Record) -> str:
    lines = {
        "Airplane Mode": _on_off(device["airplane_mode"]),
        "SIM Card Status": sim_status(device),
        "Cellular Connection": device["network_connection_status"],
        "Cellular Signal": device["network_signal_strength"],
        "Cellular Network Type": device["network_technology_connected"],
        "Mobile Data Enabled": _yes_no(device["data_enabled"]),
        "Data Roaming Enabled": _yes_no(device["roaming_enabled"]),
        "Wi-Fi Radio": _on_off(device["wifi_enabled"]),
        "Wi-Fi Connected": _yes_no(device["wifi_connected"]),
    }
    if device["wifi_connected"]:
        lines["Connected Wi-Fi Network"] = device["wifi_ssid"] or "unknown"
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


def speed_test(measured: Speed | None) -> str:
    if measured is None:
        return "Speed test failed: No Connection."
    rate = f"{measured.megabits_per_second:.2f} Mbps ({measured.grade})"
    return f"Speed Test Result: {rate}. {_SPEEDS[measured.grade]}"


def apn(device: Record) -> str:
    settings = device["active_apn_settings"]
    return (
        f"Current APN Name: {settings['apn_name']}\n"
        f"MMSC URL (for picture messages): {settings['mmsc_url'] or 'Not Set'}\n"
        "(These are technical settings, usually best left unchanged.)"
    )


def wifi(device: Record) -> str:
    if not device["wifi_enabled"]:
        return "Wi-Fi is turned OFF."
    if not device["wifi_connected"]:
        return "Wi-Fi is turned ON, but not connected to a network."
    name = device["wifi_ssid"] or "a network"
    return f"Wi-Fi is ON and connected to {name}. Signal: {device['wifi_signal_strength']}."


def vpn(device: Record) -> str:
    if not device["vpn_connected"]:
        allowed = device["vpn_enabled_setting"]
        return f"VPN is turned {'ON, but not connected' if allowed else 'OFF'}."
    details = device["vpn_details"]
    if not details:
        return "VPN is ON and connected."
    shown = ", ".join(f"{key}: {value}" for key, value in details.items())
    return f"VPN is ON and connected. Details: {shown}"


def app(state: Record) -> str:
    return f"App '{state['app_name']}' is installed.\n{permissions(state)}"


def permissions(state: Record) -> str:
    granted = [name for name, allowed in state["permissions"].items() if allowed]
    if not granted:
        return f"App '{state['app_name']}' has no permissions."
    return f"App '{state['app_name']}' has permission for: {', '.join(granted)}."


def now(what: str, on: bool) -> str:
    return f"{what} is now {_on_off(on)}."


def _cellular_icons(device: Record) -> list[str]:
    icons = [_SIGNALS[device["network_signal_strength"]]]
    technology = device["network_technology_connected"]
    if technology != "none":
        icons.append(technology)
    if technology == "none" or not device["data_enabled"]:
        return [*icons, "📵 Data Disabled"]
    icons.append("📱 Data Enabled")
    return [*icons, "🔽 Data Saver"] if device["data_saver_mode"] else icons


def _on_off(on: bool) -> str:
    return "ON" if on else "OFF"


def _yes_no(yes: bool) -> str:
    return "Yes" if yes else "No"
