"""Pure functions from the recorded calls of one rollout to exact training sequences.

In: `Call` records. Out: `Sequence` records. No text, no tokenizer, no messages: what is not among
the recorded ids cannot get into a training row.
"""
