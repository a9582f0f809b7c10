"""Rejects options without effect: accepted silently, each would look as if it had been applied.

A sweep over such an option would draw a flat line as if it were a result. An option counts as given if it differs from
its default.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_ARRIVALS_DRAWN = ("poisson", "slora", "chat", "sharegpt")
_RATE_DRAWN = ("poisson", "constant", "slora", "chat", "sharegpt")
_LENGTHS_DRAWN = ("poisson", "constant", "slora", "chat")
_SESSIONS = ("chat", "sharegpt")
_OF_TIMES = ("rate", "cv", "bursts", "jitter", "drift")
"""Options that act only through the requests' times. In sessions a speed-up also divides think times."""


def why_in_vain(given: Mapping[str, Any], workload: str) -> str | None:
    """Return which option has no effect, and what it would need; None if all have one.

    Args:
        given: fields of `LoadOptions` by name that differ from their defaults.
        workload: its name.
    """
    return next(_reasons(given, workload), None)


def _reasons(given: Mapping[str, Any], workload: str) -> Iterator[str]:
    faster = "; its requests have times of their own, and --speed-up F plays them F times as fast"
    for name, workloads, cure in (
        ("rate", _RATE_DRAWN, faster),
        ("cv", _ARRIVALS_DRAWN, "" if workload == "constant" else faster),
        ("think", _SESSIONS, ""),
        ("alpha", ("slora",), "; the skew of others is --adapter-exponent"),
        ("input_range", _LENGTHS_DRAWN, "; its requests have lengths of their own"),
        ("output_range", _LENGTHS_DRAWN, "; its requests have lengths of their own"),
    ):
        if name in given and workload not in workloads:
            only = f"--workload {', '.join(workloads)} only; --workload is {workload}{cure}"
            yield f"{_shown(name, given[name])} goes with {only}"
    if "concurrency" in given:
        for name in _OF_TIMES if workload in _SESSIONS else (*_OF_TIMES, "speed_up"):
            if name in given:
                why = "needs times, and a closed loop (-c) does not use the workload's; leave out one of the two"
                yield f"{_shown(name, given[name])} {why}"
    if "adapters" not in given and "num_adapters" not in given:
        for name in ("adapter_exponent", "drift", "alpha"):
            if name in given:
                yield f"{_shown(name, given[name])} needs adapters: add --adapters all, or --num-adapters N"


def _shown(name: str, value: Any) -> str:  # noqa: ANN401  of any option
    text = ":".join(map(str, value)) if isinstance(value, tuple) else value if isinstance(value, str) else f"{value:g}"
    return f"--{name.replace('_', '-')} {text}"
