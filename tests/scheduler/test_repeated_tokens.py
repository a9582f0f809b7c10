"""A token that a preempted request makes again, since it was lost with `core.overlap`: kept, and not sent twice."""

from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.routers import LiveRequest
from lorrery.scheduler.steps import FanOut
from lorrery.vocabulary import u32


class Router:
    """Keeps the tokens that it is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[int], list[int]]] = []

    def tokens(self, router_handles: bytes, token_ids: bytes, step_ps: int) -> None:
        self.sent.append((list(u32.unpack(router_handles)), list(u32.unpack(token_ids))))


def fan_out(lives: dict[int, LiveRequest], running: Running) -> FanOut:
    return FanOut(u32.pack(lives), lives, running)


def test_a_repeated_token_is_appended_but_not_sent_and_the_next_one_is():
    router, running = Router(), Running()
    lives = {}
    for handle in (1, 2):
        running.admit(Sequence(handle, 4, 9))
        lives[handle] = LiveRequest(Sequence(handle, 4, 9), router, 10 + handle, "r", "", b"", None)  # type: ignore[arg-type]
    lives[2].num_repeats = 1
    tokens = u32.pack([7, 8])
    first = fan_out(lives, running)
    first.append(tokens)
    first.send(tokens, 5)
    assert router.sent == [([11], [7])]
    assert list(lives[2].token_ids) == [8]
    assert first.is_for_one_step
    second = fan_out(lives, running)
    second.append(tokens)
    second.send(tokens, 5)
    assert router.sent[1:] == [([11, 12], [7, 8])]
    assert not second.is_for_one_step


def test_a_repeated_token_that_is_taken_back_is_still_to_be_repeated():
    router, running = Router(), Running()
    running.admit(Sequence(1, 4, 9))
    live = LiveRequest(Sequence(1, 4, 9), router, 11, "r", "", b"", None)  # type: ignore[arg-type]
    live.num_repeats = 1
    made = fan_out({1: live}, running)
    made.append(u32.pack([7]))
    made.take_back()
    assert (list(live.token_ids), live.num_repeats) == ([], 1)
