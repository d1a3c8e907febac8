"""The bytes that a device sends in a step, by formula: along each group of roles, and for what.

They are those that `layouts.predict` tells of layouts by hand, with what a recomputed layer sends
along tensor once more, and of experts what the TPU compiler inserts.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable

import jax

from shardwise import context, experts, tensor
from shardwise.costs.arrays import EXPERT, TENSOR, Part
from shardwise.costs.ledger import WIDE, Ledger, Sent, passes
from shardwise.layers import spans
from shardwise.measure.counts import Op, parted


def sent(part: Part) -> tuple[Sent, ...]:
    """The `Sent` of a device of this stage, by roles and kind; those of 0 bytes are left out."""
    r, held, used = part.roles, part.held(), part.itemsize
    ledger = Ledger(r.sizes)
    for share in (share for share in held if share.fsdp > 1):
        ledger.weights(("fsdp",), part.whole(share), used, used, _passes(part, share.array))
    for share in held:
        apart = ("fsdp",) * (share.fsdp > 1) + ("expert",) * (EXPERT in share.array.names)
        ledger.sum("gradients", _copied(part, apart), share.elements * WIDE)
    ledger.loss(_copied(part), staged=r.stage > 1)
    ledger.sum("counts", _copied(part), _counts(part.config))
    if r.context > 1:
        ledger.attention(("context",), _attention(part), r.microbatches * part.layers, r.remat)
        ledger.add("tokens", ("context",), _choices(part))
    ledger.add("activations", ("tensor",), sum(op.ring_bytes for op in inserted(part)))
    if r.expert > 1:
        ledger.add("tokens", ("expert",), _experts(part))
    if r.stage > 1:
        ledger.pipeline(("stage",), *sends(part))
    return ledger.sent


def _copied(part, apart=()):
    """The roles by hand along which devices have copies."""
    return tuple(role for role in part.roles.sizes if role not in ("stage", "tensor", *apart))


def _passes(part, array):
    """(gathers, scatters) of an array."""
    again = array.stacked and part.roles.remat
    if part.roles.stage > 1 and not array.stacked:  # the half of a backward that goes on reads it
        again = part.ends(array)
    return passes(3, part.roles.microbatches, again) if part.reads(array) else (0, 0)


def _counts(c):
    """The bytes of the counts that `model.routed_loss` has: loads, drops and nats."""
    return ((c.layers - c.dense_layers) * (c.experts + 1) + 1) * WIDE if c.experts else 0


def _attention(part):
    """The bytes of a layer's ring attention, (forward, backward)."""
    c, r = part.config, part.roles
    k, v = (
        jax.ShapeDtypeStruct((part.rows, part.sequence, c.kv_heads // r.tensor, size), c.dtype)
        for size in (c.head_dim, c.depth)
    )
    return context.ring("context", apart=r.stage > 1).bytes_sent(r.context, k, k, v)


def ticks(part: Part) -> int:
    """The ticks of a step by 1f1b, of which a forward task takes one and a backward one two."""
    return 3 * (part.roles.microbatches + part.roles.stage - 1)


def passed(part: Part) -> tuple[float, float]:
    """Bytes of (an activation, its cotangent) on their way round the ring of stages, whole along
    tensor; with what all routers before decided, for the last stage's balance of experts.
    """
    c, (last, _) = part.config, spans(part.config.layers, part.roles.stage)[-1]
    before = max(0, last - c.dense_layers) * part.tokens
    whole, gradients = part.tokens * c.embed * part.itemsize, 4 * c.experts * before
    chosen = 5 * c.experts_per_token * before if c.experts else 0
    return whole + gradients + chosen, whole + gradients


def sends(part: Part) -> tuple[float, float]:
    """What goes along stages by 1f1b, for `Ledger.pipeline`, as `pipeline.Program.sends` has it.

    Parameters in no layer are gathered before the first tick, and their gradients scattered after
    the last; of what no axis divides, these are summed. Layers that lie elsewhere than they are
    read go there, and their gradients back; stages with fewer than others send as many.
    """
    m, n = part.roles.microbatches, part.roles.stage
    moved = ticks(part) * sum(passed(part)) + _layers_moved(part)
    for share in part.held():
        if share.stages == 1:
            moved += 2 * share.elements * WIDE * (n - 1) / n
        elif not share.array.stacked:
            moved += share.elements * (n - 1) * (share.array.itemsize + WIDE)
    return moved, m * (2 * WIDE + _counts(part.config))


def _layers_moved(part):
    """The bytes of layers that `sends` has. Of arrays that are cut along other axes, those of one
    shape travel together: a device has as many places as any stage reads of these.
    """
    n, moved, together = part.roles.stage, 0.0, {}
    for share in (s for s in part.held() if s.array.stacked and s.stages > 1):
        array, rows = share.array, part.layers_of(share.array)
        if part.is_in_place(share):
            continue
        each = share.elements * n / array.shape[0] * (array.itemsize + WIDE)
        readers = [stage for stage, (first, end) in enumerate(rows) if first < end]
        if share.along == 0 and len(readers) > 1:
            moved += _elsewhere(rows, array.shape[0] // n) * each
            continue
        alone = len(readers) == 1  # then all of the array goes there
        key = array.shape[not alone :], array.names, share.along, alone
        sizes, places = together.setdefault(key, ([], collections.Counter()))
        sizes += [(end - first) * each for first, end in rows]
        places.update(readers)
    for sizes, places in together.values():
        moved += max(places.values()) * max(sizes) * (n - 1) / n
    return moved


def _elsewhere(rows, each):
    """The most rows that a device sends on each way, if it holds `each` and stages read `rows`."""
    counts = collections.Counter()
    for stage, ends in enumerate(rows):
        for owner in (row // each for row in range(*ends)):
            counts[(stage - owner) % len(rows), owner] += 1
    hops = {hop for hop, _ in counts if hop}
    return sum(max(k for (hop, _), k in counts.items() if hop == h) for h in hops)


def _experts(part):
    """The bytes of tokens to their experts and back, in all passes (see `experts.bytes_sent`)."""
    c, r = part.config, part.roles
    given = part.rows, part.sequence // r.context, c.embed, c.experts_per_token, c.experts, r.expert
    told = c.capacity_factor, "all_to_all", part.itemsize
    once = experts.bytes_sent(*given, *told, sequence=r.context)
    return r.microbatches * part.routed * (2 + r.remat) * once


def _choices(part):
    """The bytes to decide experts' queues and balance from whole rows: choices, places and loads.

    A forward pass gathers places once for all layers, and each layer done again once more.
    """
    c, n, again = part.config, part.roles.context, part.roles.remat
    if not (layers := part.routed):
        return 0
    gathers = layers * (1 + again) * c.experts_per_token + 1 + layers * again
    loads = 2 * part.rows * layers * c.experts * WIDE / n
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
    alike = parted(itertools.chain.from_iterable(found), lambda s: (s.roles, s.kind)).values()
    return tuple(max(each, key=lambda s: s.bytes) for each in alike)


def inserted(part: Part) -> tuple[Op, ...]:
    """The collectives along tensor that a compiler is to insert in a stage's step, with a cut
    sequence; of experts those of the TPU compiler.

    Experts are entered by rows of tokens, which scatters need whole, forward in words of 32 bits;
    the products that end them are summed, as are the gradients of the norms' scales.
    """
    c, r, dtype = part.config, part.roles, tensor.DTYPES[part.itemsize]
    if r.tensor == 1:
        return ()
    m, again, length = r.microbatches, int(r.remat), part.sequence // r.context
    normed = 2 + again if c.qk_norm == "heads" else 0  # q's norm and k's, and forward once more
    told = tensor.collectives(
        *(r.tensor, part.rows, length, c.embed, part.layers, part.itemsize),
        sequence=True,
        gathers_again=r.remat,
        sums_again=r.remat and not r.products,
        mlp=not c.experts or bool(c.shared_experts),
        normed_heads=normed,
    )
    ends = (part.stage == 0) + part.is_last  # the embedding and the head, each once
    found = told["layers"] + told["embedding"] * ends + told["loss"] * part.is_last
    found = [dataclasses.replace(op, trips=m * op.trips) for op in found]
    for a in part.arrays.parameters:
        if a.path.endswith("scale") and {*TENSOR}.isdisjoint(a.names):
            of_one, each = a.shape[a.stacked :], part.layers if a.stacked else 1
            wide = tensor.DTYPES[a.itemsize]
            found.append(tensor.expected(r.tensor, "all-reduce", of_one, wide, each))
    if c.experts:
        rows, each = (round(slots(part) * part.tokens), c.embed), m * part.layers
        chosen = "all-gather", (part.rows, length, c.experts_per_token, c.embed)
        found += [
            tensor.expected(r.tensor, "all-reduce", rows, dtype, each * (2 + again)),
            tensor.expected(r.tensor, *chosen, dtype, each * (2 + again)),
            tensor.expected(r.tensor, *chosen, "u32", each),
        ]
    return tuple(op for op in found if op.trips)
