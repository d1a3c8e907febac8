"""The layouts that there are for a number of devices, and the reasons why some cannot be."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardwise.costs.arrays import ORDER, Roles
from shardwise.layouts import Layout
from shardwise.model import Config
from shardwise.topology.slices import Chips


class Refusal(NamedTuple):
    """A layout that cannot be: its `roles`; `kind` says why in few words, `reason` with numbers."""

    roles: Roles
    kind: str
    reason: str


def layout_on(mesh: Any, roles: Roles, **settings: Any) -> Layout:
    """The layout with these settings on a mesh that has an axis for each role, of its name."""
    given = {role: role for role in roles.axes} | {"microbatches": roles.microbatches}
    return Layout(mesh, **given | settings)


def every(devices: int) -> Iterator[Roles]:
    """All factorisations of the devices into roles, in one microbatch."""
    *first, last = ORDER
    found = [({}, devices)]
    for role in first:
        found = [(taken | {role: n}, left // n) for taken, left in found for n in divisors(left)]
    return (Roles(**taken, **{last: left}) for taken, left in found)


def divisors(n: int) -> list[int]:
    """The divisors of a positive number, in order."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def variants(
    roles: Roles, batch: int, chips: Chips, config: Config | None = None, length: int = 1
) -> Iterator[Roles]:
    """The `roles` with every number of microbatches worth trying, with and without remat.

    These are powers of two that divide a device's rows; with stages, as many as stages or more,
    and the rows themselves. Without stages, products are kept beside remat, but not of experts,
    offload is tried, on chips whose way to the host is known, and a decoder's loss takes its rows
    of this `length` in `chunks`.
    """
    ways = [{}, {"remat": True}]
    if roles.stage == 1:
        ways += [] if config and config.experts else [{"remat": True, "products": True}]
        ways += [{"remat": True, "offload": True}] if chips.chip.host_bandwidth else []
    rows, least = batch // roles.rows, roles.stage
    numbers = {m for m in (2**i for i in range(12)) if rows % m == 0} | {*[rows][: least - 1]}
    for m in sorted(m for m in numbers if m >= least):
        whole = config is None or roles.stage > 1
        n = 1 if whole else chunks(rows // m, length // roles.context, config.embed)
        for way in ways:
            yield dataclasses.replace(roles, microbatches=m, loss_chunks=n, **way)


def chunks(rows: int, length: int, embed: int) -> int:
    """The chunks in which the loss takes a device's rows of `length` tokens, 8 at most.

    Each has half as many tokens again as the model is wide, or more: of fewer, fewer bytes of
    logits are spared than the sum of the head's gradient, in float32, lies there more. And each has
    1,024 or more, so that products need not wait for the head's weights on most chips.
    """
    most = max(1, rows * length // max(3 * embed // 2, 1024))
    return max(n for n in (1, 2, 4, 8) if n <= most and length % n == 0)


def refusal(
    roles: Roles, config: Config | None, chips: Chips, batch: int, sequence: int | None
) -> Refusal | None:
    """The first reason why a layout cannot be, or None; data and fsdp alone need no config."""
    told = next(_reasons(roles, config, chips, batch, sequence), None)
    return told and Refusal(roles, *told)


def _reasons(r, c, chips, batch, sequence):
    """(the reason in a few words, the reason with numbers), of each that there is."""
    if r.offload and (r.stage > 1 or not r.remat):
        told = "what enters layers waits there to be computed from again; stages keep it in slots"
        yield "offload without remat, or with stages", told
    if r.products and (r.stage > 1 or c.experts or not r.remat or r.offload):
        told = "no formula here has what stages or experts keep of them, or what waits on the host"
        yield "products kept with stages, experts or offload, or without remat", told
    if (n := r.loss_chunks) > 1 and r.stage > 1:
        yield "a loss in chunks with stages", "no formula here has what these keep then"
    elif n > 1 and sequence // r.context % n:
        told = f"{sequence // r.context} tokens of a row on a device, in {n} chunks"
        yield "chunks do not divide the tokens", told
    if c and (c.latent or c.dense_layers) and r.tensor > 1:
        told = "no formula here has what these keep and send then"
        yield "latent attention or first dense layers with tensor", told
    if c and r.stage > c.layers:
        yield "fewer layers than stages", f"{c.layers} layers and {r.stage} stages"
    cut = dict.fromkeys(("kv_heads", "heads", "vocab", "mlp"), "tensor")
    for name, role in (cut | {"experts": "expert"}).items():
        if (n := getattr(r, role)) > 1:
            if role == "expert" and not c.experts:
                yield "the model has no experts", "an axis of experts needs a mixture"
            yield from _uneven(name, getattr(c, name), role, n)
    yield from _uneven("rows", batch, "data, fsdp and expert", r.rows)
    if (rows := batch // r.rows) < r.stage:
        told = f"{rows} rows on a device, of {batch}, and {r.stage} stages"
        yield "fewer rows than stages", told
    if r.context > 1:  # two half-chunks each, by zigzag
        yield from _uneven("half-chunks of the sequence", sequence, "context", 2 * r.context)
    if r.tensor > 1:
        yield from _uneven("tokens", sequence // r.context, "tensor", r.tensor)
    try:
        chips.mesh(**r.axes)
    except ValueError as error:
        yield "slices cut an axis unevenly", str(error).removeprefix("topology: ")


def _uneven(what, size, role, n):
    if size % n:
        fitting = ", ".join(map(str, divisors(size)))
        told = f"{what}={size} over {n} devices; {fitting} divide"
        yield f"{what} do not divide over {role}", told
