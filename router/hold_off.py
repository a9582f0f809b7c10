"""Whom a scheduler would refuse just now, so that it need not be asked.

A scheduler that refuses a request for its queue says for whom that holds: for all, or for all of the tenant. Until it
expects a change, and for `MAX_HOLD_SECONDS` at most, further ones are refused here, before anything is read of them:
under ten times the load a cluster can serve, that is nearly all. Each of them is told to come back one place of the
queue later than the one before it, as the scheduler would have told it. The queue is full meanwhile, so no worker
waits.
"""

import time

from lorrery.chassis.errors import Overloaded, RequestError, Unattainable

MAX_HOLD_SECONDS = 0.1
MAX_RETRY_SECONDS = 60.0
MAX_TENANTS = 1000
"""Tenants remembered at once; clients may name any."""


class _Hold:
    """One refusal that holds for others."""

    __slots__ = ("error", "retry_seconds", "step_seconds", "until")

    def __init__(self, error: RequestError, until: float, step_seconds: float) -> None:
        self.error = error
        self.until = until
        self.step_seconds = step_seconds
        self.retry_seconds = error.retry_seconds  # of the latest

    def raise_for_another(self) -> None:
        first = self.error
        if self.retry_seconds is not None:
            self.retry_seconds = min(self.retry_seconds + self.step_seconds, MAX_RETRY_SECONDS)
        kind = Unattainable if isinstance(first, Unattainable) else Overloaded
        raise kind(str(first), first.reason, self.retry_seconds, **first.facts)


class HoldOff:
    """What one scheduler refuses just now."""

    def __init__(self) -> None:
        self._all: _Hold | None = None
        self._of_tenant: dict[str, _Hold] = {}

    def note(self, error: RequestError, tenant_id: str | None, step_seconds: float) -> None:
        """Take note of a refusal that holds for others.

        Args:
            error: what its client is told.
            tenant_id: it holds for all of this tenant; None: for everybody.
            step_seconds: how much later than the one before it each of those may come back.
        """
        now, retry_seconds = time.monotonic(), error.retry_seconds
        hold_seconds = MAX_HOLD_SECONDS if retry_seconds is None else min(retry_seconds, MAX_HOLD_SECONDS)
        hold = _Hold(error, now + hold_seconds, step_seconds)
        if tenant_id is None:
            self._all = hold
            return
        if len(self._of_tenant) >= MAX_TENANTS:
            self._of_tenant = {name: one for name, one in self._of_tenant.items() if one.until > now}
        if len(self._of_tenant) < MAX_TENANTS:
            self._of_tenant[tenant_id] = hold

    def check(self, tenant_id: str) -> None:
        """Check that a new request of a tenant may be worth asking for.

        Raises:
            RequestError: the scheduler would refuse it.
        """
        if self._all is None and not self._of_tenant:
            return
        now = time.monotonic()
        if self._all is not None:
            if now < self._all.until:
                self._all.raise_for_another()
            self._all = None
        hold = self._of_tenant.get(tenant_id)
        if hold is not None:
            if now < hold.until:
                hold.raise_for_another()
            del self._of_tenant[tenant_id]
