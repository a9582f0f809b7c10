"""Injected faults: what goes wrong in a cluster, and when. One syntax for settings, commands and callers.

    worker_loss,at=30,worker=worker-1,for=10          the worker dies with its state, and comes back empty
    slow_worker,at=30,worker=worker-0,factor=1.5,for=60    its steps take this many times as long
    freeze_worker,at=30,worker=worker-0,for=3         it begins no step, but stays connected
    adapter_load_failure,adapter=lora-r8-0,first=2    the first two loads of the adapter fail, on each worker
    slow_adapter_load,factor=20,share=0.1             one load in ten takes twenty times as long
    refuse,first=3,status=RESOURCE_EXHAUSTED          the first three requests end with that status at once
    cut,after=5,share=0.1                             one stream in ten ends with UNAVAILABLE after five tokens
    stall,after=5,seconds=2,tenant=acme               streams of a tenant pause for two seconds after five tokens
    delay,seconds=0.5,adapter=lora-r8-0               an adapter's requests reach a scheduler half a second late

Times are device seconds. Without `at` a fault begins at once, without `for` it never ends; without `adapter`, `tenant`
or `worker` it applies to all; the name of a worker process stands for all its GPUs. `first=N` applies it to the first N
matches, `share=P` to a share of them, drawn from `seed` and the number of the match (`service.faults.rules`).
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import combinations

from lorrery.service.errors import InvalidRequest, SettingsError
from lorrery.service.names import is_hosted_by, quoted
from lorrery.vocabulary.units import NEVER, PS_PER_SECOND

WORKER_LOSS, SLOW_WORKER, FREEZE_WORKER = "worker_loss", "slow_worker", "freeze_worker"
LOAD_FAILURE, SLOW_LOAD = "adapter_load_failure", "slow_adapter_load"
REFUSE, CUT, STALL, DELAY = "refuse", "cut", "stall", "delay"
WORKER_KINDS = frozenset({WORKER_LOSS, SLOW_WORKER, FREEZE_WORKER})
LOAD_KINDS = frozenset({LOAD_FAILURE, SLOW_LOAD})
REQUEST_KINDS = frozenset({REFUSE, CUT, STALL, DELAY})
STATUSES = (
    *("CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
"""Statuses with which a fault may end a request: all of gRPC's but OK."""

MAX_EXPONENT = 30
"""Upper bound on the magnitude of a number's decimal exponent."""
MAX_TEXT = 400
"""Upper bound on a fault's text in characters: it appears in messages and in the log."""

_WHEN = {"at", "for"}
_SOME = {"first", "share", "seed"}
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    WORKER_LOSS: ({"worker"}, _WHEN),
    SLOW_WORKER: ({"worker", "factor"}, _WHEN),
    FREEZE_WORKER: ({"worker"}, _WHEN),
    LOAD_FAILURE: (set(), {*_WHEN, *_SOME, "adapter", "worker"}),
    SLOW_LOAD: ({"factor"}, {*_WHEN, *_SOME, "adapter", "worker"}),
    REFUSE: (set(), {*_WHEN, *_SOME, "adapter", "tenant", "status"}),
    CUT: ({"after"}, {*_WHEN, *_SOME, "adapter", "tenant", "status"}),
    STALL: ({"after", "seconds"}, {*_WHEN, *_SOME, "adapter", "tenant"}),
    DELAY: ({"seconds"}, {*_WHEN, *_SOME, "adapter", "tenant"}),
}
"""By kind: required keys and optional keys."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        text: as given.
        kind: a key of the module's list.
        at_ps: when it begins.
        until_ps: when it ends; `NEVER`: it does not.
        worker: the worker that it affects, or whose loads; a process's name stands for all its GPUs; empty: all.
        adapter: whose loads or requests; empty: all.
        tenant: whose requests; empty: all.
        factor: on a slow worker's step times, or on a load's time.
        seconds: device seconds by which a stream pauses or a request is late.
        after: tokens that a stream produces before.
        status: name of the gRPC status with which a request ends.
        first: applies to this many matches; None: all.
        share: share of the matches that it applies to.
        seed: of the draws for `share`.
    """

    text: str
    kind: str
    at_ps: int = 0
    until_ps: int = NEVER
    worker: str = ""
    adapter: str = ""
    tenant: str = ""
    factor: Fraction = Fraction(1)
    seconds: Fraction = Fraction(0)
    after: int = 0
    status: str = "UNAVAILABLE"
    first: int | None = None
    share: Fraction = Fraction(1)
    seed: int = 0

    @property
    def duration_ps(self) -> int:
        """`seconds` in picoseconds."""
        return round(self.seconds * PS_PER_SECOND)

    def begun_at(self, from_ps: int) -> "Fault":
        """Return the fault with its times shifted by `from_ps`."""
        until_ps = self.until_ps if self.until_ps == NEVER else self.until_ps + from_ps
        return replace(self, at_ps=self.at_ps + from_ps, until_ps=until_ps)

    def concerns(self, worker: str) -> bool:
        """Return whether it applies to a worker: to all, to that one, or to the process that hosts it."""
        return not self.worker or is_hosted_by(worker, self.worker)

    def goes_on_at(self, at_ps: int) -> bool:
        """Return whether it is active at a time."""
        return self.at_ps <= at_ps and (at_ps < self.until_ps or self.until_ps == NEVER)


