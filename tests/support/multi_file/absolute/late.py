"""Imported by the agent, not by the environment's file."""

ANSWER = "late"
