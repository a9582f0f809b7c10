"""What a gRPC call tells the handler."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from lorrery.router.generate import GrpcCall


@dataclass
class Context:
    """What `GrpcCall` asks of gRPC's."""

    remaining: float | None

    def time_remaining(self) -> float | None:
        """Return the seconds left."""
        return self.remaining


@pytest.mark.parametrize(
    ("timeout", "remaining", "has_passed"),
    [
        (4.0, 0.0, True),
        (4.0, 0.05, True),  # 3.951 s were sent as 3.96 s at least
        (4.0, 2.0, False),
        (60.0, 0.5, True),
        (60.0, 1.0, False),
        (0.1, 0.015, True),
        (0.1, 0.05, False),
        (0.01, 0.007, False),
        (None, None, False),
    ],
)
def test_a_reset_shortly_before_the_deadline_is_the_deadline(
    timeout: float | None, remaining: float | None, has_passed: bool
) -> None:
    context = Context(timeout)
    call = GrpcCall(cast("Any", context))
    context.remaining = remaining
    assert call.deadline_has_passed == has_passed
