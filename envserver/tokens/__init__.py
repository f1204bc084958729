"""Exact tokens, in two independent parts (see README.md).

Before a call: messages -> prompt ids, so that a conversation goes on from what was recorded.

    history      which recorded call a request continues, and with which ids
    chain, edits, parents      finding that call: what requests say, what agents change
    comparison   whether the template now shows what the model has in its context
    suffix, shape              what a chat template writes behind an answer
    chat_format, template, prepare, vocabulary      a model's chat template and tokenizer
    prompts, refusal, agreement      what is decided; what is refused; whether engine and we agree

After a rollout: recorded calls -> training rows. No messages, no tokenizer, no text: what is not
among the recorded ids cannot get into a row, whatever the first part did.

    builder      the forest of calls, and its rows
    versions     which policy version sampled which token
    invariants   what holds of every trajectory
    flags        what may be odd, and what is done about it
    trace        all calls, in the size of what was said
"""