def parse_fault(text: str) -> Fault:
    """Parse a fault in the syntax shown in the module's docstring.

    Raises:
        SettingsError: it is malformed; the message says how.
    """
    if len(text) > MAX_TEXT:
        raise SettingsError(f"fault {quoted(text)} has {len(text)} characters; at most {MAX_TEXT} are allowed")
    kind, *parts = (part.strip() for part in text.split(","))
    if kind not in _KEYS:
        raise SettingsError(f"fault {text}: {kind!r} is none of {', '.join(_KEYS)}")
    needed, possible = _KEYS[kind]
    values: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if key == "worker" and kind in REQUEST_KINDS:
            raise SettingsError(
                f"fault {text}: {part!r}; {kind} is chosen as a request comes in, before a worker is, and holds"
                f" wherever the request moves; {', '.join(sorted(WORKER_KINDS | LOAD_KINDS))} have a worker"
            )
        if not equals or key not in needed | possible or key in values:
            raise SettingsError(f"fault {text}: {part!r}; {kind} has {', '.join(sorted(needed | possible))}")
        if not value:
            what = f"name one, or leave {key} out" if key in possible else "name one"
            raise SettingsError(f"fault {text}: {key} is empty; {what}")
        values[key] = value
    for key in sorted(needed - values.keys()):
        raise SettingsError(f"fault {text}: {key} is missing")
    number = _Numbers(text, values)
    at = number.read("at", Fraction(0), least=0)
    if at >= NEVER // PS_PER_SECOND:
        raise SettingsError(
            f"fault {text}: at is {values['at']}; a simulation has {NEVER // PS_PER_SECOND:,} s at most"
        )
    seconds = number.read("seconds", Fraction(0), above=0)
    if seconds >= NEVER // PS_PER_SECOND:
        raise SettingsError(f"fault {text}: seconds is {values['seconds']}; at most {NEVER // PS_PER_SECOND:,} will do")
    until_ps = NEVER
    if "for" in values:
        until_ps = min(round((at + number.read("for", above=0)) * PS_PER_SECOND), NEVER)
    share = number.read("share", Fraction(1), above=0)
    if share > 1:
        raise SettingsError(f"fault {text}: share is {values['share']}; it must be above 0 and at most 1")
    status = values.get("status", "UNAVAILABLE")
    if status not in STATUSES:
        raise SettingsError(f"fault {text}: status is {status!r}; it must be one of {', '.join(STATUSES)}")
    return Fault(
        text,
        kind,
        round(at * PS_PER_SECOND),
        until_ps,
        worker=values.get("worker", ""),
        adapter=values.get("adapter", ""),
        tenant=values.get("tenant", ""),
        factor=number.read("factor", Fraction(1), above=0),
        seconds=seconds,
        after=number.count("after", 1 if kind == STALL else 0),
        status=status,
        first=number.count("first", 1) if "first" in values else None,
        share=share,
        seed=number.count("seed", 0),
    )


class _Numbers:
    """The numbers in a fault's text."""

    def __init__(self, text: str, values: dict[str, str]) -> None:
        self._text, self._values = text, values

    def read(
        self, key: str, default: Fraction = Fraction(0), *, least: int | None = None, above: int | None = None
    ) -> Fraction:
        value = self._values.get(key)
        if value is None:
            return default
        try:
            decimal = Decimal(value)
            # A fraction of 1e999999999 has that many digits.
            if decimal.is_finite() and abs(decimal.adjusted()) > MAX_EXPONENT:
                raise SettingsError(
                    f"fault {self._text}: {key} is {value}; it must be below 1e{MAX_EXPONENT + 1}, and 0 or at least"
                    f" 1e-{MAX_EXPONENT}"
                )
            number = Fraction(decimal)
        except (InvalidOperation, ValueError, OverflowError):
            raise SettingsError(f"fault {self._text}: {key} is {value!r}; it must be a number") from None
        if (least is not None and number < least) or (above is not None and number <= above):
            bound = "0 or more" if above is None else "above 0"
            raise SettingsError(f"fault {self._text}: {key} is {value}; it must be {bound}")
        return number

    def count(self, key: str, least: int) -> int:
        value = self._values.get(key, str(least))
        if not value.isascii() or not value.isdigit() or len(value) > 18 or int(value) < least:
            raise SettingsError(f"fault {self._text}: {key} is {value!r}; it must be a whole number, {least} or more")
        return int(value)


