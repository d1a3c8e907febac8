"""The programs of one stage, each a `jax.jit` for the devices of that stage."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut
from shardwise.objective import wide


@dataclasses.dataclass(frozen=True)
class Programs:
    """What one stage runs; `kinds` has the jitted functions of F, B, I and W.

    - F `(params, data, carry) -> outputs, kept, done`;
    - B `(params, data, kept, cotangents, sums) -> cotangents of carry, sums, done`;
    - I `(params, data, kept, cotangents) -> cotangents of carry, pending, done`;
    - W `(params, data, kept, pending, sums) -> sums, done`.

    The gradients are added to `sums`, which come in donated. `done` is a number that is there when
    the program has run: nothing else that it yields is sure to live until somebody waits for it.
    `gather` gathers the parameters of the numbers `gathered`, once a step, into the shardings in
    which tasks find them, `held`; `finish` takes sums (donated) and the count, and returns the
    gradients. `laid` has the shardings of "inputs", "carry", "outputs", and of the "cotangents" of
    these last.
    """

    stage: cut.Stage
    halves: cut.Halves
    mesh: Mesh
    kinds: dict[str, Callable]
    zeros: Callable
    gather: Callable
    gathered: list[int]
    held: list[NamedSharding]
    finish: Callable
    laid: dict[str, list[NamedSharding]]

    def parameters(self, stored: list[jax.Array]) -> list[jax.Array]:
        """As tasks take them."""
        if not self.gathered:
            return stored
        whole = dict(zip(self.gathered, self.gather(self.cut_up(stored)), strict=True))
        return [whole.get(i, x) for i, x in enumerate(stored)]

    def cut_up(self, stored: list[jax.Array]) -> list[jax.Array]:
        """Those that `gather` takes."""
        return [stored[i] for i in self.gathered]


def compile_stage(
    stage: cut.Stage, halves: cut.Halves, mesh: Mesh, specs: list[P], rows: P, gather: str
) -> Programs:
    """The `Programs` of a stage whose parameters lie on `mesh` as `specs` say."""
    own = [NamedSharding(mesh, spec) for spec in specs]
    sums = [jax.ShapeDtypeStruct(x.shape, wide(x.dtype)) for x in stage.params]
    laid = {name: _laid(stage, name, mesh, rows) for name in ("inputs", "carry", "outputs")}
    seeded = cut.differentiable(stage)
    laid["cotangents"] = [laid["outputs"][i] for i in seeded]
    back = [
        s
        for s, x in zip(laid["carry"], stage.carry, strict=True)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    here = NamedSharding(mesh, P())
    kinds = {
        "F": jax.jit(_forward(halves), out_shardings=(laid["outputs"], None, here)),
        "B": jax.jit(_whole(halves), out_shardings=(back, own, here), donate_argnums=4),
        "I": jax.jit(_to_input(halves), out_shardings=(back, None, here)),
        "W": jax.jit(_to_weights(halves), out_shardings=(own, here), donate_argnums=4),
    }
    zeros = jax.jit(lambda: [jnp.zeros(x.shape, x.dtype) for x in sums], out_shardings=own)
    along = {name for entry in rows for name in names_of(entry)} if gather == "step" else set()
    held = [NamedSharding(mesh, _without(spec, along)) for spec in specs]
    gathered = [i for i, (a, b) in enumerate(zip(own, held, strict=True)) if a != b]
    gathering = jax.jit(lambda arrays: arrays, out_shardings=[held[i] for i in gathered])
    return Programs(
        stage=stage,
        halves=halves,
        mesh=mesh,
        kinds=kinds,
        zeros=zeros,
        gather=gathering,
        gathered=gathered,
        held=held,
        finish=_finish(stage, own),
        laid=laid,
    )


def _forward(halves):
    return lambda *given: (*halves.forward(*given), _done())


def _whole(halves):
    def whole(params, data, kept, cots, sums):
        back, grads = halves.whole(params, data, kept, cots)
        return back, _add(sums, grads), _done()

    return whole


def _to_input(halves):
    return lambda *given: (*halves.to_input(*given), _done())


def _to_weights(halves):
    def to_weights(params, data, kept, pending, sums):
        return _add(sums, halves.to_weights(params, data, kept, pending)), _done()

    return to_weights


def _done():
    return jnp.zeros((), jnp.int32)


def _add(sums, grads):
    return [total + g.astype(total.dtype) for total, g in zip(sums, grads, strict=True)]


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    return entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()


def _without(spec, names):
    if not any(name in names for entry in spec for name in names_of(entry)):
        return spec
    kept = (tuple(name for name in names_of(entry) if name not in names) for entry in spec)
    return P(*(entry or None for entry in kept))


def _finish(stage, own):
    """Gradients of sums, 0 where nothing counts; sums that can be the gradients' are donated."""
    same = [wide(x.dtype) == x.dtype for x in stage.params]

    def gradients(kept, others, count):
        kept, others, found = iter(kept), iter(others), []
        for x, donated in zip(stage.params, same, strict=True):
            g = next(kept) if donated else next(others)
            found.append(jnp.where(count == 0, 0, g).astype(x.dtype))
        return found

    run = jax.jit(gradients, out_shardings=own, donate_argnums=0)

    def finish(sums, count):
        kept = [x for x, donated in zip(sums, same, strict=True) if donated]
        return run(kept, [x for x, donated in zip(sums, same, strict=True) if not donated], count)

    return finish


def _laid(stage, name, mesh, rows):
    shapes = getattr(stage, name)
    axes = stage.axes.get(name, [None] * len(shapes))
    pairs = zip(shapes, axes, strict=True)
    return [NamedSharding(mesh, _spec(x, axis, mesh, rows)) for x, axis in pairs]


def _spec(x, axis, mesh, rows):
    """`rows`, from the axis of the batch's rows on, if the devices divide it."""
    if axis is None:
        return P()
    spec = P(*[None] * axis, *tuple(rows)[: x.ndim - axis])
    devices = [math.prod(mesh.shape[name] for name in names_of(entry)) for entry in spec]
    divide = all(size % count == 0 for size, count in zip(x.shape, devices, strict=False))
    return spec if divide else P()
