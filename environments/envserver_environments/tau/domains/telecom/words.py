"""The texts that the phone shows.

In: the records of a `Handset`, read only, and measurements. Out: text. Wordings that tau2-bench's
reference runs show are theirs (MIT, Sierra Research), since its tasks and agents depend on them;
the others are original.
"""

from __future__ import annotations

from ..database import Record
from .phone import Speed

_SIGNALS = {
    "none": "📵 No Signal",
    "poor": "📶¹ Poor",
    "fair": "📶² Fair",
    "good": "📶³ Good",
    "excellent": "📶⁴ Excellent",
}
_SIM = {
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
    """The icons at the top of the screen."""
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
    """Describes the connections, a line each."""
    lines = {
        "Airplane Mode": _on_off(device["airplane_mode"]),
        "SIM Card Status": "missing" if device["sim_card_missing"] else device["sim_card_status"],
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


def sim_card(status: str) -> str:
    return _SIM[status]


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
    told = ", ".join(f"{key}: {value}" for key, value in details.items())
    return f"VPN is ON and connected. Details: {told}"


def app(state: Record) -> str:
    """Describes an app and its permissions."""
    return f"App '{state['app_name']}' is installed.\n{permissions(state)}"


def permissions(state: Record) -> str:
    granted = [name for name, allowed in state["permissions"].items() if allowed]
    if not granted:
        return f"App '{state['app_name']}' has no permissions."
    return f"App '{state['app_name']}' has permission for: {', '.join(granted)}."


def now(what: str, on: bool) -> str:
    """The outcome of a switch."""
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
