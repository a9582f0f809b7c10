"""Step times fitted to a log of engine steps."""

import re
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import pytest

from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.batch import Batch, LoraWork, PrefillChunk, PrefillWork
from lorrery.worker.device.catalogue.hardware import CatalogueError
from lorrery.worker.device.fitted import MOST_KNOTS, Fitted
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.output import Ending
from lorrery.worker.device.rows import DeviceSequence
from lorrery.worker.device.steps import EngineStep, StepLogError, read_steps
from lorrery.worker.device.steptime import Slowed
from tests.worker.device.known import deployment

HEADER = "step_ms,prefill_tokens,decode_seqs,decode_kv_tokens,prefill_attn_pairs"
SIZES = "step_ms,prefill_tokens,decode_seqs"
ONE_OF_EACH = [SIZES, "10,0,1", "20,100,0"]

DECODE, PREFILL = EngineStep(1e-2, 0, 1, 0, 0.0), EngineStep(2e-2, 100, 0, 0, 0.0)


def fitted(steps: Iterable[EngineStep]) -> Fitted:
    return Fitted(deployment("A100", "Llama-2-7B", steps=list(steps)))


def ms(model: Fitted, batch: Batch) -> float:
    return model.step_ps(batch) / 1e9


def decodes(num: int, kv_each: int) -> Batch:
    return Batch((), num, num * kv_each, kv_each)


def prompt(new: int, past: int = 0) -> Batch:
    return Batch((PrefillChunk(new, past, samples=True),))


def decode_seconds(num: int, kv_tokens: int) -> float:
    """An engine that is slow with odd counts."""
    return 9e-3 + 6e-5 * num + 5e-4 * (num % 2) + 2.5e-7 * kv_tokens


def prefill_seconds(tokens: int, pairs: float, kv_tokens: int = 0) -> float:
    return 4e-3 + 6e-5 * tokens + 3e-9 * pairs + 2.5e-7 * kv_tokens


def log_of(rng: np.random.Generator, num_steps: int, noise: float = 0.0) -> list[EngineStep]:
    steps = []
    for _ in range(num_steps):
        num, kv_each = int(rng.integers(1, 33)), int(rng.integers(50, 3000))
        steps.append(EngineStep(decode_seconds(num, num * kv_each), 0, num, num * kv_each, 0.0))
        tokens, past = int(rng.integers(1, 4000)), int(rng.integers(0, 2)) * 512
        pairs = tokens * (past + tokens / 2)
        beside = int(rng.integers(0, 3)) * 500
        steps.append(EngineStep(prefill_seconds(tokens, pairs, beside), tokens, 0, beside, pairs))
    return [
        EngineStep(
            s.seconds * (1 + noise * rng.normal()), s.prefill_tokens, s.num_decodes, s.decode_kv_tokens, s.prefill_pairs
        )
        for s in steps
    ]


def test_a_fit_says_what_it_was_made_of():
    log = log_of(np.random.default_rng(3), 200, noise=0.05)
    account = fitted(log).account
    assert re.match(
        r"200 steps of 1 to 32 decodes, [34]\.\d% off; 200 steps with prefill, of [\d,]+ to 3,\d+ tokens, ", account
    )
    account = fitted(read_steps(ONE_OF_EACH)).account
    assert account.startswith("1 step of 1 decode, 0.0% off; 1 step with prefill, of 100 tokens, 0.0% off; beyond")


def test_rows_that_do_not_tell_two_costs_apart_are_told():
    steps = [EngineStep(1e-2 * n, 0, n, 100 * n, 0.0) for n in (1, 2, 3, 4)]  # always 100 tokens each
    assert "which do not tell what more of them and what longer ones cost" in fitted([*steps, PREFILL]).account


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([EngineStep(1e-2, 0, 1, 99, 0.0), PREFILL], "too few steps of decodes alone: 1 row for 2 figures"),
        ([EngineStep(1e-2, 0, 1, 99, 0.0), EngineStep(1e-2, 0, 2, 99, 0.0), PREFILL], "2 rows for 3 figures"),
        ([DECODE, EngineStep(1e-2, 100, 0, 0, 5000.0)], "too few steps with prefill: 1 row for 2 figures"),
    ],
)
def test_a_log_of_fewer_rows_than_there_are_figures_to_find_is_refused(steps: list[EngineStep], message: str):
    with pytest.raises(CatalogueError, match=f"{message}.*; log more, or leave out decode_kv_tokens"):
        fitted(steps)


