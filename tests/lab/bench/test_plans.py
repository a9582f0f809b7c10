"""`lorrery plan` finds what simulating every cluster finds: three questions of the benchmark, in short runs."""

from math import prod

import pytest

from lab.bench.plans import QUESTIONS, Question, cheapest_of_all


@pytest.mark.parametrize("question", QUESTIONS[:3], ids=lambda question: question.title)
def test_the_cheapest_cluster_is_what_simulating_every_one_finds(question: Question):
    plan = question.ask(jobs=None, num_requests=300)
    answer = plan.search.answer
    assert 1 + len(answer.rejected) + len(plan.search.not_shapes) == prod(map(len, question.search.values()))
    assert answer.usd_per_hour == pytest.approx(cheapest_of_all(question, plan, jobs=1, num_requests=300)[0])
