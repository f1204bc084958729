"""Queries to be routed: a plan of steps for sub-agents, in strict JSON, that can be run."""
