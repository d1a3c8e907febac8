"""The bytes that a device sends in a step, by formula: along each group of roles, and for what.

Of parameters, gradients, attention and the loss's two sums these are the bytes that
`layouts.predict` tells of layouts by hand; of the tensor axis, Megatron's formula
(`tensor.bytes_sent`), with what a recomputed layer gathers and scatters once more, and of experts
what the TPU compiler inserts.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

from shardwise import experts, tensor
from shardwise.measure.counts import Op
from shardwise.measure.hlo import Array
from shardwise.plan.arrays import Part

_WIDE = 4  # bytes of the sums' float32
_WORD = 4  # bytes in which the TPU compiler scatters rows
_RING_PASSES = {"all-reduce": 2}
_DTYPES = {2: "bf16", 4: "f32"}


@dataclasses.dataclass(frozen=True)
class Sent:
    """The ring bytes along `roles` together, in a step.

    `kind` is "weights" (gathers, and scatters of gradients), "gradients" (sums of what devices have
    copies of), "attention", "activations" (of tensor), "tokens" (to experts), "stages", or "loss"
    and "counts" (a few numbers).
    """

    roles: tuple[str, ...]
    kind: str
    bytes: float


def sent(part: Part) -> tuple[Sent, ...]:
    """The `Sent` of a device of this stage, by roles and kind; those of 0 bytes are left out."""
    found = [*_parameters(part), *_loss(part)]
    r = part.roles
    if r.context > 1:
        found.append(Sent(("context",), "attention", _attention(part)))
        found.append(Sent(("context",), "tokens", _choices(part)))
    if r.tensor > 1:
        found.append(Sent(("tensor",), "activations", _tensor(part)))
    if r.expert > 1:
        found.append(Sent(("expert",), "tokens", _experts(part)))
    if r.stage > 1:
        found.append(Sent(("stage",), "stages", _stages(part)))
    return tuple(s for s in found if s.bytes)


def _share(part: Part, roles: tuple[str, ...]) -> float:
    n = math.prod(getattr(part.roles, role) for role in roles)
    return (n - 1) / n


def _copied(part: Part, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The roles by hand along which devices have copies, as meshes order them."""
    return tuple(role for role in part.roles.sizes if role not in ("stage", "tensor", *without))


def _parameters(part):
    weights, sums = 0.0, {}
    for array, share in part.held():
        without, held = (("expert",) if array.is_expert else ()), share.elements
        if share.is_gathered:
            stages = part.roles.stage if share.is_staged and not array.stacked else 1
            passes = _passes(part, array) if part.reads(array) else 0
            weights += held * stages * part.roles.fsdp * passes * part.itemsize
            without = (*without, "fsdp")
        over = _copied(part, without)
        sums[over] = sums.get(over, 0) + 2 * held * _WIDE * _share(part, over)
    yield Sent(("fsdp",), "weights", weights * _share(part, ("fsdp",)))
    for over, size in sums.items():
        yield Sent(over, "gradients", size)


def _passes(part, array):
    """The number of an array's gathers and scatters, of these one for each microbatch."""
    again = array.stacked and part.roles.remat
    if part.roles.stage > 1 and not array.stacked:  # the half of a backward that goes on reads it
        again = part.ends(array)
    return (2 + again) * part.roles.microbatches


def _numbers(part):
    """(bytes of the loss's total and count, in float32; bytes of the counts of experts)."""
    c = part.config  # loads, drops and nats, as `model.routed_loss` counts them
    return 2 * _WIDE, (c.layers * (c.experts + 1) + 1) * _WIDE if c.experts else 0


def _loss(part):
    """The `Sent` of the loss's numbers; stages sum the count once more, before the first tick."""
    over, (numbers, counts) = _copied(part), _numbers(part)
    numbers += _WIDE if part.roles.stage > 1 else 0
    yield Sent(over, "loss", 2 * numbers * _share(part, over))
    yield Sent(over, "counts", 2 * counts * _share(part, over))


