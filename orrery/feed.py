"""Where frames come from: a running cluster, or whatever else has these two methods."""

from collections.abc import AsyncIterator
from typing import Protocol

from lorrery.chassis.frame_rate import USUAL_HZ
from lorrery.orrery.frame import Frame, Hello


class Feed(Protocol):
    """Gives frames of a running cluster, to any number of watchers at once."""

    async def hello(self) -> Hello:
        """Say what the frames are of.

        Raises:
            LorreryError: the cluster does not answer.
        """
        ...

    def frames(self, hz: float = USUAL_HZ) -> AsyncIterator[Frame]:
        """Watch the cluster until the iterator is closed; who reads slowly misses frames.

        Args:
            hz: frames a second, wall time.

        Raises:
            LorreryError: the watch has ended: the message says why.
        """
        ...
