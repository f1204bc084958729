"""A server, an engine, environments and two trainers under random faults, and who judges them.

    engine <── witness ── server <── faulty relay ── trainers a and b, joined environment, poster
                            │
                          store (SQLite on a small disk, or PostgreSQL)

`world` starts and restarts the processes, `faults` hurts them, `relay` loses and repeats requests
and remembers what producers were told, `trainer` writes a journal of all that it was given, `judge`
compares.
"""