def test_steps_outside_the_rows_are_kept_in_mind():
    steps = [EngineStep(1e-2 + 1e-3 * n + 1e-6 * kv, 0, n, kv, 0.0) for n in (2, 4, 8) for kv in (100, 900, 5000)]
    model = fitted([*steps, *(EngineStep(1e-3 * n, n, 0, 0, 0.0) for n in (10, 500))])
    for batch in (decodes(2, 50), decodes(8, 600), prompt(10), prompt(500)):
        model.step_ps(batch)
    assert model.beyond == ""
    model.decode_segment(9, 900, 100)
    assert model.beyond == "up to 9 decodes in a step (measured: 2 to 8)"
    model.step_ps(decodes(1, 9000))
    model.step_ps(prompt(501))
    assert model.beyond == (
        "down to 1 and up to 9 decodes in a step (measured: 2 to 8), up to 9,000 KV tokens in a step (measured: 0 to"
        " 5,000), up to 501 tokens in a step with prefill (measured: 10 to 500)"
    )
    model.forget()
    assert model.beyond == ""


@pytest.mark.parametrize("slowed", [False, True])
@pytest.mark.parametrize("at_once", [1, 400, 1999])
def test_of_steps_that_run_at_once_the_last_is_kept_in_mind_too(at_once: int, *, slowed: bool) -> None:
    steps = [EngineStep(1e-2 + 1e-3 * n + 1e-6 * kv, 0, n, kv, 0.0) for n in (1, 4, 8) for kv in (100, 900, 2000)]
    model = fitted([*steps, *(EngineStep(1e-3 * n, n, 0, 0, 0.0) for n in (10, 500))])
    gpu = MockGpu(Slowed(model, Fraction(2)) if slowed else model)
    gpu.join(DeviceSequence(0, 500, 0, 0, Ending(2000, FinishReason.LENGTH)))
    gpu.begin([PrefillWork(0, 500, 0, samples=True)], decode=True)
    gpu.jump(1)
    gpu.begin([], decode=True)
    left = 1999
    while left:
        num_steps, _ = gpu.run(min(at_once, left))
        gpu.jump(num_steps)
        left -= num_steps
    assert model.beyond == "up to 2,498 KV tokens in a step (measured: 0 to 2,000)"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("20,100", "line 2: the row is cut off: decode_seqs, decode_kv_tokens, prefill_attn_pairs is missing"),
        ("20,100,0,0,5000,7", "line 2: the row has more fields than the header"),
        ("20,0,5,1,0", "line 2: decode_kv_tokens is 1, of 5 decode_seqs; it must be at least 5"),
        ("1e300,0,1,100,0", "line 2: step_ms is '1e300'; it must be at most 3,600,000"),
        ("20,0,1e21,1e22,0", "line 2: decode_seqs is '1e21'; it must be at most 2,147,483,647"),
        ("20,100,0,0,1e300", "line 2: prefill_attn_pairs is '1e300'; it must be at most"),
    ],
)
def test_a_row_that_is_a_slip_is_refused(row: str, message: str):
    with pytest.raises(StepLogError, match=message):
        read_steps([HEADER, row])


def test_two_times_of_a_step_must_be_the_same():
    header = "step_s,step_ms,prefill_tokens,decode_seqs"
    assert read_steps([header, "0.0123,12.3004,0,1"])[0].seconds == 0.0123
    assert read_steps([header, ",12.5,0,1"])[0].seconds == 0.0125
    with pytest.raises(StepLogError, match=r"line 2: step_s is 0.01 and step_ms 20; they must be the same time"):
        read_steps([header, "0.01,20,0,1"])


def test_what_the_log_follows_is_found():
    model = fitted(log_of(np.random.default_rng(1), 2000))
    for num in (1, 2, 17, 18, 32):
        assert ms(model, decodes(num, 700)) == pytest.approx(decode_seconds(num, 700 * num) * 1e3, rel=1e-6)
    for new, past in ((1, 0), (500, 512), (3900, 0)):
        assert ms(model, prompt(new, past)) == pytest.approx(
            prefill_seconds(new, new * (past + new / 2)) * 1e3, rel=1e-4
        )


def test_noise_of_single_steps_averages_out():
    model = fitted(log_of(np.random.default_rng(2), 5000, noise=0.1))
    for num in (1, 16, 31):
        assert ms(model, decodes(num, 700)) == pytest.approx(decode_seconds(num, 700 * num) * 1e3, rel=0.03)
    assert ms(model, prompt(2000)) == pytest.approx(prefill_seconds(2000, 2e6) * 1e3, rel=0.05)


