"""Metrics, traces and log lines for operators of the server.

Nothing here holds a secret, nor a prompt or an answer unless traces are to have texts; no label has
unbounded values; and what is switched off costs next to nothing.
"""
