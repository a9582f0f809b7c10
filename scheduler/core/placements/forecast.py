"""Estimates of a worker's step times: announced pace, measured slowdown, and waiting tokens.

A worker announces the pace of its steps (`worker.device.steptime.Pace`). The ratio of measured to announced step time
corrects it: over the last two windows of steps (`slowdown`), and over all (`usual_slowdown`). So a slowed worker is
detected within seconds of its steps, an engine that announces nothing is learnt, and an error of the announced pace
cancels out.

The ratios change only when the batch does. Within a batch, sums over steps are equal whether they are committed one by
one or at once, so every driver has the same estimates at the same time. Whole numbers throughout: a placement's choice
is the same live, simulated and replayed. Kept only for a placement that needs it (`Placement.predicts`).
"""

from typing import Final

from lorrery.scheduler.core.plan import Plan, Ran
from lorrery.scheduler.core.running import Running
from lorrery.vocabulary.machine_ints import product
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.steptime import Pace

__all__ = ["ONE", "UNTOLD", "WINDOW_ENDS", "WINDOW_PS", "Forecast", "OutputShare", "Pace", "finish_ps"]

WINDOW_PS: Final = PS_PER_SECOND
"""Announced time of the steps in one window."""
WINDOW_ENDS: Final = 256
"""Finished requests in one window."""
ONE: Final = 1000
"""Ratios are in thousandths."""
LEAST_DECODING: Final = 100
"""Least share of a worker's time, in thousandths, assumed for its decode steps."""
UNTOLD = Pace(PS_PER_SECOND // 100, 10_000_000, 20_000, 50_000_000)
"""For a worker that announces none: an order of magnitude, which its steps correct."""


class OutputShare:
    """Recent share of allowed output tokens that requests produce; shared by a scheduler's workers."""

    def __init__(self) -> None:
        self._produced = 0
        self._allowed = 0
        self._num = 0
        self._last_produced = 0
        self._last_allowed = 0

    def ended(self, produced_tokens: int, allowed_tokens: int) -> None:
        """Record the end of a request."""
        self._produced += produced_tokens
        self._allowed += allowed_tokens
        self._num += 1
        if self._num == WINDOW_ENDS:
            self._last_produced, self._last_allowed = self._produced, self._allowed
            self._produced = self._allowed = self._num = 0

    @property
    def ratio(self) -> int:
        """The share, in thousandths; `ONE` while no request has ended."""
        allowed = self._last_allowed + self._allowed
        return ONE * (self._last_produced + self._produced) // allowed if allowed else ONE


class Forecast:
    """See the module.

    Args:
        pace: as announced; None: not announced.
        outputs: of the scheduler.

    Attributes:
        pace: what the ratios refer to.
        slowdown: duration of its last steps, in thousandths of what the pace says.
        usual_slowdown: the same for all its steps.
        prompt_share: share of the time of its last steps in which running sequences waited for prompts, in thousandths.
        waiting_tokens: input tokens of the sequences that wait at the worker.
    """

    __slots__ = (
        "_last_prompt_ps",
        "_last_said_ps",
        "_last_took_ps",
        "_new_prompt_ps",
        "_new_said_ps",
        "_new_took_ps",
        "_prompt_ps",
        "_said_ps",
        "_took_ps",
        "_total_said_ps",
        "_total_took_ps",
        "_waiting",
        "outputs",
        "pace",
        "prompt_share",
        "slowdown",
        "usual_slowdown",
        "waiting_tokens",
    )

    def __init__(self, pace: Pace | None, outputs: OutputShare) -> None:
        self.pace = UNTOLD if pace is None else pace
        self.outputs = outputs
        self.slowdown = self.usual_slowdown = ONE
        self.prompt_share = 0
        self.waiting_tokens = 0
        self._waiting: dict[int, int] = {}  # input tokens by handle
        self._took_ps = self._said_ps = self._prompt_ps = 0  # of steps of the current batch
        self._new_took_ps = self._new_said_ps = self._new_prompt_ps = 0  # in the current window
        self._last_took_ps = self._last_said_ps = self._last_prompt_ps = 0  # in the previous window
        self._total_took_ps = self._total_said_ps = 0

    # --- steps ------------------------------------------------------------------------------------------------------

    def ran(self, running: Running, plan: Plan, ran: Ran) -> None:
        """Record steps that have ended and are not committed yet."""
        if not ran.busy_ps:
            return
        pace, num_steps = self.pace, ran.num_steps
        said_ps = product(num_steps, pace.base_ps)
        if plan.decode:
            num = running.num_decoding
            kv_tokens = num_steps * running.kv_tokens + num * (num_steps * (num_steps - 1) // 2)
            said_ps += product(num_steps * num, pace.sequence_ps) + product(kv_tokens, pace.kv_token_ps)
        for chunk in plan.prefills:
            prompt_ps = product(num_steps * chunk.new_tokens, pace.prompt_token_ps)
            said_ps += prompt_ps
            self._prompt_ps += prompt_ps
        if not plan.decode:
            self._prompt_ps += product(num_steps, pace.base_ps)
        self._said_ps += said_ps
        self._took_ps += ran.busy_ps

    def batch_changed(self) -> None:
        """Fold the steps of the previous batch into the ratios."""
        if not self._said_ps:
            return
        self._new_took_ps += self._took_ps
        self._new_said_ps += self._said_ps
        self._new_prompt_ps += self._prompt_ps
        self._total_took_ps += self._took_ps
        self._total_said_ps += self._said_ps
        self._took_ps = self._said_ps = self._prompt_ps = 0
        said_ps = self._last_said_ps + self._new_said_ps
        self.slowdown = product(ONE, self._last_took_ps + self._new_took_ps) // said_ps
        self.usual_slowdown = ONE * self._total_took_ps // self._total_said_ps
        self.prompt_share = product(ONE, self._last_prompt_ps + self._new_prompt_ps) // said_ps
        if self._new_said_ps >= WINDOW_PS:
            self._last_took_ps, self._last_said_ps = self._new_took_ps, self._new_said_ps
            self._last_prompt_ps = self._new_prompt_ps
            self._new_took_ps = self._new_said_ps = self._new_prompt_ps = 0

    # --- waiting sequences ------------------------------------------------------------------------------------------

    def waits(self, handle: int, input_tokens: int) -> None:
        """Count a sequence as waiting from now on."""
        self.stops_waiting(handle)
        self._waiting[handle] = input_tokens
        self.waiting_tokens += input_tokens

    def stops_waiting(self, handle: int) -> None:
        """Stop counting a sequence, if it is counted."""
        self.waiting_tokens -= self._waiting.pop(handle, 0)


def finish_ps(
    pace: Pace,
    num_running: int,
    num_waiting: int,
    waiting_tokens: int,
    kv_tokens: int,
    input_tokens: int,
    cached_tokens: int,
    output_tokens: int,
    prompt_share: int,
    is_blocked: bool,
    load_ps: int,
) -> int:
    """Return how long after now one more sequence would end if steps took what the pace says.

    The formula is that of `placements.predicted_finish` without the slowdown; `is_blocked` counts only if some wait.
    """
    base_ps, sequence_ps, kv_token_ps, prompt_token_ps = pace
    batch_tokens = kv_tokens + waiting_tokens + input_tokens + output_tokens // 2
    step_ps = base_ps + (num_running + num_waiting + 1) * sequence_ps + product(batch_tokens, kv_token_ps)
    step_ps = product(step_ps, ONE) // max(ONE - prompt_share, LEAST_DECODING)
    wait_ps = load_ps
    if num_waiting:
        wait_ps = max(wait_ps, base_ps + product(waiting_tokens, prompt_token_ps))
        if num_running and is_blocked:
            running_ps = base_ps + num_running * sequence_ps + product(kv_tokens, kv_token_ps)
            wait_ps = max(wait_ps, product((num_waiting + 1) * output_tokens, running_ps) // num_running)
    prompt_ps = product(input_tokens - cached_tokens, prompt_token_ps)
    return wait_ps + base_ps + prompt_ps + product(output_tokens - 1, step_ps)
