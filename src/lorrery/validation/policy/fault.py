"""The error of a policy that breaks its contract, in its author's terms."""

from lorrery.vocabulary.units import PS_PER_SECOND


class PolicyFault(Exception):  # noqa: N818  a fault of the policy, not of ours
    """A policy's violation of its contract, in one line or a few."""


def seconds(at_ps: int) -> str:
    """Format a time for the author."""
    return f"{at_ps / PS_PER_SECOND:.4f} s"
