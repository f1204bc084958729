"""Sandboxes on other machines, made by `envserver sandboxes serve` for servers and runners.

In: specs, programs and files over a WebSocket for each sandbox. Out: results with their usage. What
always holds: a sandbox ends with its connection; a client can name no sandbox but its own; the end
of a machine is an infrastructure failure (`SandboxLost`), never a result.
"""
