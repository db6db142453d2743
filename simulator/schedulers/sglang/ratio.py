"""The share of running requests' answers for which SGLang sets memory aside. Pure.

Most answers end early, so the share falls from decode step to decode step, to a floor. It is set
again when requests had to be retracted.

Source: sgl-project/sglang python/sglang/srt/managers/scheduler.py, `init_schedule_policy` and
`update_running_batch`, schedule_batch.py, `retract_decode`, and environ.py, release 0.5.7.
"""

from collections.abc import Sequence

from simulator.schedulers.sglang.config import SglangSequence

INITIAL_RATIO = 0.7
FLOOR_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20
"""A retraction makes room for so many tokens of each running request."""


class NewTokenRatio:
    """The share of running requests' answers that is set aside.

    value = max(start - steps * decay, floor): steps are counted, so that joined steps give the same
    value as single steps.
    """

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INITIAL_RATIO * conservativeness, 1.0)
        self._floor = self._initial * FLOOR_FACTOR
        self._decay = (self._initial - self._floor) / DECAY_STEPS
        self._start = self._initial
        self._steps = 0

    @property
    def value(self) -> float:
        return max(self._start - self._steps * self._decay, self._floor)

    def decay(self, steps: int) -> None:
        """Lowers the share by `steps` decode steps that began without a retraction."""
        self._steps += steps

    def set_after_retraction(self, kept: Sequence[SglangSequence]) -> None:
        """Sets the share that the kept requests would use if they ended after RETRACT_DECODE_STEPS
        more steps."""
        brought = sum(sequence.output_tokens + RETRACT_DECODE_STEPS for sequence in kept)
        self._start = min(1.0, brought / (sum(sequence.max_tokens for sequence in kept) + 1))
        self._steps = 0

    def restart(self) -> None:
        """Starts again at the initial share: the engine is idle."""
        self._start, self._steps = self._initial, 0
