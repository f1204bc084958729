"""Runners on the nodes of a Ray cluster.

In: what a runner is to make, and how many runners there should be. Out: actors, each of which has
one `envserver join` as its child. What holds: Ray only places, starts and restarts; no group goes
through its object store. This room is imported only where it is used: Ray is an extra.
"""
