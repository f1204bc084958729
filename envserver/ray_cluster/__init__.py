"""Runners on the nodes of a Ray cluster. Ray only places, starts and restarts; no group goes
through its object store.
"""