def check_faults(
    faults: Sequence[Fault], *, workers: Iterable[str] | None = None, adapters: Iterable[str], replaced: bool = False
) -> None:
    """Check that faults are compatible with each other and with the cluster.

    Args:
        faults: in any order.
        workers: names of the cluster's workers; None: unknown.
        adapters: ids of the adapters in the settings.
        replaced: whether a lost worker is replaced at once, and may be lost again.

    Raises:
        SettingsError: a fault names something unknown, or overlaps another of its kind and worker.
    """
    known, names = set(adapters), None if workers is None else list(workers)
    for fault in faults:
        if fault.adapter and fault.adapter not in known and fault.kind in LOAD_KINDS:
            raise SettingsError(f"fault {fault.text}: no such adapter in adapters.registry")
        if names is not None and not any(map(fault.concerns, names)):
            raise SettingsError(f"fault {fault.text}: no such worker; there are {', '.join(names)}")
    ordered = sorted((fault for fault in faults if fault.kind in WORKER_KINDS), key=lambda fault: -fault.at_ps)
    for fault, earlier in combinations(ordered, 2):
        same = fault.concerns(earlier.worker) or earlier.concerns(fault.worker)
        same &= not (replaced and fault.kind == WORKER_LOSS)
        if same and fault.kind == earlier.kind and fault.at_ps < earlier.until_ps:
            raise SettingsError(
                f"fault {fault.text}: begins before {earlier.text} is over; let it begin later, or end the other"
                " before, with for"
            )


MAX_RULES = 64
"""Upper bound on the rules of all of an operator's calls, or of one request."""


def read_rules(texts: Sequence[str], field: str, kinds: Container[str] | None = None) -> list[Fault]:
    """Parse the rules of a call.

    Args:
        texts: one rule each.
        field: name of their field.
        kinds: kinds that are allowed; None: all.

    Raises:
        InvalidRequest: there are too many rules, one is invalid, or two conflict.
    """
    if len(texts) > MAX_RULES:
        raise InvalidRequest(
            f"{field} has {len(texts)} faults; at most {MAX_RULES} at once",
            field=field,
            value=len(texts),
            limit=MAX_RULES,
        )
    try:
        faults = [parse_fault(text) for text in texts]
        check_faults(faults, adapters={fault.adapter for fault in faults})
    except SettingsError as error:
        raise InvalidRequest(f"{field}: {error}", field=field) from None
    for fault in faults:
        if kinds is not None and fault.kind not in kinds:
            what = "no fault of requests" if fault.kind not in REQUEST_KINDS else "a fault of requests"
            raise InvalidRequest(f"{field}: fault {fault.text}: {fault.kind} is {what}", field=field)
    return faults


def further(faults: Iterable[Fault], held: Sequence[Fault], from_ps: int = 0) -> list[Fault]:
    """Return the new ones among an operator's further faults; a fault in force stays unchanged.

    Args:
        faults: of the call.
        held: faults of previous calls, with times on the clock of `from_ps`.
        from_ps: origin of the new faults' times.

    Raises:
        InvalidRequest: two conflict.
    """
    known = {fault.text for fault in held}
    new = [fault for fault in faults if fault.text not in known]
    timed = [*held, *(fault.begun_at(from_ps) for fault in new)]
    try:
        check_faults(timed, adapters={fault.adapter for fault in timed})
    except SettingsError as error:
        raise InvalidRequest(f"rules: {error}", field="rules") from None
    return new


def check_number(num_held: int, num_new: int) -> None:
    """Check the total number of an operator's rules.

    Raises:
        InvalidRequest: it exceeds `MAX_RULES`.
    """
    if num_held + num_new > MAX_RULES:
        raise InvalidRequest(
            f"rules: {num_held} faults hold and {num_new} are to be added; at most {MAX_RULES} at once; take the"
            " others' place with a call that does not add, or with none",
            field="rules",
            value=num_held + num_new,
            limit=MAX_RULES,
        )
