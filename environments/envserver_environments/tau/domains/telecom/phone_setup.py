"""Functions that prepare a phone for tasks, and assertions on it. No model can call them.

Names and parameters are those of tau2-bench's telecom tasks (MIT, Sierra Research).
"""

from __future__ import annotations

from .network import can_send_mms, has_data, speed
from .phone import HOME_VPN, Phone

SIM_LOCKS = {"pin": "locked_pin", "puk": "locked_puk"}


class PhoneSetup(Phone):
    """Steps of the set-up, and assertions; these give booleans."""

    def set_user_info(self, name: str, phone_number: str) -> None:
        """Whose phone it is: the sync with the company's side goes by its number."""
        self.surround(name=name, phone_number=phone_number)

    def set_user_location(self, abroad: bool) -> None:
        self.surround(is_abroad=abroad)

    def turn_airplane_mode_on(self) -> None:
        self.switch_airplane_mode(True)

    def turn_airplane_mode_off(self) -> None:
        self.switch_airplane_mode(False)

    def turn_data_on(self) -> None:
        self.switch_data(True)

    def turn_data_off(self) -> None:
        self.switch_data(False)

    def turn_roaming_on(self) -> None:
        self.switch_roaming(True)

    def turn_roaming_off(self) -> None:
        self.switch_roaming(False)

    def turn_data_saver_mode_on(self) -> None:
        self.change(data_saver_mode=True)

    def turn_data_saver_mode_off(self) -> None:
        self.change(data_saver_mode=False)

    def set_wifi_calling(self, enabled: bool, mms_over_wifi: bool | None = None) -> None:
        """Args: mms_over_wifi: do picture messages go over Wi-Fi then? Unset: as it was."""
        self.change(wifi_calling_enabled=enabled)
        if mms_over_wifi is not None:
            self.change(wifi_calling_mms_over_wifi=mms_over_wifi)

    def unseat_sim_card(self) -> None:
        self.seat_sim(False)

    def lock_sim_card(self, mode: str) -> None:
        """Args: mode: `pin` or `puk`."""
        self.change(sim_card_status=SIM_LOCKS[mode])
        self.simulate_network_search()

    def break_apn_settings(self) -> None:
        self.change_apn(apn_name="broken")
        self.simulate_network_search()

    def break_apn_mms_setting(self) -> None:
        self.change_apn(mmsc_url=None)

    def break_vpn(self) -> None:
        """Connects the phone to a VPN whose server is slow."""
        self.join_vpn(HOME_VPN.model_copy(update={"server_performance": "poor"}))

    def remove_app_permission(self, app_name: str, permission: str) -> None:
        self.permit(app_name, permission, False)

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
