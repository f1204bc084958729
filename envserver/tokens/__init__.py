"""Exact tokens, in two independent parts (see README.md).

Before a call, messages -> prompt ids, so that a conversation continues from its recorded tokens:
history, comparison, suffix; chat_format, prepare, vocabulary; images.

After a rollout, recorded calls -> training rows: builder, invariants, flags; trace. Only recorded
ids can get into a row, whatever the first part did.
"""
