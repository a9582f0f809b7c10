"""Hashes that come out alike everywhere."""

from lorrery.vocabulary.splitmix import hash64, hashes64


def test_the_numbers_are_splitmix64s() -> None:
    """The first of the reference implementation with the seed 1234567."""
    assert [hash64(1234567, position) for position in range(2)] == [6457827717110365317, 3203168211198807973]


def test_many_at_once_are_the_same() -> None:
    assert hashes64(2**63 + 5, 20).tolist() == [hash64(2**63 + 5, position) for position in range(20)]
