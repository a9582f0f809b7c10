import pytest

from lorrery.v1 import types_pb2
from lorrery.vocabulary.endings import FinishReason


def test_numbers_and_names_are_the_wires():
    assert {f"FINISH_REASON_{reason.name}": int(reason) for reason in FinishReason} == dict(
        types_pb2.FinishReason.items()
    )


@pytest.mark.parametrize("reason", FinishReason)
def test_a_reason_comes_back_from_its_number(reason: FinishReason):
    assert FinishReason.of(int(reason)) is reason
    assert reason.word == reason.name.lower()


def test_a_number_that_is_not_known_is_unspecified():
    assert FinishReason.of(99) is FinishReason.UNSPECIFIED
