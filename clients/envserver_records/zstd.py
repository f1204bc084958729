"""zstd, of Python 3.14 or of the package backports.zstd; only the client does without both."""

import sys

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["zstd"]
