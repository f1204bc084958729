"""The endpoint that agents talk to: README.md draws the path of one call and lists the files.

A call, the only source of training tokens, is recorded before the last byte of its answer is sent;
an attempt never gets more turns, tokens or time than its limits; nothing is recorded after it is
sealed; no answer holds the engine's key, the hidden part of a task, or a field that only the proxy
asked the engine for.
"""
