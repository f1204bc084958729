"""Which rollout runs when, and what becomes of it.

Tasks flow in, scored groups flow out to a sink. Decisions are pure functions (`policy`); running
one attempt (`attempt`), one group (`group`) and the stream (`scheduler`) each has its module.
"""
