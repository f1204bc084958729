"""Schedules rollouts, retries failures, scores results and delivers groups.

Tasks flow in, scored groups flow out to a sink. Decisions are pure functions (`policy`); running
one attempt (`attempt`), one group (`group`) and the stream (`scheduler`) each has its module.
"""
