"""The collectives that the compiler is expected to insert along the tensor axis, by formula."""

import math

from shardwise.measure.counts import Op
from shardwise.measure.program import Array
from shardwise.plan.parts import Part
from shardwise.plan.sent import itemsize, slots, tensor_passes

_RING_PASSES = {"all-reduce": 2}
_DTYPES = {2: "bf16", 4: "f32"}


def inserted(part: Part) -> tuple[Op, ...]:
    """The collectives of Megatron with a cut sequence (Korthikanti et al., 2022) in a stage's step.

    A layer sends what `sent.tensor_passes` tells. The embedding scatters and the head gathers, and
    the other way backward; the loss sums three numbers of each token, and the gradients of the
    norms' scales are summed. The ring bytes of all together are those that `sent.sent` tells of
    tensor.
    """
    n, m, layers = part.roles.tensor, part.roles.microbatches, part.layers
    if n == 1:
        return ()
    length = part.sequence // part.roles.context
    ends = part.is_first + part.is_last
    passes, c = tensor_passes(part), part.config
    share = part.rows, length // n, part.config.embed
    whole = part.rows, length, part.config.embed
    norms = part.arrays.parameters[0].itemsize
    used = itemsize(part)
    found = [
        _op(part, "all-gather", share, used, m * (layers * passes.gathers + ends)),
        _op(part, "reduce-scatter", whole, used, m * (layers * passes.scatters + ends)),
        _op(part, "all-reduce", (part.config.embed,), norms, 2 * layers + 1),
    ]
    if c.experts:
        rows = round(slots(part) * part.tokens), c.embed
        chosen = part.rows, length // n, c.experts_per_token, c.embed
        found += [
            _op(part, "all-reduce", rows, used, m * layers * passes.sums),
            _op(part, "all-gather", chosen, used, m * layers * passes.chosen),
            _op(part, "all-gather", chosen, 4, m * layers * passes.words, "u32"),
        ]
    if part.is_last:
        found.append(_op(part, "all-reduce", (part.rows, length), 4, 3 * m))
    return tuple(found)


def _op(part, kind, dims, width, times, dtype=None):
    n = part.roles.tensor
    size = math.prod(dims) * width * (n if kind == "all-gather" else 1) * times
    sent = _RING_PASSES.get(kind, 1) * size * (n - 1) / n
    arrays = (Array(dtype or _DTYPES[width], dims),)
    return Op(kind, "", arrays, n, times, size, sent, source="", notes=("expected",))
