"""The kinds of workers in a cluster, in words."""

from collections import Counter
from collections.abc import Iterable


def count_kinds(workers: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Count workers by kind: the GPU's name, with ` (TP n)` if the degree is more than one.

    Args:
        workers: GPU and tensor-parallel degree of each.
    """
    names = (f"{gpu} (TP {degree})" if degree > 1 else gpu for gpu, degree in workers)
    return tuple(sorted(Counter(names).items()))
