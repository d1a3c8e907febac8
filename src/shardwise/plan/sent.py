"""The bytes that a device sends in a step, by formula: along each group of roles, and for what.

Of parameters, gradients, attention and the loss's two sums these are the bytes that
`layouts.predict` tells of layouts by hand; of the tensor axis Megatron's, with what a recomputed
layer gathers and scatters once more, and of experts what the TPU compiler inserts.
"""

import dataclasses
import math
from collections.abc import Iterable

import jax

from shardwise import context, experts
from shardwise.measure.counts import Op
from shardwise.measure.hlo import Array
from shardwise.plan.arrays import EXPERT, TENSOR, Part

_WIDE = 4  # bytes of the sums' float32
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
    along = (
        ("context", "attention", _attention),
        ("context", "tokens", _choices),
        ("tensor", "activations", lambda part: sum(op.ring_bytes for op in inserted(part))),
        ("expert", "tokens", _experts),
        ("stage", "stages", _stages),
    )
    found = [*_by_hand(part)]
    found += [Sent((role,), kind, of(part)) for role, kind, of in along if role in part.roles.sizes]
    return tuple(s for s in found if s.bytes)


def _share(part, roles):
    n = math.prod(getattr(part.roles, role) for role in roles)
    return (n - 1) / n


def _copied(part, without=()):
    """The roles by hand along which devices have copies, as meshes order them."""
    return tuple(role for role in part.roles.sizes if role not in ("stage", "tensor", *without))


def _by_hand(part):
    """The `Sent` of parameters, and of the loss's numbers: stages sum the count once more, before
    the first tick.
    """
    weights, sums = 0.0, {}
    for share in part.held():
        without = ("expert",) if EXPERT in share.array.names else ()
        if share.fsdp > 1:
            weights += share.whole * _passes(part, share.array) * part.itemsize
            without = (*without, "fsdp")
        over = _copied(part, without)
        sums[over] = sums.get(over, 0) + 2 * share.elements * _WIDE * _share(part, over)
    yield Sent(("fsdp",), "weights", weights * _share(part, ("fsdp",)))
    yield from (Sent(over, "gradients", size) for over, size in sums.items())
    over, (numbers, counts) = _copied(part), _numbers(part)
    numbers += _WIDE if part.roles.stage > 1 else 0
    yield Sent(over, "loss", 2 * numbers * _share(part, over))
    yield Sent(over, "counts", 2 * counts * _share(part, over))


def _passes(part, array):
    """The number of an array's gathers and scatters, of these one for each microbatch."""
    again = array.stacked and part.roles.remat
    if part.roles.stage > 1 and not array.stacked:  # the half of a backward that goes on reads it
        again = part.ends(array)
    return (2 + again) * part.roles.microbatches * part.reads(array)


def _numbers(part):
    """(bytes of the loss's total and count, in float32; bytes of the counts of experts)."""
    c = part.config  # loads, drops and nats, as `model.routed_loss` counts them
    return 2 * _WIDE, (c.layers * (c.experts + 1) + 1) * _WIDE if c.experts else 0


def _attention(part):
    """The bytes of ring attention, forward once more where a layer is done again."""
    c, r = part.config, part.roles
    shape = part.rows, part.sequence, c.kv_heads // r.tensor, c.head_dim
    k = jax.ShapeDtypeStruct(shape, c.dtype)
    told = context.ring("context", apart=r.stage > 1).bytes_sent(r.context, k, k)
    return r.microbatches * part.layers * (told.forward * (1 + r.remat) + told.backward)


def ticks(part: Part) -> int:
    """The ticks of a step by 1f1b, of which a forward task takes one and a backward one two."""
    return 3 * (part.roles.microbatches + part.roles.stage - 1)


def passed(part: Part) -> tuple[float, float]:
    """Bytes of (an activation, its cotangent) on their way round the ring of stages.

    For the last stage's balance of experts, what all routers before decided is with them. All of it
    is whole along the tensor axis, and each device sends its copy.
    """
    c, before = part.config, part.layers * (part.roles.stage - 1) * part.tokens
    whole, gradients = part.tokens * c.embed * part.itemsize, 4 * c.experts * before
    chosen = 5 * c.experts_per_token * before if c.experts else 0
    return whole + gradients + chosen, whole + gradients


