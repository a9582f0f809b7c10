"""The three length limits: where each one begins, and which is reported. The texts are pinned by the golden records."""

import pytest

from lorrery.scheduler.core.refusals import Limits, check_lengths

LIMITS = Limits(max_req_input_len=10, max_req_total_len=15, max_total_token_num=100)
SMALL_POOL = Limits(max_req_input_len=10, max_req_total_len=15, max_total_token_num=12)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "limits"), [(10, 5, LIMITS), (1, 14, LIMITS), (10, 1, SMALL_POOL)]
)
def test_a_request_at_its_limits_is_accepted(prompt_tokens, max_new_tokens, limits):
    assert check_lengths(prompt_tokens, max_new_tokens, limits) is None


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "limits", "names"),
    [
        (11, 1, LIMITS, "input prompt token len 11 is too long > 10"),
        (10, 6, LIMITS, "max_req_total_len:15"),
        (10, 2, SMALL_POOL, "max_total_token_num:12"),
        (11, 6, SMALL_POOL, "input prompt token len 11"),
        (10, 6, SMALL_POOL, "max_req_total_len:15"),
    ],
)
def test_the_first_broken_limit_is_named(prompt_tokens, max_new_tokens, limits, names):
    error = check_lengths(prompt_tokens, max_new_tokens, limits)

    assert error is not None
    assert names in error
