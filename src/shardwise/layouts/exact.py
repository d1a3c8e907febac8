"""One result, bit for bit, on any mesh: blocks of rows, each computed by one device's program.

What a compiler makes of a loss depends on the program around it: cut for eight devices, or beside a
collective, the same rows round otherwise. So here a batch is so many blocks of consecutive rows,
however many devices there are; the gradient of a block, and the optimizer's update, are programs of
one device, and each device compiles and runs them on arrays that are whole there. Between them
arrays move, and blocks are added up as a binary tree, the lower levels on each device, the upper
ones between devices: a move does not round, and a sum of two has one rounding. So the roles of a
layout only tell how arrays lie between steps.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import mesh as meshes
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import marked
from shardwise.layouts.placing import abstract, shardings
from shardwise.objective.gradients import of_block as part_of_block
from shardwise.objective.means import wide
from shardwise.objective.parts import (
    Division,
    check_params,
    check_rows,
    numbers,
    reduced,
    ways,
)
from shardwise.rules.placement import moved


def mean_and_grad(layout: Layout, loss, has_aux, aux, who, backward=True) -> Callable:
    """A function of `(params, batch, *args, key=None)`: the mean over the batch, and its gradient.

    All that comes out is whole on each device, but for the rows of "concatenate". Gradients have
    their parameters' dtype, other sums float32 or wider; without `backward` the gradient is None.

    Raises, when called:
      ValueError: rows that are no multiple of the blocks; a call within a program of the caller's.
    """
    mesh, blocks = layout.auto, layout.exact
    division = Division(microbatches=blocks, who=who)
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names))
    used = marked(layout, loss)

    def of_block(count, params, args, key, batch, rows, number):
        given = params, batch, rows, args, key, number[0], division, has_aux, count, backward
        return _by_way(aux, functools.partial(_part, blocks), part_of_block(used, *given))

    of_block, joined = jax.jit(of_block), jax.jit(functools.partial(_by_way, aux, _joined))

    def summed(given, rows):
        """What all blocks have, as the tree adds it up."""
        sums = []
        for own, part in _own(mesh, (given, rows)):
            found = (of_block(*own, *block) for block in _apart(part, blocks // mesh.size))
            sums.append(tree_of(joined, found))
        leaves, structure = jax.tree.flatten(_assembled(sums, cut))
        return structure.unflatten(_over_devices(mesh, tuple(_ways(aux, sums[0])))(leaves))

    def run(params, batch, *args, key=None):
        check_rows(batch, blocks, who)
        if backward:
            check_params(params, mesh, who)
        with outside(who, params, batch, args, key):
            given = laid((params, args, key), whole)
            rows = laid((batch, numbers(batch), np.arange(blocks, dtype=np.int32)), cut)
            count, _, _ = summed((None, *given), rows)
            value, grads, extra = summed((count, *given), rows)
            if backward:
                grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, given[0])
        return ((value, extra) if has_aux else value), grads

    return run


def value_and_grad(layout: Layout, mean_and_grad: Callable, who: str) -> Callable:
    """`mean_and_grad` with gradients laid out as parameters."""

    def run(params, batch, *args, key=None):
        value, grads = mean_and_grad(params, batch, *args, key=key)
        with outside(who):
            return value, laid(grads, shardings(layout, params, None, who))

    return run


def init(layout: Layout, create: Callable, tx: Any, key: jax.Array) -> tuple[Any, Any]:
    """(params, opt_state), whole on each device: what one device makes, and copies of it."""
    with outside("layouts.init", key):
        whole = NamedSharding(layout.auto, P())
        key, *_ = _own(layout.auto, laid(key, whole))
        params = jax.jit(create)(key)
        made = params, jax.jit(tx.init)(params)
        return _assembled([made] * len(layout.auto.local_devices), whole)


def step(layout: Layout, tx: Any, update: Callable, outputs: Callable) -> Callable:
    """A function `(params, opt_state, batch, *args, key=None) -> (params, opt_state, *outputs)`.

    `outputs` of (params, batch, *args, key) has what `update` takes, and last what comes out.
    Whole parameters and state are donated to the update.
    """
    update, whole = jax.jit(update, donate_argnums=(0, 1)), NamedSharding(layout.auto, P())

    @functools.cache
    def lies(structure, shapes):
        return shardings(layout, structure.unflatten(shapes), tx, "layouts.step")

    def run(params, opt_state, batch, *args, key=None):
        with outside("layouts.step", params, opt_state, batch, args, key):
            leaves, structure = jax.tree.flatten(abstract(params))
            to = lies(structure, tuple(leaves))
            params = laid(params, whole)
            *found, out = outputs(params, batch, *args, key=key)
            opt_state = laid(opt_state, whole)  # not before, beside activations
            own = _own(layout.auto, (params, opt_state, *found))
            new = _assembled([update(*given) for given in own], whole)
            return *laid(new, to), *out

    return run


def laid(tree: Any, to: Any) -> Any:
    """The arrays of `tree` laid out by one sharding, or by a tree of them; those that are stay."""
    leaves, structure = jax.tree.flatten(tree)
    to = [to] * len(leaves) if isinstance(to, NamedSharding) else jax.tree.leaves(to)
    for i, (x, sharding) in enumerate(zip(leaves, to, strict=True)):
        if getattr(x, "committed", False) and _devices(x.sharding) != _devices(sharding):
            leaves[i] = jax.device_put(x, sharding)
    pairs = zip(leaves, to, strict=True)
    return structure.unflatten(moved(leaves, [None if _lies(*pair) else pair[1] for pair in pairs]))


def tree_of(joined: Callable, blocks: Iterable[Any]) -> Any:
    """What `joined` makes of a power of two of blocks, neighbours first, as a binary tree.

    One waits for its neighbour on each level, as the digits of a counter carry.
    """
    waiting: list[Any] = []
    for number, found in enumerate(blocks, 1):
        while number % 2 == 0:
            found, number = joined(waiting.pop(), found), number // 2
        waiting.append(found)
    return waiting[0]


@contextlib.contextmanager
def outside(who: str, *trees: Any) -> Iterator[None]:
    """A context without the mesh that `jax.set_mesh` has set; within a trace, a ValueError."""
    # Under jit even an array of zeros is traced, whatever the arguments are.
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((trees, jnp.zeros(())))):
        raise ValueError(
            f"{who}: with exact= this is several programs, and one around them, whose compiler "
            f"would round as it likes, is what exact= avoids. Call it outside of jit."
        )
    with meshes.outside():
        yield


def _ways(aux, parts):
    """How those of all blocks become one, for each leaf of (mean, gradients, aux)."""
    *summed, extra = parts
    found = ways(aux, extra) if jax.tree.leaves(extra) else []
    return ["sum"] * len(jax.tree.leaves(summed)) + found


def _by_way(aux, function, *sums):
    ways, structure = _ways(aux, sums[0]), jax.tree.structure(sums[0])
    return structure.unflatten(map(function, ways, *map(jax.tree.leaves, sums)))


def _part(blocks, way, x):
    """A block's part, rows or [1, ...]; a mean's is exact, since `blocks` is a power of two."""
    x = jnp.asarray(x)
    if way == "concatenate":
        return reduced(x[None], way)
    if way != "max":
        x = x.astype(wide(jnp.sum(x).dtype))  # as jnp.sum: few bits in more
    return (x / blocks if way == "mean" else x)[None]


def _joined(way, one, other):
    if way == "concatenate":
        return jnp.concatenate([one, other])
    return jnp.maximum(one, other) if way == "max" else one + other


@functools.cache
def _over_devices(mesh, ways):
    """The upper levels of the tree, over arrays [devices, ...]: as many bytes as an all-reduce."""
    names = mesh.axis_names
    specs = [P(names) if way == "concatenate" else P() for way in ways]

    def joined(way, x):
        if way == "concatenate" or not x.size:
            return x if way == "concatenate" else x[0]
        parts = jnp.pad(x.ravel(), (0, -x.size % mesh.size)).reshape(mesh.size, -1)
        parts = jax.lax.all_to_all(parts, names, 0, 0)
        while len(parts) > 1:
            parts = _joined(way, parts[0::2], parts[1::2])
        flat = jax.lax.all_gather(parts[0], names, tiled=True)
        return flat[: x.size].reshape(x.shape[1:])

    def over(xs):
        return [*map(joined, ways, xs)]

    # JAX's check does not see that what is gathered is the same everywhere.
    given = dict(mesh=mesh, in_specs=P(names), out_specs=specs, check_vma=False)
    return jax.jit(jax.shard_map(over, **given))


@functools.partial(jax.jit, static_argnums=1)
def _apart(rows, here):
    """The rows of a device as those of each of its blocks."""
    leaves, structure = jax.tree.flatten(rows)
    split = zip(*(jnp.split(x, here) for x in leaves), strict=True)
    return [structure.unflatten(block) for block in split]


def _own(mesh, tree):
    """The parts of the arrays on each device of this process, in the mesh's order."""
    leaves, structure = jax.tree.flatten(tree)
    held = [{shard.device: shard.data for shard in x.addressable_shards} for x in leaves]
    return [structure.unflatten([x[device] for x in held]) for device in mesh.local_devices]


def _assembled(own: Sequence[Any], to: NamedSharding) -> Any:
    """The arrays over all devices, of the parts that those of this process have."""

    def one(*parts):
        shape = parts[0].shape
        shape = (to.mesh.size * shape[0], *shape[1:]) if to.spec else shape
        return jax.make_array_from_single_device_arrays(shape, to, list(parts))

    # A program that reads none of its inputs runs on JAX's default device.
    pairs = zip(own, to.mesh.local_devices, strict=True)
    return jax.tree.map(one, *(jax.device_put(tree, device) for tree, device in pairs))


def _devices(sharding):
    """A sharding's devices, in the order of its mesh."""
    of_mesh = isinstance(sharding, NamedSharding)
    return [*(sharding.mesh.devices.flat if of_mesh else sharding.device_set)]


def _lies(x, to):
    lies = getattr(x, "sharding", None)
    own = isinstance(lies, NamedSharding) and lies.mesh == to.mesh
    return own and lies.is_equivalent_to(to, x.ndim)