def _stages(part):
    """The bytes along stages, as `pipeline.Program.sends` counts them: at every tick both rings
    turn, whether anyone waits or not; parameters in no layer are gathered before the first tick,
    and their gradients scattered after the last; the last stage's numbers are summed.
    """
    n, moved = part.roles.stage, 0.0
    for share in part.held():
        if share.stages == 1:
            moved += 2 * share.elements * _WIDE * (n - 1) / n
        elif not share.array.stacked:
            moved += share.elements * (n - 1) * (share.array.itemsize + _WIDE)
    summed = 2 * part.roles.microbatches * sum(_numbers(part)) * (n - 1) / n
    return ticks(part) * sum(passed(part)) + moved + summed


def _experts(part):
    """The bytes of tokens to their experts and back, in all passes (see `experts.bytes_sent`)."""
    c, r = part.config, part.roles
    given = part.rows, part.sequence // r.context, c.embed, c.experts_per_token, c.experts, r.expert
    told = c.capacity_factor, "all_to_all", part.itemsize
    once = experts.bytes_sent(*given, *told, sequence=r.context)
    return r.microbatches * part.layers * (2 + r.remat) * once


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


def largest(found: Iterable[Iterable[Sent]]) -> tuple[Sent, ...]:
    """The most of each kind that any of several stages sends."""
    most: dict[tuple[tuple[str, ...], str], float] = {}
    for s in (s for of_part in found for s in of_part):
        most[s.roles, s.kind] = max(most.get((s.roles, s.kind), 0), s.bytes)
    return tuple(Sent(*key, size) for key, size in most.items())


def inserted(part: Part) -> tuple[Op, ...]:
    """The collectives of Megatron with a cut sequence (Korthikanti et al., 2022) in a stage's step;
    of experts those of the TPU compiler.

    Attention and the MLP are entered by a gather and left by a scatter, and backward the same; done
    again, all but the last scatter, and no scatter where products are kept. Experts are entered by
    rows of tokens, which scatters need whole, forward in words of 32 bits; the products that end
    them are summed.
    The embedding scatters and the head gathers, and the other way backward; the loss sums three
    numbers of each token, and so does each norm over all heads one; and the gradients of the norms'
    scales are summed.
    """
    c, r, used = part.config, part.roles, part.itemsize
    if r.tensor == 1:
        return ()
    m, layers, again = r.microbatches, r.microbatches * part.layers, int(r.remat)
    length, ends = part.sequence // r.context, m * ((part.stage == 0) + part.is_last)
    share = part.rows, length // r.tensor, c.embed
    gathers, scatters = 4 + 2 * again, 4 + again * (not r.products)
    if c.experts and not c.shared_experts:
        gathers = scatters = 2 + again
    found = [
        _op(part, "all-gather", share, used, layers * gathers + ends),
        _op(part, "reduce-scatter", (part.rows, length, c.embed), used, layers * scatters + ends),
    ]
    for a in part.arrays.parameters:
        if a.path.endswith("scale") and {*TENSOR}.isdisjoint(a.names):
            times = part.layers if a.stacked else 1
            found.append(_op(part, "all-reduce", a.shape[a.stacked :], a.itemsize, times))
    if c.experts:
        rows = round(slots(part) * part.tokens), c.embed
        chosen = *share[:2], c.experts_per_token, c.embed
        found += [
            _op(part, "all-reduce", rows, used, layers * (2 + again)),
            _op(part, "all-gather", chosen, used, layers * (2 + again)),
            _op(part, "all-gather", chosen, 4, layers, "u32"),
        ]
    normed = 2 * (2 + again) if c.qk_norm == "heads" else 0  # q's norm and k's
    numbers = layers * normed + 3 * m * part.is_last
    found.append(_op(part, "all-reduce", (part.rows, length), 4, numbers))
    return tuple(op for op in found if op.trips)


def _op(part, kind, dims, width, times, dtype=None):
    arrays = (Array(dtype or _DTYPES[width], dims),)
    return Op(kind, "", arrays, part.roles.tensor, times, notes=("expected",))
