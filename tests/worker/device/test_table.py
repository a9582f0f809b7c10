"""Step times looked up in a profile of one's own."""

import pytest

from lorrery.worker.device.batch import Batch, LoraWork, PrefillChunk
from lorrery.worker.device.catalogue.hardware import CatalogueError
from lorrery.worker.device.profile import ProfileError, read_profile
from lorrery.worker.device.table import ProfileTable, interpolate
from tests.worker.device.known import deployment

HEADER = "phase,batch_size,kv_len,prefill_chunk,prefill_kv_prefix,step_ms"
DECODES = ["decode,1,0,,,10", "decode,1,1000,,,11", "decode,32,0,,,14", "decode,32,1000,,,20"]
PREFILLS = ["prefill,,,100,0,20", "prefill,,,1100,0,120", "prefill,,,100,1000,30", "prefill,,,1100,1000,150"]


def table(*rows: str) -> ProfileTable:
    return ProfileTable(deployment("A100", "Llama-2-7B", profile=read_profile([HEADER, *rows])))


def ms(model: ProfileTable, batch: Batch) -> float:
    return model.step_ps(batch) / 1e9


def chunk(new: int, past: int = 0) -> PrefillChunk:
    return PrefillChunk(new, past, samples=True)


def test_profiled_batches_take_what_was_measured():
    model = table(*DECODES, *PREFILLS)
    assert ms(model, Batch((), 32, 32_000, 1000)) == 20
    assert ms(model, Batch((chunk(1100, 1000),))) == 150


def test_others_lie_between_and_beyond():
    model = table(*DECODES, *PREFILLS)
    assert ms(model, Batch((), 32, 16_000, 700)) == 17  # the mean context counts
    assert ms(model, Batch((), 32, 64_000, 2000)) == 26
    assert ms(model, Batch((chunk(600, 500),))) == 80
    assert ms(model, Batch((chunk(2100),))) == 220


def test_chunks_and_decodes_together_are_built_from_their_parts():
    model = table(*DECODES, *PREFILLS)
    assert ms(model, Batch((chunk(100, 1000), chunk(100)))) == 30 + (30 - 20)
    assert ms(model, Batch((chunk(68),), 32, 32_000, 1000)) == pytest.approx(20 + (20 - 14))


def test_mixed_rows_correct_the_estimate():
    rows = [*DECODES, *PREFILLS, "mixed,33,1000,68,0,39"]
    assert ms(table(*rows), Batch((chunk(68),), 32, 32_000, 1000)) == pytest.approx(39)


def test_adapters_are_added_by_formula():
    model = table(*DECODES, *PREFILLS)
    work = LoraWork.of([(16, 1)] * 32)
    with_adapters, without = (model.step_ps(Batch((), 32, 32_000, 1000, lora)) for lora in (work, LoraWork()))
    assert with_adapters - without == model.step_cost(Batch((), 32, 32_000, 1000, work)).lora > 10**9


def test_no_segment_is_closed():
    assert table(*DECODES, *PREFILLS).decode_segment(1, 0, 0) is None


def test_ends_never_fall():
    assert interpolate([(0, 5), (1, 4)], 2) == 4
    assert interpolate([(0, 5), (1, 6)], 2) == 7
    assert interpolate([(3, 5)], 100) == 5


def test_a_profile_without_prefills_is_refused():
    with pytest.raises(CatalogueError, match="no prefill rows for Llama-2-7B on 1 x A100-80-SXM"):
        table(*DECODES)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a,b"], "line 1: no header"),
        ([HEADER, "rest,,,,,1"], "line 2: phase 'rest' is not known; known: linear, decode"),
        ([HEADER, *DECODES, "decode,,1,,,1"], "line 6: phase decode needs batch_size, which is empty"),
        ([HEADER, "decode,1,,,,1"], "line 2: phase decode needs kv_len, which is empty"),
        ([HEADER + ",step_ms"], "line 1: column step_ms is there twice; keep one"),
        (["phase,batch_size,step_ms", "decode,1,1"], "line 2: phase decode needs kv_len, which is not in the header"),
        ([HEADER, "decode,0,1,,,1"], "line 2: batch_size is 0; phase decode needs at least 1"),
        ([HEADER, "prefill,,,,,1"], "line 2: phase prefill needs prefill_chunk"),
        ([HEADER, "decode,1,1"], "line 2: 3 cells for the 6 columns of the header; leave a cell empty"),
        ([HEADER, "decode,1,1,,,1,7"], "line 2: more cells than the 6 columns of the header"),
        ([HEADER, "decode,x,1,,,1"], "line 2: batch_size is 'x'; it must be a whole number"),
        ([HEADER, "decode,inf,1,,,1"], "line 2: batch_size is 'inf'; it must be a whole number"),
        ([HEADER, "decode,1,nan,,,1"], "line 2: kv_len is 'nan'; it must be a whole number"),
        ([HEADER, "decode,1,1,,,0"], "line 2: step_ms is '0'; it must be a number, more than 0"),
        ([HEADER, "decode,1,1,,,nan"], "line 2: step_ms is 'nan'"),
    ],
)
def test_a_row_that_cannot_be_is_refused_by_line(rows, message):
    with pytest.raises(ProfileError, match=message):
        read_profile(rows)
