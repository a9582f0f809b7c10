"""Checks many numbered cases on all cores, and says which are wrong."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor


def check_all(check: Callable[[int], str | None], numbers: range, *, jobs: int | None, chunk: int, noun: str) -> int:
    """Return 1 if `check`, which says what is wrong with a case, finds fault with one of them, else 0."""
    failed = 0
    with ProcessPoolExecutor(jobs) as pool:
        for done, wrong in enumerate(pool.map(check, numbers, chunksize=chunk), start=1):
            if wrong is not None:
                failed += 1
                print(wrong, flush=True)
            if done % 1000 == 0:
                print(f"{done:,} of {len(numbers):,} {noun}, {failed} failed", flush=True)
    print(f"{len(numbers):,} {noun}, {failed} failed")
    return int(failed > 0)
