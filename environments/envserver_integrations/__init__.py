"""Environments of other frameworks: `--env verifiers:NAME` and its like; one folder a framework."""
