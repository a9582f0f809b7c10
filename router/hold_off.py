"""Requests that a scheduler would refuse at the moment, so that they need not be sent to it.

A scheduler that refuses a request because of its queue says whether the refusal holds for all requests or for all of
the tenant. Until the scheduler expects a change, and for at most `MAX_HOLD_SECONDS`, further such requests are refused
here before they are parsed: at ten times the load that a cluster can serve, that is nearly all of them. Each gets a
retry delay one queue place longer than the one before it, as the scheduler would have given. The queue is full
meanwhile, so no worker idles.
"""

import time

from lorrery.service.errors import Overloaded, RequestError, Unattainable

MAX_HOLD_SECONDS = 0.1
MAX_RETRY_SECONDS = 60.0
MAX_TENANTS = 1000
"""Tenants remembered at once; bounded because clients may name any tenant."""


class _Hold:
    """One refusal that holds for further requests."""

    __slots__ = ("error", "retry_seconds", "step_seconds", "until")

    def __init__(self, error: RequestError, until: float, step_seconds: float) -> None:
        self.error = error
        self.until = until
        self.step_seconds = step_seconds
        self.retry_seconds = error.retry_seconds  # of the latest refused request

    def raise_for_another(self) -> None:
        first = self.error
        if self.retry_seconds is not None:
            self.retry_seconds = min(self.retry_seconds + self.step_seconds, MAX_RETRY_SECONDS)
        kind = Unattainable if isinstance(first, Unattainable) else Overloaded
        raise kind(str(first), first.reason, self.retry_seconds, **first.facts)


class HoldOff:
    """Refusals of one scheduler that are in force."""

    def __init__(self) -> None:
        self._all: _Hold | None = None
        self._of_tenant: dict[str, _Hold] = {}

    def note(self, error: RequestError, tenant_id: str | None, step_seconds: float) -> None:
        """Record a refusal that holds for further requests.

        Args:
            error: the error for the client.
            tenant_id: the tenant that it holds for; None: all.
            step_seconds: increment of the retry delay from one refused request to the next.
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
        """Check that a new request of a tenant is not sure to be refused.

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
