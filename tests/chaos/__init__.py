"""A server, an engine, environments and two trainers under random faults, and who judges them.

    engine <── witness ── server <── faulty relay ── trainers a and b, joined environment, poster
                            │
                          store (SQLite on a small disk, or PostgreSQL)

Or two or three servers on one PostgreSQL, each with a relay: clients have the URLs of all.

`world` starts and restarts the processes, `faults` hurts them, `relay` loses and repeats requests
and remembers what producers were told, `trainer` writes a journal of all that it was given, `judge`
compares.
"""