def _attention(part):
    """The bytes of ring attention: K, V and places there, and K, V, places, dK and dV back.

    Beside stages a hop is an all-to-all, of n - 1 times the bytes (`context.ring(apart=True)`).
    """
    c, n = part.config, part.roles.context
    hop = n - 1 if part.roles.stage > 1 else 1
    keys = part.tokens * (c.kv_heads // part.roles.tensor) * c.head_dim
    around = hop * (n - 1) * (2 * keys * part.itemsize + 3 * 4 * part.tokens)
    backward = around + hop * 2 * n * keys * _WIDE
    forward = around * (2 if part.roles.remat else 1)
    return part.roles.microbatches * part.layers * (forward + backward)


def _tensor(part):
    c, n, m = part.config, part.roles.tensor, part.roles.microbatches
    given = part.rows, part.sequence // part.roles.context, c.embed, part.layers
    norms = part.arrays.parameters[0].itemsize
    scales = norms * sum(math.prod(shape) * times for shape, times in part.scales)
    told = tensor.bytes_sent(n, *given, part.itemsize, sequence=True, scales=scales)
    whole = tensor_passes(part)
    once = (whole.gathers + whole.scatters) * _activation(part) * (n - 1)
    once += 2 * whole.numbers * part.tokens * _WIDE * (n - 1) / n
    once += 2 * whole.sums * slots(part) * part.tokens * c.embed * part.itemsize * (n - 1) / n
    chosen = whole.words * _WORD + whole.chosen * part.itemsize
    once = part.layers * (once + chosen * c.experts_per_token * part.tokens * c.embed * (n - 1) / n)
    once += told.embedding if part.is_first else 0
    once += told.head + told.loss if part.is_last else 0
    return m * once + told.norms


class Passes(NamedTuple):
    """The number of times a layer sends along tensor, in a microbatch: activations, which are
    gathered and scattered; the experts' rows, which are summed; and the rows that tokens
    chose, which are gathered, `chosen` times in the dtype of use and `words` times in 32 bits.
    Of norms over all heads a float32 number of each token is summed `numbers` times.
    """

    gathers: int
    scatters: int
    sums: int = 0
    chosen: int = 0
    words: int = 0
    numbers: int = 0


def tensor_passes(part: Part) -> Passes:
    """The `Passes` of Megatron with a cut sequence (Korthikanti et al., 2022); of experts those of
    the TPU compiler.

    Attention and the MLP are entered by a gather and left by a scatter, and backward the same; done
    again, all but the last scatter. Experts are entered by rows of tokens, which scatters need
    whole, forward in words of 32 bits; the products that end them are summed.
    """
    again, c = int(part.roles.remat), part.config
    numbers = 2 * (2 + again) if c.qk_norm == "heads" else 0  # of q's norm and of k's
    if not c.experts:
        return Passes(4 + 2 * again, 4 + again * (not part.roles.products), numbers=numbers)
    dense = (4 + 2 * again, 4 + again) if c.shared_experts else (2 + again, 2 + again)
    return Passes(*dense, sums=2 + again, chosen=2 + again, words=1, numbers=numbers)


def _activation(part):
    """The bytes of what enters a layer, cut over the tensor axis."""
    return part.tokens * part.config.embed * part.itemsize / part.roles.tensor


def ticks(part: Part) -> int:
    """The ticks of a step by 1f1b, of which a forward task takes one and a backward one two."""
    return 3 * (part.roles.microbatches + part.roles.stage - 1)


def passed(part: Part) -> tuple[float, float]:
    """Bytes of (an activation, its cotangent) on their way round the ring of stages.

    For the last stage's balance of experts, what all routers before decided is with them. All of it
    is whole along the tensor axis, and each device sends its copy.
    """
    c, layers = part.config, part.layers * (part.roles.stage - 1)
    whole = part.tokens * c.embed * part.itemsize
    routing = (4 * c.experts + 5 * c.experts_per_token) * layers * part.tokens
    gradients = 4 * c.experts * layers * part.tokens
    return whole + (routing if c.experts else 0), whole + gradients


def _stages(part):
    """The bytes along stages, as `pipeline.Program.sends` counts them: at every tick both rings
    turn, whether anyone waits or not; parameters in no layer are gathered before the first tick,
    and their gradients scattered after the last; the last stage's numbers are summed.
    """
    n, moved = part.roles.stage, 0.0
    for array, share in part.held():
        if share.is_staged and not array.stacked:
            moved += share.elements * (n - 1) * (array.itemsize + _WIDE)
        elif not share.is_staged:
            moved += 2 * share.elements * _WIDE * (n - 1) / n
    summed = 2 * part.roles.microbatches * sum(_numbers(part)) * (n - 1) / n
    return ticks(part) * sum(passed(part)) + moved + summed


def _experts(part):
    """The bytes of tokens to their experts and back, in all passes (see `experts.bytes_sent`)."""
    c, n, cut = part.config, part.roles.expert, part.roles.context
    given = c.embed, c.experts_per_token, c.experts, n, c.capacity_factor
    given = *given, "all_to_all", part.itemsize
    once = experts.bytes_sent(part.rows, part.sequence // cut, *given, sequence=cut)
    passes = 3 if part.roles.remat else 2
    return part.roles.microbatches * part.layers * passes * once


def _choices(part):
    """The bytes to decide experts' queues and balance from whole rows: choices, places and loads.

    A forward pass gathers places once for all layers, and each layer done again once more.
    """
    c, n, again = part.config, part.roles.context, part.roles.remat
    if not c.experts:
        return 0
    gathers = part.layers * (1 + again) * c.experts_per_token + 1 + part.layers * again
    loads = 2 * part.rows * part.layers * c.experts * _WIDE / n
    return part.roles.microbatches * (n - 1) * (gathers * part.tokens * 4 + loads)


def slots(part: Part) -> float:
    """The rows a layer's experts work on for each token; the token's choices if none is dropped.

    An expert has the slots of a whole row on each device that has a part of it.
    """
    c = part.config
    if c.capacity_factor is None:
        return c.experts_per_token
    here = part.sequence // part.roles.context
    each = experts.slots(c.capacity_factor, part.sequence, c.experts_per_token, c.experts)
    return min(here, each) * c.experts / here


def by_role(found: Iterable[Sent]) -> dict[tuple[str, ...], float]:
    """{roles: ring bytes}."""
    total: dict[tuple[str, ...], float] = {}
    for s in found:
        total[s.roles] = total.get(s.roles, 0) + s.bytes
    return total


def largest(found: Iterable[Iterable[Sent]]) -> tuple[Sent, ...]:
    """The most of each kind that any of several stages sends."""
    most: dict[tuple[tuple[str, ...], str], float] = {}
    for s in (s for of_part in found for s in of_part):
        most[s.roles, s.kind] = max(most.get((s.roles, s.kind), 0), s.bytes)
    return tuple(Sent(*key, size) for key, size in most.items())


def inserted(part: Part) -> tuple[Op, ...]:
    """The collectives of Megatron with a cut sequence (Korthikanti et al., 2022) in a stage's step.

    A layer sends what `tensor_passes` tells. The embedding scatters and the head gathers, and
    the other way backward; the loss sums three numbers of each token, and the gradients of the
    norms' scales are summed. The ring bytes of all together are those that `sent` tells of
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
    used = part.itemsize
    found = [
        _op(part, "all-gather", share, used, m * (layers * passes.gathers + ends)),
        _op(part, "reduce-scatter", whole, used, m * (layers * passes.scatters + ends)),
        *(_op(part, "all-reduce", dims, norms, times) for dims, times in part.scales),
    ]
    if c.experts:
        rows = round(slots(part) * part.tokens), c.embed
        chosen = part.rows, length // n, c.experts_per_token, c.embed
        found += [
            _op(part, "all-reduce", rows, used, m * layers * passes.sums),
            _op(part, "all-gather", chosen, used, m * layers * passes.chosen),
            _op(part, "all-gather", chosen, 4, m * layers * passes.words, "u32"),
        ]
    numbers = m * (layers * passes.numbers + 3 * part.is_last)
    found.append(_op(part, "all-reduce", (part.rows, length), 4, numbers))
    return tuple(op for op in found if op.trips)


def _op(part, kind, dims, width, times, dtype=None):
    n = part.roles.tensor
    size = math.prod(dims) * width * (n if kind == "all-gather" else 1) * times
    sent = _RING_PASSES.get(kind, 1) * size * (n - 1) / n
    arrays = (Array(dtype or _DTYPES[width], dims),)
    return Op(kind, "", arrays, n, times, size, sent, source="", notes=("expected",))
