"""How giving weights to an engine can fail, beside what `envserver.errors` has.

EnvserverError
├── EngineError              an engine failed; detail: engines (which ones), phase
│   ├── EngineUnavailable    it does not answer, or was started again meanwhile: publish again
│   ├── EngineTimeout        a phase took longer than its seconds
│   ├── EngineRefused        it was started without what this needs; the hint says what
│   ├── EngineGarbage        its answer cannot be read
│   └── WeightsMismatch      it computes other logprobs than the trainer
├── WeightsNotSaved          the files could not be written; no engine was touched
└── ConflictError            the server is at a higher version already
"""

from __future__ import annotations

from envserver_records import EngineError, EnvserverError


class WeightsMismatch(EngineError):
    """`detail`: version, old_version, engines, difference, tolerance, token (where it is worst)."""

    kind = "weights_mismatch"


class WeightsNotSaved(EnvserverError):
    """`detail`: folder, full (whether the disk is)."""

    kind, status = "weights_not_saved", 507
