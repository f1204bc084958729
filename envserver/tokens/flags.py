"""Flags for unusual calls, sequences and trajectories, with the default action for each.

`train`: harmless, kept and counted. `mask`: the call's tokens stay as context but are not trained.
`drop`: the rollout is not delivered. A run overrides single flags with `Actions`. Every flag is
counted wherever it appears.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import numpy as np
from envserver_records.errors import ConfigError
from envserver_records.records import Call, Tokens

Action = Literal["train", "mask", "drop"]


class Flag(NamedTuple):
    action: Action
    meaning: str


FLAGS: dict[str, Flag] = {
    # The engine did not say what was sampled.
    "missing_token_ids": Flag("drop", "the engine gave no token ids"),
    "missing_logprobs": Flag("drop", "the engine gave no logprobs"),
    "logprob_count_mismatch": Flag("drop", "ids, logprobs and the engine's count differ"),
    "prompt_mismatch": Flag("drop", "the engine saw a different prompt than it was sent"),
    "other_model_served": Flag("drop", "a model other than the requested one answered"),
    "weights_lost": Flag("drop", "the engine was restarted and lost the published weights"),
    # The tokens are exact, but were cut or not acted on.
    "undelivered_completion": Flag("mask", "sampled, but the agent never got it"),
    "finish_abort": Flag("mask", "the engine aborted the answer"),
    "truncated_length": Flag("train", "cut off at the token limit"),
    "truncated_in_tool_call": Flag("train", "cut off in the middle of a tool call"),
    "extreme_logprob": Flag("mask", "a sampled token has a logprob below -1000"),
    "stop_string_tail": Flag("train", "ended by a stop string: the tokens hold more than the text"),
    "parallel_calls_dropped": Flag("train", "several tool calls sampled, the agent takes only one"),
    "experts_missing": Flag("train", "the routed experts of some of its tokens are unknown"),
    "client_retry_replayed": Flag("train", "sent again to a retry of the same request"),
    "call_after_seal": Flag("train", "the agent sent calls after its rollout had ended"),
    "result_cut_off": Flag("train", "what rollout() returned was too large or too deep"),
    "result_text_replaced": Flag("train", "rollout() returned characters that cannot be stored"),
    "metrics_left_out": Flag("train", "too many metrics, or names too long or unprintable"),
    "over_bound": Flag("train", "the agent exceeded a limit of the proxy"),
    "scorer_killed": Flag("train", "scored 0: its text used up the scorer's CPU seconds"),
    # What the agent saw is not all that was sampled.
    "lossy_detokenization": Flag("train", "the text cannot show some of the tokens"),
    "special_token_in_completion": Flag("train", "a special token was sampled inside the answer"),
    "reasoning_dropped_answer_lost": Flag("train", "the agent sent an empty answer back"),
    # A hook of the environment stood between the agent and the engine.
    "request_changed": Flag("train", "the environment changed the request before it was sampled"),
    "request_refused": Flag("train", "the environment refused a request of the agent"),
    "answer_changed": Flag("mask", "the environment changed the answer: the agent got another"),
    "answer_refused": Flag("mask", "the environment refused the answer: the agent never got it"),
    # The policy changed while it sampled.
    "mixed_versions": Flag("train", "sampled by more than one policy version"),
    "own_model": Flag("train", "sampled by the agent's own model, not by the policy"),
    "version_unknown": Flag("train", "the policy version that sampled it is unknown"),
    # The recorded logprobs are not those of the distribution that was sampled from.
    "structured_output_masked": Flag("mask", "a grammar or bias masked the distribution"),
    "strict_dropped": Flag("train", "sampled without the grammar of the agent's strict tools"),
    "fields_ignored": Flag("train", "the agent sent fields that have no effect here"),
    "unchecked_fields": Flag("train", "the run passed on fields that may change the distribution"),
    "top_p_active": Flag("train", "top_p cut the distribution that was sampled from"),
    # In rows of older versions; now each row says its temperature and which logprobs it has.
    "temperature_not_one": Flag("train", "logprobs from before the temperature was applied"),
    # How the prompt came to be.
    "assistant_edited": Flag("train", "the agent changed an answer before sending it back"),
    "unsampled_assistant_in_history": Flag("train", "an answer in the prompt was never sampled"),
    "template_rewrites_history": Flag("train", "the chat template renders the past differently"),
    "think_stripped": Flag("train", "the chat template dropped earlier reasoning"),
    "think_kept": Flag("train", "earlier reasoning was kept that the template would drop"),
    "ambiguous_parent": Flag("train", "several recorded answers match; the latest was continued"),
    "render_mismatch": Flag("train", "not continued: the engine renders it differently"),
    "suffix_refused": Flag("train", "the conversation could not be continued exactly"),
    "multimodal_unstitched": Flag("train", "images or audio: the engine rendered the prompt"),
    "images_unplaced": Flag("mask", "unknown which tokens of the prompt are its images"),
    # Hosts outside that agents reach through the server.
    "egress_refused": Flag("train", "the agent exceeded its rights or limits of egress"),
    # Who played.
    "foreign_agent": Flag("train", "an external agent ran it (--agent)"),
    # Leaks of the task on the web; the environment decides what such a rollout is worth.
    "web_leak_dropped": Flag("train", "a page that reveals the answer was hidden from the agent"),
    "web_leak_seen": Flag("train", "the agent was shown something that reveals the answer"),
    # The engine failed, and the agent went on.
    "engine_error_seen": Flag("train", "the engine failed and the agent continued"),
}


class Actions:
    def __init__(self, overrides: Mapping[str, Action] | None = None) -> None:
        self._overrides = dict(overrides or {})
        for flag in self._overrides:
            if flag not in FLAGS:
                near = difflib.get_close_matches(flag, FLAGS, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(FLAGS)}."
                raise ConfigError(f"There is no flag {flag!r}.", hint=hint)

    def of(self, flag: str) -> Action:
        """Returns the action for `flag`; "drop" for an unknown one."""
        known = FLAGS.get(flag)
        return self._overrides.get(flag, known.action if known else "drop")

    def worst(self, flags: Iterable[str]) -> Action:
        """Returns the strictest action among those of `flags` ("train" for none)."""
        actions = {self.of(flag) for flag in flags}
        return "drop" if "drop" in actions else "mask" if "mask" in actions else "train"


DEFAULT = Actions()


def chosen(
    train: Iterable[str] = (), mask: Iterable[str] = (), drop: Iterable[str] = ()
) -> Actions:
    """Returns the actions for a run's lists of flags; the strictest wins."""
    overrides: dict[str, Action] = {}
    overrides.update(dict.fromkeys(train, "train"))
    overrides.update(dict.fromkeys(mask, "mask"))
    overrides.update(dict.fromkeys(drop, "drop"))
    return Actions(overrides)


UNKNOWN = -1


def token_versions(call: Call) -> Tokens:
    """Returns int32[C]: the policy version that sampled each token of the call's completion."""
    versions = np.full(len(call.completion_ids), UNKNOWN, np.int32)
    for span in call.versions:
        versions[span.start : span.end] = span.version
    return versions


def flags_of(call: Call) -> list[str]:
    """Returns the flags that were recorded with `call`, and those that its version spans add."""
    sampled = {span.version for span in call.versions if span.end > span.start}
    mixed = len(sampled) > 1 and "mixed_versions" not in call.flags
    return sorted([*call.flags, "mixed_versions"]) if mixed else call.flags
