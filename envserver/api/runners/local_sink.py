"""Stores the groups of an environment in the server's process that shares capacity with runners."""

from __future__ import annotations

from ...rollouts.mixing import Share
from ...store import GroupStore
from ...store.demand import Demand
from ...store.sink import StoreSink
from .registry import RunnerRegistry
from .sharing import LocalEnvironment


class LocalEnvironmentSink(StoreSink):
    """A `StoreSink` whose environment shares capacity with the runners in `environments`.

    Args:
        prefix: ID prefix of its groups.
        capacity: number of groups it can have open.
    """

    def __init__(
        self,
        store: GroupStore,
        demand: Demand,
        environments: RunnerRegistry,
        *,
        share: Share,
        prefix: str,
        capacity: int,
    ) -> None:
        super().__init__(store, share.name, demand)
        self._open = self._begun = 0
        self._environments = environments
        self._local = LocalEnvironment(
            prefix=prefix,
            share=share,
            capacity=capacity,
            open_groups=lambda: self._open,
            begun=lambda: self._begun,
        )
        environments.news.share_with(self._local)

    async def wait_for_capacity(self) -> None:
        """Waits until this environment may begin another group."""
        await super().wait_for_capacity()
        await self._environments.news.wait_for_local_capacity(self._local)

    def opened(self, groups: int) -> None:
        """Counts `groups` more as open; fewer if negative."""
        self._open += groups
        self._begun += max(0, groups)
        super().opened(groups)
