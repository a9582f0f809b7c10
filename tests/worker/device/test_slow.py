from fractions import Fraction

from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.batch import Batch
from lorrery.worker.device.constant import LlmMock
from lorrery.worker.device.steptime import NO_SPELLS, Slowed, Spells


def test_a_step_is_stretched_where_its_boundary_lies_in_a_spell():
    spells = Spells([(100, 200, Fraction(3, 2)), (200, 300, Fraction(2))])
    at = (99, 100, 199, 200, 299, 300)
    assert [spells.stretch(7, boundary_ps) for boundary_ps in at] == [7, 10, 10, 14, 14, 7]
    assert NO_SPELLS.stretch(7, 0) == 7


def test_a_spell_and_a_slowed_model_say_the_same():
    model, factor, batch = LlmMock(), Fraction(17, 13), Batch((), 3, 500, 200)
    spells = Spells([(0, 1, factor)])
    assert spells.stretch(model.step_ps(batch), 0) == Slowed(model, factor).step_ps(batch)


def test_a_step_that_is_due_in_a_freeze_begins_at_its_end():
    spells = Spells(frozen=[(200, 300), (100, 200), (500, NEVER)])
    assert [spells.thaw_ps(at_ps) for at_ps in (99, 100, 250, 300, 500)] == [99, 300, 300, 300, NEVER]
    assert NO_SPELLS.thaw_ps(7) == 7
