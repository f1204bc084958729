"""zstd: from Python 3.14 on in the standard library, before that the package backports.zstd.

Importing this raises ModuleNotFoundError where there is neither; only the client alone allows that.
"""

import sys

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["zstd"]
