"""Ways to batch from outside the tree whose answers make no sense, and some that only look so."""

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait, whole
from lorrery.scheduler.core.plan import Chunk
from lorrery.scheduler.core.sequence import Sequence


class Batch:
    """Prompts alone, then decodes, a step at a time."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        admitted = context.admit(self.limits, at_ps)
        if admitted:
            return self.prefill(admitted)
        return Step(decode=True) if len(context.running) else Wait()

    def prefill(self, admitted: list[Sequence]) -> Step:
        return Step(whole(admitted))

    def advanced(self, num_decode_steps: int) -> None:
        pass

    def emptied(self, at_ps: int) -> None:
        pass

    def arrivals_matter(self, context: BatchContext) -> bool:
        return True


class WaitsForNow(Batch):
    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        return Wait(at_ps)


class Polls(Batch):
    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        choice = super().choose(context, at_ps)
        return Wait(at_ps + 10**9) if isinstance(choice, Wait) else choice


class WaitsOn(Batch):
    """Runs prompts, and then nothing any more."""

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        return Wait(at_ps + 1) if len(context.running) else super().choose(context, at_ps)


class WaitsForNan(Batch):
    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        return Wait(float("nan"))  # type: ignore[arg-type]


class ChunksOnce(Batch):
    def prefill(self, admitted: list[Sequence]) -> Step:
        return Step(iter(whole(admitted)))  # type: ignore[arg-type]


class ChunksOfNothing(Batch):
    def prefill(self, admitted: list[Sequence]) -> Step:
        return Step([Chunk(one, 0, 0, samples=False) for one in admitted])


class PrefetchesAName(Batch):
    def prefill(self, admitted: list[Sequence]) -> Step:
        return Step(whole(admitted), prefetch=("adapter-0",))  # type: ignore[arg-type]


class ChunksInFloats(Batch):
    def prefill(self, admitted: list[Sequence]) -> Step:
        return Step([Chunk(one, float(one.input_tokens), 0, samples=True) for one in admitted])  # type: ignore[arg-type]


class WaitsWithAdmitted(Batch):
    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        super().choose(context, at_ps)
        return Wait()


class RunsNothing(Batch):
    def prefill(self, admitted: list[Sequence]) -> Step:
        return Step()


class RunsNoStep(Batch):
    def prefill(self, admitted: list[Sequence]) -> Step:
        return Step(whole(admitted), max_steps=0)


class ForgetsOne(Batch):
    def prefill(self, admitted: list[Sequence]) -> Step:
        return Step(whole(admitted[:1]))


class ChunksTwice(Batch):
    def prefill(self, admitted: list[Sequence]) -> Step:
        return Step(whole(admitted) * 2)


class ChunksTooLong(Batch):
    def prefill(self, admitted: list[Sequence]) -> Step:
        return Step([Chunk(one, one.input_tokens + 5, 0, samples=True) for one in admitted])


class ChunksWithoutSample(Batch):
    def prefill(self, admitted: list[Sequence]) -> Step:
        return Step([Chunk(one, one.input_tokens, 0, samples=False) for one in admitted])


class ChunksOfAnother(Batch):
    def prefill(self, admitted: list[Sequence]) -> Step:
        return Step(whole([Sequence(99, 5, 5)]))


class ChunksOn(Batch):
    def prefill(self, admitted: list[Sequence]) -> Step:
        return Step(whole(admitted), chunk_steps=3)
