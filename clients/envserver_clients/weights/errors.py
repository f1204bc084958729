"""Errors of a transfer of weights, in addition to `envserver_records.errors`.

EnvserverError
├── EngineError              an engine failed; detail: engines (which ones), phase
│   ├── EngineUnavailable    it does not answer, or was restarted meanwhile: publish again
│   ├── EngineTimeout        a phase exceeded its time limit
│   ├── EngineRefused        it was started without a required option; the hint says which
│   ├── EngineGarbage        its answer cannot be read
│   └── WeightsMismatch      its logprobs differ from the trainer's
├── WeightsNotSaved          the files could not be written; no engine was changed
└── ConflictError            the server is already at a higher version
"""

from envserver_records import EngineError, EnvserverError


class WeightsMismatch(EngineError):
    """`detail`: version, old_version, engines, difference, tolerance, token (the worst one)."""

    kind = "weights_mismatch"


class WeightsNotSaved(EnvserverError):
    """`detail`: folder, full (whether the disk is full)."""

    kind, status = "weights_not_saved", 507
