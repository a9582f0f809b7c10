"""One request's times as its client sees them, without the network: measured when messages are written.

TTFT = first token - arrival; ITL = gap between two tokens; E2E = last message - arrival; TPOT = (E2E - TTFT) / (output
tokens - 1). All in device seconds: wall seconds over the cluster's `time_scale`.
"""

import time

from lorrery.router.metrics import RouterMetrics, Traffic
from lorrery.router.request import Finish, Usage
from lorrery.service.telemetry.output_groups import OutputGroup


class Timing:
    """Measures one request from its arrival.

    Attributes:
        arrived: on `time.monotonic`.
        trace_id: id of its trace if that is sampled; else empty.
        tenant_id: its tenant; None: not known yet.
        adapter_id: the adapter that it names, empty: the base model; None: not known yet.
        first: time of writing the first token on `time.monotonic`; None: not yet.
        time_scale: wall seconds per device second; set once a shard works on the request.
    """

    __slots__ = (
        *("_adapter", "_e2e", "_last", "_metrics", "_started", "_tenant", "adapter_id", "arrived", "tenant_id"),
        *("_group", "_has_token", "_max_tokens", "_prompt_tokens", "_submitted", "first", "time_scale", "trace_id"),
    )

    def __init__(self, metrics: RouterMetrics, trace_id: str = "") -> None:
        self._metrics = metrics
        self.trace_id = trace_id
        self.arrived = self._last = time.monotonic()
        self.first: float | None = None
        self._e2e: float | None = None
        self.time_scale = 1.0
        self.adapter_id: str | None = None
        self.tenant_id: str | None = None
        self._started = self._submitted = self._has_token = False
        self._prompt_tokens = self._max_tokens = 0
        self._group: OutputGroup | None = None
        self._adapter: Traffic = metrics.adapters.other
        self._tenant: Traffic = metrics.tenants.other

    def submits(self, prompt_tokens: int, max_tokens: int, group: OutputGroup | None = None) -> None:
        """Record that the request, or one output of a group, is submitted to a scheduler."""
        self._prompt_tokens, self._max_tokens, self._group = prompt_tokens, max_tokens, group
        if self._metrics.engine is not None:
            self._submitted = True
            self._metrics.engine.submitted(self.adapter_id or "")

    def message(self, num_tokens: int, output_tokens: int, frame_at: float | None) -> None:
        """Count a message.

        Args:
            num_tokens: tokens in it.
            output_tokens: of the request so far, these included.
            frame_at: arrival of the frame that triggers the message; None: something else does.
        """
        metrics = self._metrics
        metrics.messages += 1
        if not num_tokens:
            return
        metrics.output_tokens += num_tokens
        if num_tokens == output_tokens:
            self._start(num_tokens)
        else:
            now = time.monotonic() if frame_at is None else frame_at
            metrics.tokens_written(max(0.0, now - self._last) / self.time_scale / num_tokens, num_tokens)
            self._last = now
        self._adapter.output_tokens += num_tokens
        self._tenant.output_tokens += num_tokens

    def _start(self, num_tokens: int) -> None:
        metrics = self._metrics
        self._count_traffic()
        metrics.tokens_per_message.observe(num_tokens)
        self.first = self._last = time.monotonic()
        ttft_seconds = (self.first - self.arrived) / self.time_scale
        metrics.ttft.observe(ttft_seconds)
        self._adapter.ttft.observe(ttft_seconds)
        self._tenant.ttft.observe(ttft_seconds)
        if self.trace_id:
            metrics.ttft.exemplify(ttft_seconds, self.trace_id)
        if metrics.engine is not None:
            metrics.engine.started(self.adapter_id or "", ttft_seconds, self._prompt_tokens)
            self._has_token = True

    def _count_traffic(self) -> None:
        self._started = True
        self._adapter = self._metrics.adapters.count(self.adapter_id or "")
        self._tenant = self._metrics.tenants.count(self.tenant_id or "")

    def finish(self, prompt_tokens: int, output_tokens: int, finish: Finish | None = None) -> None:
        """Count a request that finished by itself; `finish` is its scheduler's."""
        now, metrics = time.monotonic(), self._metrics
        if not self._started:
            self._count_traffic()
        metrics.prompt_tokens += prompt_tokens
        self._adapter.prompt_tokens += prompt_tokens
        self._tenant.prompt_tokens += prompt_tokens
        metrics.prompt_length.observe(prompt_tokens)
        metrics.output_length.observe(output_tokens)
        self._e2e = (now - self.arrived) / self.time_scale
        metrics.e2e.observe(self._e2e)
        if output_tokens > 1 and self.first is not None:
            tpot_seconds = (now - self.first) / self.time_scale / (output_tokens - 1)
            metrics.tpot.observe(tpot_seconds)
            if self.trace_id:
                metrics.tpot.exemplify(tpot_seconds, self.trace_id)
        if self.trace_id:
            metrics.e2e.exemplify(self._e2e, self.trace_id)
        if metrics.engine is not None and finish is not None:
            metrics.engine.finished(prompt_tokens, self._max_tokens, finish, self._group)

    def left(self, usage: Usage) -> None:
        """Count a request that ended by itself, but whose client went before the last message was made."""
        if self._metrics.engine is not None and self._e2e is None and self._has_token:
            self._metrics.engine.looked_up(usage)

    def ended(self, outcome: str) -> None:
        """Count the end of the call, whatever its outcome."""
        self._metrics.request_ended(outcome, self.adapter_id, self.tenant_id, started=self._started)
        if self._metrics.engine is not None:
            name = self.adapter_id or ""
            self._metrics.engine.ended(outcome, name, submitted=self._submitted, started=self._has_token)

    def latencies(self) -> dict[str, float]:
        """Return TTFT and E2E as far as known, under vLLM's names of span attributes."""
        known: dict[str, float] = {"lorrery.time_scale": self.time_scale}
        if self.first is not None:
            known["gen_ai.latency.time_to_first_token"] = (self.first - self.arrived) / self.time_scale
        if self._e2e is not None:
            known["gen_ai.latency.e2e"] = self._e2e
        return known
