"""What a chaos run lets pass: each ending is allowed for its reason only, and wrong tokens never are."""

from dataclasses import dataclass, field

import pytest

from lorrery.service.settings.cluster import Settings
from lorrery.v1 import router_pb2, types_pb2
from tests.chaos.clients import Kind, Outcome
from tests.chaos.cluster import Event, History
from tests.chaos.plan import Kind as Action
from tests.chaos.verdicts import wrong_with
from tests.cluster.client import Ask, Stream, text_of

SETTINGS = Settings()
ASK = Ask(5, 8, 6)
TOKEN_IDS, REASON = ASK.expected(SETTINGS)
BEGAN, ENDED = 100.0, 110.0


@dataclass
class Seen:
    """What a client saw of a stream."""

    ask: Ask
    token_ids: list[int]
    finish: router_pb2.Finish | None = None
    error: None = None
    text: str = field(default="")

    check = Stream.check


def verdict(
    code: str,
    reason: str = "",
    *,
    kind: Kind = Kind.PLAIN,
    key: str = "acme",
    ask: Ask = ASK,
    token_ids: list[int] | None = None,
    events: tuple[Event, ...] = (),
    losses: tuple[float, ...] = (),
    cut_after: int = 0,
    usage: types_pb2.Usage | None = None,
) -> str:
    seen = Seen(ask, TOKEN_IDS[:2] if token_ids is None else token_ids)
    if code == "OK":
        usage = usage or types_pb2.Usage(prompt_tokens=8, completion_tokens=6)
        seen.finish = router_pb2.Finish(reason=REASON, usage=usage)  # type: ignore[arg-type]
        seen.text = text_of(seen.token_ids)
    outcome = Outcome(kind, key, "router-1", BEGAN, ENDED, code, reason, "", seen, cut_after)  # type: ignore[arg-type]
    return wrong_with(outcome, SETTINGS, History(events=list(events)), losses)


def did(kind: Action, target: str = "router-1", began: float = 105.0) -> tuple[Event]:
    return (Event(kind, target, began, began + 1),)


def test_a_stream_that_ended_well_has_all_tokens_and_the_right_usage():
    assert verdict("OK", token_ids=TOKEN_IDS) == ""
    assert "at 5" in verdict("OK", token_ids=TOKEN_IDS[:5])
    wrong_usage = types_pb2.Usage(prompt_tokens=8, completion_tokens=7)
    assert verdict("OK", token_ids=TOKEN_IDS, usage=wrong_usage) != ""


@pytest.mark.parametrize("token_ids", [[*TOKEN_IDS[:2], 1], TOKEN_IDS[1:], [*TOKEN_IDS, 4], [TOKEN_IDS[0], *TOKEN_IDS]])
def test_wrong_tokens_are_wrong_however_the_stream_ended(token_ids: list[int]):
    for code in ("OK", "CANCELLED", "UNAVAILABLE"):
        assert verdict(code, token_ids=token_ids, kind=Kind.CANCELLED, events=did(Action.KILL)) != ""


@pytest.mark.parametrize("code", ["UNAVAILABLE", "CANCELLED"])
def test_streams_are_cut_by_the_end_of_their_own_router_only(code: str):
    assert verdict(code, events=did(Action.KILL)) == ""
    assert verdict(code, events=did(Action.TERMINATE)) == ""
    assert verdict(code) != ""
    assert verdict(code, events=did(Action.STOP)) != ""
    assert verdict(code, events=did(Action.KILL, "router")) != ""
    assert verdict(code, events=did(Action.KILL, "scheduler")) != ""
    assert verdict(code, events=did(Action.KILL, began=120.0)) != ""
    assert verdict(code, "NO_WORKER", events=did(Action.KILL)) != ""


def test_a_router_that_is_stopped_soon_after_its_start_cannot_be_dialled_until_it_goes_on():
    killed, stopped = Event(Action.KILL, "router-1", 80.0, 90.0), Event(Action.STOP, "router-1", 91.0, 101.0)
    assert verdict("UNAVAILABLE", events=(killed,)) != ""
    assert verdict("UNAVAILABLE", events=(stopped,)) != ""
    assert verdict("UNAVAILABLE", events=(killed, stopped)) == ""


def test_what_was_asked_for_has_to_come():
    assert verdict("INVALID_ARGUMENT", "NEVER_FITS", kind=Kind.TOO_LONG, token_ids=[]) == ""
    assert verdict("INVALID_ARGUMENT", "NEVER_FITS", token_ids=[]) != ""
    assert verdict("OK", kind=Kind.TOO_LONG, token_ids=TOKEN_IDS) == "it ended well"
    assert verdict("DATA_LOSS", "FAULT_INJECTED", kind=Kind.CUT, cut_after=2) == ""
    assert verdict("DATA_LOSS", "FAULT_INJECTED", kind=Kind.CUT, cut_after=3) != ""
    assert verdict("CANCELLED", kind=Kind.CANCELLED) == ""
    assert verdict("DEADLINE_EXCEEDED", kind=Kind.DEADLINE) == ""
    assert verdict("DEADLINE_EXCEEDED") != ""


def test_quotas_slow_readers_adapters_and_lost_workers_are_reasons_where_they_apply():
    assert verdict("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", key="few", token_ids=[]) == ""
    assert verdict("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", token_ids=[]) != ""
    assert verdict("RESOURCE_EXHAUSTED", "SLOW_READER", kind=Kind.SLOW) == ""
    assert verdict("RESOURCE_EXHAUSTED", "SLOW_READER") != ""
    assert verdict("NOT_FOUND", "UNKNOWN_ADAPTER", token_ids=[]) != ""
    at_run_time = Ask(5, 8, 6, "x-1")
    assert verdict("NOT_FOUND", "UNKNOWN_ADAPTER", ask=at_run_time, token_ids=[]) == ""
    limit = SETTINGS.scheduler.max_worker_losses
    assert verdict("INTERNAL", "WORKERS_LOST", losses=(105.0,) * limit) == ""
    assert verdict("INTERNAL", "WORKERS_LOST", losses=(105.0,) * (limit - 1)) != ""
