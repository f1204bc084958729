"""Metrics, traces and log lines for operators of the server.

In flow counts and times of the server's parts; out flow metrics, spans and log lines. What always
holds: nothing here holds a secret, nor a prompt or an answer unless traces are to have texts; no
label has unbounded values; and what is switched off costs next to nothing. README.md lists the
names.
"""
