"""What a running job uses: writes about itself, and its inbox."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from genba.domain.duration import Duration
from genba.domain.outcome import AttemptReport, Fence, OutcomeRequest


class OwnJobWrites(Protocol):
    """The store, as far as a running job may write about itself."""

    def save(self, fence: Fence, checkpoint: bytes, within: Any = None) -> None: ...

    def end(
        self, fence: Fence, request: OutcomeRequest, report: AttemptReport, jitter: float
    ) -> None: ...

    def transaction(
        self, fence: Fence, ending: Callable[[], tuple[OutcomeRequest, AttemptReport, float]]
    ) -> AbstractContextManager[Any]: ...


class Inbox(Protocol):
    """The messages to a running job."""

    def get(self, timeout: Duration | None) -> Any: ...

    async def aget(self, timeout: Duration | None) -> Any: ...

    def close(self) -> None: ...
