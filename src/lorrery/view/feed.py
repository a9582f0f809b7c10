"""The interface of sources of frames, such as a running cluster."""

from collections.abc import AsyncIterator
from typing import Protocol

from lorrery.service.telemetry.frame_rate import USUAL_HZ
from lorrery.view.frame import Frame, Hello


class Feed(Protocol):
    """Provides frames of a running cluster to any number of concurrent watchers."""

    async def hello(self) -> Hello:
        """Return the description of the source.

        Raises:
            LorreryError: the cluster does not answer.
        """
        ...

    def frames(self, hz: float = USUAL_HZ) -> AsyncIterator[Frame]:
        """Watch the cluster until the iterator is closed; a slow reader misses frames.

        Args:
            hz: frames per wall second.

        Raises:
            LorreryError: the watch has ended; the message says why.
        """
        ...
