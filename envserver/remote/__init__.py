"""Environments on other machines: how they and the server speak, and the joiner's half of it.

messages   what travels
identity   who a joiner is, also after a restart
link       the session with the server: register, heartbeat, reconnect
gate       before the joiner's engine: nothing is sampled while the server is not heard of
sink       the server as the place where finished groups go
"""
