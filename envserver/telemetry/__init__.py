"""Metrics, traces and log lines for operators of the server.

In flow counts and times of the server's parts; out flow metrics, spans and log lines. What always
holds: nothing here holds a prompt, an answer or a secret, no label has unbounded values, and what
is
switched off costs next to nothing. README.md lists the names.
"""
