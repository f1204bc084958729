"""Runs programs that a model wrote: without network, away from the server's files, with limits.

Invariants: a sandbox ends with the connection that opened it, and all sandboxes end with the
server; if no backend holds, nothing starts. README.md names the files in reading order.
"""
