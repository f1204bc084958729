"""How tokens were sampled, and what the logprobs delivered with them mean."""

from __future__ import annotations

from typing import Final

LEAST_LOGPROB: Final = -1000.0
"""No token is sampled with a lower logprob: engines write such numbers (vLLM: -9999) for minus
infinity."""

LOGPROB_ROUNDING: Final = 1e-6
"""A sampled token's logprob may be this much above 0."""
