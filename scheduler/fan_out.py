"""From one step's tokens to the routers whose requests got them."""

from array import array

from lorrery.scheduler import wire
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.live_request import LiveRequest
from lorrery.scheduler.messages import ProtocolError
from lorrery.scheduler.routers import RouterLink
from lorrery.vocabulary import u32


class FanOut:
    """Which tokens of a step go to which router; built once for as long as the same sequences get tokens.

    Args:
        handles_u32: sequences that got a token.
        lives: the scheduler's requests, by handle.
        running: the batch of the worker that made the tokens.

    Raises:
        ProtocolError: a sequence that does not run on this worker.
    """

    def __init__(self, handles_u32: bytes, lives: dict[int, LiveRequest], running: Running) -> None:
        self.handles_u32 = handles_u32
        handles = u32.unpack(handles_u32)
        self._outputs: list[array[int] | None] = []
        places: dict[RouterLink, tuple[list[int], list[int]]] = {}
        for index, handle in enumerate(handles):
            live = lives.get(handle)
            if live is None:  # cancelled while this plan runs
                self._outputs.append(None)
                continue
            if running.get(handle) is None:
                raise ProtocolError(f"the worker has a token for sequence {handle}, which does not run there")
            self._outputs.append(live.token_ids)
            indices, router_handles = places.setdefault(live.router, ([], []))
            indices.append(index)
            router_handles.append(live.router_handle)
        self._whole = len(places) == 1 and len(next(iter(places.values()))[0]) == len(handles)
        self._places = [
            (router, indices, u32.pack(router_handles)) for router, (indices, router_handles) in places.items()
        ]

    def append(self, token_ids_u32: bytes) -> None:
        """Note the step's tokens.

        Raises:
            ProtocolError: not one token for each handle; none is noted then.
        """
        token_ids = u32.unpack(token_ids_u32)
        if len(token_ids) != len(self._outputs):
            raise ProtocolError(f"the worker has {len(token_ids)} tokens for {len(self._outputs)} sequences")
        for output, token_id in zip(self._outputs, token_ids, strict=True):
            if output is not None:
                output.append(token_id)

    def take_back(self) -> None:
        """Forget the tokens noted last."""
        for output in self._outputs:
            if output is not None:
                output.pop()

    def send(self, token_ids_u32: bytes, step_ps: int) -> None:
        """Send each router its own of the step's tokens."""
        for router, indices, router_handles_u32 in self._places:
            token_ids = token_ids_u32 if self._whole else wire.take(token_ids_u32, indices)
            router.tokens(router_handles_u32, token_ids, step_ps)
