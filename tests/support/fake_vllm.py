"""The old name of a part of engine_stand_in."""

from support.engine_stand_in import EOS, FakeVllm, fake_vllm, ids_of, logprob, prompt_ids

__all__ = ["EOS", "FakeVllm", "fake_vllm", "ids_of", "logprob", "prompt_ids"]
