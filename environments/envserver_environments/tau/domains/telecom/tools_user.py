"""The customer's tools: what can be looked up and changed on the phone. Names, parameters and
outcomes are those of tau2-bench's domain telecom (MIT, Sierra Research); the descriptions are
ours."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from ..toolkit import tool
from . import phone
from .models import APNSettings, NetworkModePreference
from .phone import PhoneSetup, can_send_mms, sim_status, speed

_MODES = [mode.value for mode in NetworkModePreference]


class TelecomUserTools(PhoneSetup):
    @tool("read")
    def check_status_bar(self) -> str:
        """Shows the icons at the top of your phone's screen: signal, mobile data, data saver,
        Wi-Fi, VPN and battery."""
        return phone.status_bar(self.device)

    @tool("read")
    def check_network_status(self) -> str:
        """Shows how your phone is connected: airplane mode, SIM card, cellular service and its
        signal, mobile data, roaming and Wi-Fi."""
        return phone.network_status(self.device)

    @tool("read")
    def check_network_mode_preference(self) -> str:
        """Shows which kinds of cellular network your phone prefers."""
        return f"Network Mode Preference: {self.device['network_mode_preference']}"

    @tool("write")
    def set_network_mode_preference(self, mode: NetworkModePreference | str) -> str:
        """Sets which kinds of cellular network your phone prefers. Newer ones are faster and may
        use more battery."""
        if mode not in _MODES:
            outcome = f"Failed to set network mode: '{mode}' is none of {', '.join(_MODES)}."
        else:
            chosen = NetworkModePreference(mode).value
            self.change_and_search(network_mode_preference=chosen)
            outcome = f"Preferred Network Mode set to: {chosen}"
        return self._with_status_bar(outcome)

    @tool("read")
    def run_speed_test(self) -> str:
        """Measures how fast your phone downloads, and tells what that is enough for."""
        return phone.speed_test(speed(self.device, self.surroundings))

    @tool("write")
    def toggle_airplane_mode(self) -> str:
        """Switches airplane mode on or off. While it is on, your phone is cut off from every
        network. Tells the new state."""
        self.switch_airplane_mode(not self.device["airplane_mode"])
        return self._switched("Airplane Mode", "airplane_mode")

    @tool("read")
    def check_sim_status(self) -> str:
        """Shows whether your SIM card works, is missing or is locked."""
        return phone.SIM_CARDS[sim_status(self.device)]

    @tool("write")
    def reseat_sim_card(self) -> str:
        """Takes your SIM card out and puts it in again."""
        self.seat_sim(True)
        return self._with_status_bar("SIM card re-seated successfully.")

    @tool("write")
    def toggle_data(self) -> str:
        """Switches mobile data on or off. Tells the new state."""
        self.change_and_search(data_enabled=not self.device["data_enabled"])
        return self._switched("Mobile Data", "data_enabled")

    @tool("write")
    def toggle_roaming(self) -> str:
        """Switches data roaming on or off: the use of networks outside your carrier's area. Tells
        the new state."""
        self.change_and_search(roaming_enabled=not self.device["roaming_enabled"])
        return self._switched("Data Roaming", "roaming_enabled")

    @tool("read")
    def check_data_restriction_status(self) -> str:
        """Shows whether your phone is set to save data."""
        if self.device["data_saver_mode"]:
            return "Data Saver mode is ON (limits data usage)."
        return "Data Saver mode is OFF."

    @tool("write")
    def toggle_data_saver_mode(self) -> str:
        """Switches data saver mode on or off. It makes data slower. Tells the new state."""
        self.change(data_saver_mode=not self.device["data_saver_mode"])
        return self._switched("Data Saver Mode", "data_saver_mode")

    @tool("read")
    def check_apn_settings(self) -> str:
        """Shows the settings by which your phone reaches your carrier's data network: the name of
        the access point (APN) and the server of picture messages (MMSC)."""
        return phone.apn(self.device)

    @tool("write")
    def set_apn_settings(self, apn_settings: APNSettings | dict[str, Any]) -> str:
        """Sets by which access point your phone reaches your carrier's data network."""
        try:
            settings = APNSettings.model_validate(apn_settings).model_dump()
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        self.change_and_search(active_apn_settings=settings)
        return self._with_status_bar(f"APN settings set to: {settings['apn_name']}")

    @tool("write")
    def reset_apn_settings(self) -> str:
        """Sets the access point settings back to your carrier's, at the next reboot."""
        self.change_apn(reset_at_reboot=True)
        self.simulate_network_search()
        return self._with_status_bar("APN settings will reset at reboot.")

    @tool("read")
    def check_wifi_status(self) -> str:
        """Shows whether Wi-Fi is on, which network you are in and how strong it is."""
        return phone.wifi(self.device)

    @tool("write")
    def toggle_wifi(self) -> str:
        """Switches your phone's Wi-Fi on or off. Tells the new state."""
        self.switch_wifi(not self.device["wifi_enabled"])
        return self._switched("Wi-Fi", "wifi_enabled")

    @tool("read")
    def check_wifi_calling_status(self) -> str:
        """Shows whether your phone makes calls over Wi-Fi."""
        state = "ON" if self.device["wifi_calling_enabled"] else "OFF"
        return f"Wi-Fi Calling is currently turned {state}."

    @tool("write")
    def toggle_wifi_calling(self) -> str:
        """Switches calls over Wi-Fi on or off, which help where cellular signal is weak. Tells the
        new state."""
        self.change(wifi_calling_enabled=not self.device["wifi_calling_enabled"])
        return self._switched("Wi-Fi Calling", "wifi_calling_enabled")

    @tool("read")
    def check_vpn_status(self) -> str:
        """Shows whether your phone goes through a VPN, and what is known about it."""
        return phone.vpn(self.device)

    @tool("write")
    def connect_vpn(self) -> str:
        """Connects your phone to your VPN."""
        if self.device["vpn_connected"]:
            return self._with_status_bar("VPN is already connected.")
        self.join_vpn()
        return self._with_status_bar("VPN connected successfully.")

    @tool("write")
    def disconnect_vpn(self) -> str:
        """Ends your VPN connection, through which data may be slower."""
        if not self.device["vpn_connected"]:
            return self._with_status_bar("There is no VPN connection to end.")
        self.leave_vpn()
        return self._with_status_bar("VPN disconnected successfully.")

    @tool("read")
    def check_installed_apps(self) -> str:
        """Lists the apps on your phone."""
        return f"Installed apps: {', '.join(self.device['app_statuses'])}."

    @tool("read")
    def check_app_status(self, app_name: str) -> str:
        """Shows what there is to know about an app."""
        state = self.device["app_statuses"].get(app_name)
        return phone.app(state) if state else self._no_app(app_name)

    @tool("read")
    def check_app_permissions(self, app_name: str) -> str:
        """Shows what an app may use: text messages, storage, telephone, network."""
        state = self.device["app_statuses"].get(app_name)
        return phone.permissions(state) if state else self._no_app(app_name)

    @tool(
        "write",
        app_name="Name of the app.",
        permission="What it may use, in lower case, such as storage.",
    )
    def grant_app_permission(self, app_name: str, permission: str) -> str:
        """Lets an app use something: text messages, storage, telephone or network."""
        state = self.device["app_statuses"].get(app_name)
        if state is None:
            outcome = f"Error. App '{app_name}' not found. Cannot grant permission."
        elif permission.lower() not in state["permissions"]:
            outcome = f"Error. Permission '{permission}' is unknown to app '{app_name}'."
        else:
            self.permit(app_name, permission.lower(), True)
            outcome = f"Success. Permission '{permission}' granted to app '{app_name}'."
        return self._with_status_bar(outcome)

    @tool("read")
    def can_send_mms(self) -> str:
        """Shows whether your messaging app can send picture messages (MMS)."""
        able = can_send_mms(self.device, self.surroundings)
        return f"Your messaging app {'can' if able else 'cannot'} send MMS messages."

    @tool("write")
    def reboot_device(self) -> str:
        """Switches your phone off and on again."""
        started = "Restarting network services..."
        reset = "Resetting APN settings...\n" if self.restart() else ""
        return self._with_status_bar(f"{reset}{started}")

    @tool("read")
    def check_payment_request(self) -> str:
        """Shows whether you were asked to pay a bill."""
        request = self.surroundings["payment_request"]
        if request is None:
            return "No payment request has been made."
        amount = f"{request['amount_due']} USD"
        return f"You have a payment request for bill {request['bill_id']} of {amount}."

    @tool("write")
    def make_payment(self) -> str:
        """Pays the bill that you were asked to pay."""
        request = self.surroundings["payment_request"]
        if request is None:
            return "You do not have a payment request."
        self.surround(payment_request={**request, "paid": True})
        return (
            f"Payment of {request['amount_due']} USD has been made for bill {request['bill_id']}."
        )

    def _switched(self, what: str, field: str) -> str:
        return self._with_status_bar(phone.now(what, self.device[field]))

    def _with_status_bar(self, outcome: str) -> str:
        return f"{outcome}\n{phone.status_bar(self.device)}"

    def _no_app(self, app_name: str) -> str:
        return f"App '{app_name}' not found on this phone."
