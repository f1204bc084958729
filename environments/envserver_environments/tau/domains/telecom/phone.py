"""The customer's phone: what can be done to it, without words about it.

Every function changes the episode's own data only. Where a change can alter the connection, the
phone searches for the network again; that is so for exactly those changes that do it in
tau2-bench's domain telecom (MIT), since the outcome is part of its hashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..database import Record
from ..toolkit import Toolkit
from .models import APNSettings, VpnDetails
from .network import registration

HOME_VPN = VpnDetails(
    server_address="192.168.1.1", protocol="OpenVPN", server_performance="excellent"
)


class Phone(Toolkit):
    """The state of phone and surroundings, and its changes."""

    @property
    def device(self) -> Record:
        """The phone, to be read only."""
        found: Record = self.db.table("device")
        return found

    @property
    def surroundings(self) -> Record:
        """Returns the phone's surroundings, to be read only."""
        found: Record = self.db.table("surroundings")
        return found

    def change(self, **fields: Any) -> None:
        """Sets fields of the phone."""
        self.db.edit_table("device").update(fields)

    def surround(self, **fields: Any) -> None:
        """Sets fields of the surroundings."""
        self.db.edit_table("surroundings").update(fields)

    def simulate_network_search(self) -> None:
        """Connects to the network as far as the state of things allows."""
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

    def switch_data(self, on: bool) -> None:
        self.change(data_enabled=on)
        self.simulate_network_search()

    def switch_roaming(self, on: bool) -> None:
        self.change(roaming_enabled=on)
        self.simulate_network_search()

    def switch_wifi(self, on: bool) -> None:
        """Sets the Wi-Fi radio; without it there is no Wi-Fi connection."""
        self.change(wifi_enabled=on)
        if not on:
            self.change(wifi_connected=False, wifi_ssid=None, wifi_signal_strength="none")

    def prefer_network(self, mode: str) -> None:
        self.change(network_mode_preference=mode)
        self.simulate_network_search()

    def use_apn(self, settings: Mapping[str, Any]) -> None:
        """Replaces the APN settings.

        Raises:
            pydantic.ValidationError: they are invalid.
        """
        self.change(active_apn_settings=APNSettings.model_validate(settings).model_dump())
        self.simulate_network_search()

    def change_apn(self, **fields: Any) -> None:
        """Sets some of the APN settings; no search follows."""
        self.change(active_apn_settings={**self.device["active_apn_settings"], **fields})

    def seat_sim(self, seated: bool) -> None:
        """Takes the SIM card out or puts it in; a locked card stays locked."""
        self.change(sim_card_missing=not seated)
        self.simulate_network_search()

    def join_vpn(self, details: VpnDetails = HOME_VPN) -> None:
        self.change(vpn_connected=True, vpn_details=details.model_dump())

    def leave_vpn(self) -> None:
        self.change(vpn_connected=False, vpn_details=None)

    def permit(self, app_name: str, permission: str, allowed: bool) -> None:
        """Grants or revokes a permission of an app.

        Raises:
            KeyError: there is no such app.
        """
        app = self.db.edit_table("device")["app_statuses"][app_name]
        app["permissions"][permission] = allowed

    def restart(self) -> bool:
        """Restarts the phone; returns whether that reset the APN settings, as requested before."""
        resets = bool(self.device["active_apn_settings"]["reset_at_reboot"])
        if resets:
            self.change(active_apn_settings=APNSettings().model_dump())
        self.simulate_network_search()
        return resets
