from fractions import Fraction

from lorrery.worker.device.batch import Batch
from lorrery.worker.device.llm_mock import LlmMock
from lorrery.worker.device.slow import NEVER_SLOW, Slowed, SlowSpells


def test_a_step_is_stretched_where_its_boundary_lies_in_a_spell():
    spells = SlowSpells([(100, 200, Fraction(3, 2)), (200, 300, Fraction(2))])
    at = (99, 100, 199, 200, 299, 300)
    assert [spells.stretch(7, boundary_ps) for boundary_ps in at] == [7, 10, 10, 14, 14, 7]
    assert NEVER_SLOW.stretch(7, 0) == 7


def test_a_spell_and_a_slowed_model_say_the_same():
    model, factor, batch = LlmMock(), Fraction(17, 13), Batch((), 3, 500, 200)
    spells = SlowSpells([(0, 1, factor)])
    assert spells.stretch(model.step_ps(batch), 0) == Slowed(model, factor).step_ps(batch)
