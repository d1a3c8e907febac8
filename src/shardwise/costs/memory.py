"""The memory of a device: parameters and state exactly, and by a formula what a step needs too.

What a step needs besides is a sum of terms in bytes, each times how many copies of it the compiler
keeps. The fullest time counts: the loss or a layer's backward pass.
"""

import dataclasses

from shardwise.costs.arrays import Part
from shardwise.costs.stages import of_stages
from shardwise.costs.terms import Terms, between, terms

# How many copies of each term the TPU compiler keeps. `benchmarks/plan.py` fits those that are no
# counts, and judges the whole on programs that were drawn and compiled after that; what offload
# needs was read from a few.
COUNTS = Terms(*[1.0] * len(Terms._fields))._replace(beside=0.0)
COEFFICIENTS = COUNTS._replace(layer=0.4, around=5.0, ring=0.7, dispatch=0.4, heads=2.0)
# XLA's for GPUs, which has sums of microbatches half a second time; `benchmarks/plan_gpu.py` fits.
OF_GPUS = COUNTS._replace(around=0.0, logits=1.2, ring=0.4, dispatch=0.0, summed=1.5)
OF_GPUS = OF_GPUS._replace(whole=0.0, heads=0.0)  # which were not looked for there
# Where there is a GPU to time kernels on, and how much more than that five programs needed there
# (`benchmarks/gpu.py`): up to 1.5 %.
_AT_MOST, _MARGIN = dict(logits=1.0, beside=1.0), 1.02
_ALWAYS = ("weights", "kept", "summed", "pending", "copied")
PHASES = (
    (*_ALWAYS, "logits", "beside"),
    (*_ALWAYS, "gradients", "layer", "around", "ring", "dispatch", "whole"),
    (*_ALWAYS, "gradients", "heads", "around", "ring", "whole"),
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes on a device: `parameters`, the optimizer's `state`, both exact, and the `batch`;
    `step`, an estimate, of `terms` times `coefficients`; and on its `host`, of activations that
    wait there between the passes.
    """

    parameters: int
    state: int
    batch: int
    terms: Terms
    coefficients: Terms = COEFFICIENTS
    host: int = 0

    @property
    def of_step(self) -> Terms:
        """The terms of the fullest phase, each times its coefficient; others are 0. Phases are the
        loss, a layer's backward pass, and that of latent attention alone, each with the terms of
        any time.
        """
        pairs = zip(self.coefficients, self.terms, strict=True)
        found = Terms(*(copies * size for copies, size in pairs))
        fullest = max(PHASES, key=lambda names: sum(getattr(found, name) for name in names))
        return Terms(**{name: getattr(found, name) for name in fullest})

    @property
    def step(self) -> float:
        """The bytes of gradients, activations and all else that is gone when the step ends."""
        return sum(self.of_step)

    @property
    def total(self) -> float:
        """The bytes of parameters, state, batch and step."""
        return self.parameters + self.state + self.batch + self.step

    @property
    def most(self) -> float:
        """The bytes that have to fit. For a GPU they are the total with what may be `beside`, and
        2 % for what that misses; for TPUs, and for stages, which were not seen on a GPU, the total.
        """
        if not self.terms.beside:
            return self.total
        told = self.coefficients._replace(**_AT_MOST)
        return max(self.total, _MARGIN * dataclasses.replace(self, coefficients=told).total)


def memory(part: Part, gpu: bool = False) -> Memory:
    """The `Memory` of a device, a GPU or a TPU; of stages, all are alike: they run one program."""
    both = part.held(), part.held(state=True)
    parameters, state = (sum(s.elements * s.array.itemsize for s in held) for held in both)
    # Of tokens, targets, a mask, if packed positions and documents: as `data.batches` makes them.
    batch = (5 if part.packed else 3) * 4 * part.tokens * part.roles.microbatches
    host = int(part.layers * part.tokens * between(part)) if part.roles.offload else 0
    told = of_stages(part, gpu) if part.roles.stage > 1 else terms(part, parameters, gpu)
    return Memory(parameters, state, batch, told, OF_GPUS if gpu else COEFFICIENTS, host)
