"""What kinds of worker a cluster has, in words."""

from collections import Counter
from collections.abc import Iterable


def count_kinds(workers: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Count workers by kind: the GPU's name, and behind it ` (TP n)` where it is more than one.

    Args:
        workers: GPU and tensor-parallel degree of each.
    """
    names = (f"{gpu} (TP {degree})" if degree > 1 else gpu for gpu, degree in workers)
    return tuple(sorted(Counter(names).items()))
