"""Which requests a scheduler accepts: its rules, and the checks that need the request alone."""

from collections.abc import Iterable
from dataclasses import dataclass

from lorrery.scheduler.core import refusals
from lorrery.scheduler.core.limits import Limits, check_lengths
from lorrery.scheduler.core.refusals import Refusal
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.units import NEVER


@dataclass(frozen=True, slots=True)
class ClusterRules:
    """What a scheduler accepts, and how long it lets requests wait.

    Attributes:
        max_req_input_len: longest prompt.
        max_req_total_len: longest prompt and output.
        max_total_token_num: KV pool that a request must fit into; None: the largest attached one.
        max_waiting_requests: bound on waiting requests, whether for a batch or for a worker.
        max_waiting_requests_per_tenant: the same per tenant.
        deadline_admission: refuse requests not expected to start before their deadline, and those still waiting at it.
        start_within_seconds: how long after its arrival a request must start, in device seconds; None: only its own
            deadline counts. Only with `deadline_admission`.
        worker_wait_seconds: how long a request waits for a worker, in wall seconds.
        max_worker_losses: a sequence is given up once this many workers were lost with it in their batch.
        time_scale: wall seconds per device second.
    """

    max_req_input_len: int = NEVER
    max_req_total_len: int = NEVER
    max_total_token_num: int | None = None
    max_waiting_requests: int = NEVER
    max_waiting_requests_per_tenant: int = NEVER
    deadline_admission: bool = False
    start_within_seconds: float | None = None
    worker_wait_seconds: float = 30.0
    max_worker_losses: int = NEVER
    time_scale: float = 1.0


LETS_ALL_IN = ClusterRules()


class Door:
    """Checks a request by itself, without the state of the scheduler.

    Args:
        rules: of the scheduler.
    """

    def __init__(self, rules: ClusterRules) -> None:
        self._rules = rules
        self._own_limits = _limits(rules, NEVER)
        self._limits = self._own_limits

    def set_pools(self, pools: Iterable[int]) -> None:
        """Bound requests by the largest of these KV pools, unless the rules set a bound; without pools, none is set."""
        self._limits = _limits(self._rules, max(pools, default=NEVER))

    def refuse(self, sequence: Sequence, *, let_in_before: bool) -> Refusal | None:
        """Return why a request is not accepted; None: it is.

        A request accepted before, by a scheduler that is gone, is not checked against the workers attached so far.
        """
        if sequence.prompt_tokens < 1 or sequence.max_new_tokens < 1:
            return refusals.nothing_to_do(sequence)
        limits = self._own_limits if let_in_before else self._limits
        wrong = None if limits is None else check_lengths(sequence.prompt_tokens, sequence.max_new_tokens, limits)
        return None if limits is None or wrong is None else refusals.too_long(wrong, sequence, limits)


def _limits(rules: ClusterRules, pool: int) -> Limits | None:
    """Return the limits on lengths, given the largest pool; None: there are none."""
    if rules.max_total_token_num is not None:
        pool = rules.max_total_token_num
    limits = Limits(rules.max_req_input_len, rules.max_req_total_len, pool)
    return None if limits == Limits(NEVER, NEVER, NEVER) else limits
