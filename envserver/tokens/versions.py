"""The policy version of each token, and the flags that follow from it.

Higher versions are newer; -1 (unknown) is older than any.
"""

from __future__ import annotations

import numpy as np
from envserver_records.records import Call, Tokens

UNKNOWN = -1


def token_versions(call: Call) -> Tokens:
    """int32[C]: the policy version that sampled each token of the call's completion."""
    versions = np.full(len(call.completion_ids), UNKNOWN, np.int32)
    for span in call.versions:
        versions[span.start : span.end] = span.version
    return versions


def flags_of(call: Call) -> list[str]:
    """The flags that were recorded with `call`, and those that its version spans add."""
    sampled = {span.version for span in call.versions if span.end > span.start}
    mixed = len(sampled) > 1 and "mixed_versions" not in call.flags
    return sorted([*call.flags, "mixed_versions"]) if mixed else call.flags
