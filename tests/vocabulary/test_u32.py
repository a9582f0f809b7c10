from array import array

import numpy as np
import pytest

from lorrery.vocabulary import u32

NUMBERS = [0, 1, 256, 2**32 - 1]
BYTES = b"\x00\x00\x00\x00\x01\x00\x00\x00\x00\x01\x00\x00\xff\xff\xff\xff"


def test_numbers_are_little_endian_words():
    assert u32.pack(iter(NUMBERS)) == BYTES
    assert u32.pack_array(np.array(NUMBERS, np.uint32)) == BYTES
    assert list(u32.unpack(BYTES)) == NUMBERS
    assert u32.view(BYTES).tolist() == NUMBERS
    assert list(u32.unpack(b"")) == []
    assert u32.native(BYTES) == array("I", NUMBERS).tobytes()


@pytest.mark.parametrize("read", [u32.unpack, u32.view, u32.native])
def test_bytes_that_are_no_words_are_refused(read):
    with pytest.raises(ValueError, match=r"multiple|size"):
        read(BYTES[:-1])


@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_number_that_does_not_fit_is_refused(number: int):
    with pytest.raises(OverflowError):
        u32.pack([number])
