"""The page that shows runs, groups and rollouts: its source, its built files, and what serves them.

In: requests of browsers. Out: the built page. All data is JSON of `/v1`, which others answer.
"""

from .serving import STATIC, Dashboard

__all__ = ["STATIC", "Dashboard"]