def test_decodes_beside_a_prompt_cost_their_tokens_and_their_cache():
    model = fitted(log_of(np.random.default_rng(3), 2000))
    chunk = PrefillChunk(300, 0, samples=True)
    both = Batch((chunk,), 20, 20_000, 1000)
    assert ms(model, both) == pytest.approx(prefill_seconds(320, 45_000, 20_000) * 1e3, rel=1e-3)


def test_counts_beyond_the_log_go_on_with_the_slope_of_all_rows():
    steps = [EngineStep(1e-3 * (10 + n), 0, n, 0, 0.0) for n in range(4, 9) for _ in range(5)]
    steps += [EngineStep(1e-3 * (5 + n / 100), n, 0, 0, 0.0) for n in (100, 200, 300)]
    model = fitted(steps)
    assert ms(model, decodes(30, 0)) == pytest.approx(40)
    assert ms(model, decodes(1, 0)) == pytest.approx(11)
    assert ms(model, prompt(1300)) == pytest.approx(18)


def test_one_row_of_each_kind_is_enough():
    model = fitted(read_steps(ONE_OF_EACH))
    assert ms(model, decodes(1, 99)) == pytest.approx(10)
    assert ms(model, decodes(64, 0)) <= 10
    assert ms(model, prompt(100)) == pytest.approx(20)


def test_work_that_seems_to_save_time_costs_nothing():
    steps = [EngineStep(1e-2 - 1e-6 * kv, 0, 4, kv, 0.0) for kv in (100, 200, 300)]
    model = fitted([*steps, PREFILL])
    assert model.step_ps(decodes(4, 10)) == model.step_ps(decodes(4, 90)) > 0


def test_a_long_log_has_no_more_knots_than_are_good():
    steps = [EngineStep(1e-2 + 1e-6 * n, n, 0, 0, 0.0) for n in range(1, 4000)]
    model = fitted([*steps, EngineStep(1e-2, 0, 1, 0, 0.0)])
    assert len(model._prefill._knots) <= MOST_KNOTS + 1
    assert ms(model, prompt(1234)) == pytest.approx(11.234)


def test_an_empty_step_takes_no_time_and_parts_add_up():
    model = fitted(read_steps(ONE_OF_EACH))
    assert model.step_ps(Batch()) == 0
    assert model.step_cost(Batch()).total_ps == 0
    work = LoraWork.of([(16, 1)] * 8)
    with_adapters = Batch((), 8, 800, 100, work)
    cost = model.step_cost(with_adapters)
    assert cost.total_ps == model.step_ps(with_adapters)
    assert cost.lora == model.step_ps(with_adapters) - model.step_ps(decodes(8, 100)) > 10**9


@pytest.mark.parametrize(("row", "what"), [("10,0,1,100,0", "steps with prefill"), ("9,10,1,1,1", "steps of decodes")])
def test_a_log_without_one_kind_is_refused(row: str, what: str):
    with pytest.raises(CatalogueError, match=f"^the log of engine steps has no {what}"):
        fitted(read_steps([HEADER, row]))


def test_a_log_counts_the_newest_token_the_cache_does_not():
    (step,) = read_steps(["start_s,step_s,prefill_tokens,decode_seqs,decode_kv_tokens", "0,0.01,0,4,1004"])
    assert step == EngineStep(0.01, 0, 4, 1000, 0.0)


def test_steps_without_work_are_left_out():
    assert len(read_steps([*ONE_OF_EACH, "3,0,0"])) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a,b"], "line 1: no header with step_s"),
        (["step_ms,prefill_tokens,decode_seqs,step_ms"], "line 1: column step_ms is there twice; keep one"),
        ([HEADER, "0,1,0,0,0"], "line 2: step_ms is '0'; it must be more than 0"),
        ([HEADER, "1,x,0,0,0"], "line 2: prefill_tokens is 'x'; it must be a number, 0 or more"),
        ([HEADER, "1,0.5,0,0,0"], "line 2: prefill_tokens is '0.5'; it must be a whole number"),
        ([*ONE_OF_EACH, "1,0,-1"], "line 4: decode_seqs is '-1'"),
    ],
)
def test_a_log_that_cannot_be_is_refused(rows: list[str], message: str):
    with pytest.raises(StepLogError, match=message):
        read_steps(rows)
