"""From one step's tokens to the routers whose requests got them."""

from collections.abc import Callable

from lorrery.scheduler import wire
from lorrery.scheduler.live_request import LiveRequest
from lorrery.scheduler.routers import RouterLink
from lorrery.vocabulary import u32


class FanOut:
    """Which tokens of a step go to which router; built once for as long as the same sequences get tokens."""

    def __init__(self, handles_u32: bytes, lives: dict[int, LiveRequest]) -> None:
        self.handles_u32 = handles_u32
        handles = u32.unpack(handles_u32)
        self._outputs: list[Callable[[int], None]] = []
        places: dict[RouterLink, tuple[list[int], list[int]]] = {}
        for index, handle in enumerate(handles):
            live = lives.get(handle)
            if live is None:  # cancelled while this plan runs
                self._outputs.append(_nowhere)
                continue
            self._outputs.append(live.token_ids.append)
            indices, router_handles = places.setdefault(live.router, ([], []))
            indices.append(index)
            router_handles.append(live.router_handle)
        self._whole = len(places) == 1 and len(next(iter(places.values()))[0]) == len(handles)
        self._places = [
            (router, indices, u32.pack(router_handles)) for router, (indices, router_handles) in places.items()
        ]

    def send(self, token_ids_u32: bytes, step_ps: int) -> None:
        """Note the step's tokens, and send each router its own."""
        for append, token_id in zip(self._outputs, u32.unpack(token_ids_u32), strict=True):
            append(token_id)
        for router, indices, router_handles_u32 in self._places:
            token_ids = token_ids_u32 if self._whole else wire.take(token_ids_u32, indices)
            router.tokens(router_handles_u32, token_ids, step_ps)


def _nowhere(_token_id: int) -> None:
    """Drop a token that nobody waits for."""
