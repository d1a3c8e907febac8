"""One result, bit for bit, on any mesh: blocks of rows, each computed by one device's program.

What a compiler makes of a loss depends on the program around it: cut for eight devices, or beside a
collective, the same rows round otherwise. Only one program gives the same bits. So here a batch is
so many blocks of consecutive rows, however many devices there are; the gradient of a block, and the
optimizer's update, are programs of one device, and each device runs them on arrays that are whole
there. Between them arrays move, and blocks are added up as a binary tree, the lower levels on each
device, the upper ones between devices: a move does not round, and a sum of two has one rounding.

So the roles of a layout only tell how arrays lie between steps, and all of them may. Each device
compiles its own copy of the programs.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import marks, objective
from shardwise import mesh as meshes
from shardwise.fsdp.arrays import check_params
from shardwise.fsdp.batches import check_rows
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import Remat
from shardwise.layouts.placing import cast, shardings


def mean_and_grad(
    layout: Layout, loss: Callable, has_aux: bool, aux: Any, who: str, backward: bool = True
) -> Callable:
    """A function of `(params, batch, *args, key=None)`: the mean over the batch, and its gradient.

    All that comes out is whole on each device, but for the rows of "concatenate". Gradients have
    the dtype of their parameters, and other sums float32 or a wider one. Without `backward` the
    gradient is None.

    Raises, when called:
      ValueError: rows that are no multiple of the blocks; a call within a program of the caller's.
    """
    mesh, blocks = layout.auto, layout.exact

    def used(params, *args, **options):
        return loss(cast(layout, params), *args, **options)

    def of_block(count, params, args, key, part, number):
        given = used, params, *part, args, key, number, blocks, has_aux
        with marks.bind(**_meanings(layout)):
            if count is None:
                return [objective.of_block(*given)[None]]
            sums = objective.of_block(*given, count, backward)
        return _by_way(aux, functools.partial(_part, blocks), sums)

    def ended(params, count, total, grads):
        mean = objective.quotient(objective.Mean(total, count))
        return mean, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

    of_block, ended = jax.jit(of_block), jax.jit(ended)
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names))

    def summed(count, given, rows, ways, joined):
        """What all blocks have, as the tree adds it up."""
        sums, here = [], blocks // mesh.size
        for place, (count_, own, part) in _own(mesh, (count, given, rows)):
            numbers = range(place * here, place * here + here)
            found = zip(_apart(part, here), map(np.int32, numbers), strict=True)
            sums.append(tree_of(joined, (of_block(count_, *own, *each) for each in found)))
        leaves, structure = jax.tree.flatten(_assembled(sums, cut))
        return structure.unflatten(_over_devices(mesh, tuple(ways(sums[0])))(leaves))

    joined = jax.jit(functools.partial(_by_way, aux, _joined))

    def run(params, batch, *args, key=None):
        check_rows(batch, blocks, who)
        if backward:
            check_params(params, mesh, who)
        with outside(who, params, batch, args, key):
            given = laid((params, args, key), whole)
            rows = laid((batch, objective.numbers(batch)), cut)
            (count,) = summed(None, given, rows, lambda _: ["sum"], _added)
            total, grads, extra = summed(count, given, rows, functools.partial(_ways, aux), joined)
            like = given[0] if backward else None
            value, grads = on_each(mesh, ended, like, count, total, grads)
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
        _, key = next(_own(layout.auto, laid(key, whole)))
        params = jax.jit(create)(key)
        made = params, jax.jit(tx.init)(params)
        return _assembled([made] * len(layout.auto.local_devices), whole)


def step(layout: Layout, tx: Any, update: Callable, outputs: Callable) -> Callable:
    """A function `(params, opt_state, batch, *args, key=None) -> (params, opt_state, *outputs)`.

    `outputs` of (params, batch, *args, key) has what `update` takes, and last what comes out; the
    update is a program of one device, to which whole parameters and state are donated.
    """
    update = jax.jit(update, donate_argnums=(0, 1))

    def run(params, opt_state, batch, *args, key=None):
        with outside("layouts.step", params, opt_state, batch, args, key):
            to = shardings(layout, params, tx, "layouts.step")
            params, opt_state = laid((params, opt_state), NamedSharding(layout.auto, P()))
            *found, out = outputs(params, batch, *args, key=key)
            return *laid(on_each(layout.auto, update, params, opt_state, *found), to), *out

    return run


def laid(tree: Any, to: Any) -> Any:
    """The arrays of `tree` laid out by one sharding, or by a tree of them; those that are stay."""
    leaves, structure = jax.tree.flatten(tree)
    to = [to] * len(leaves) if isinstance(to, NamedSharding) else jax.tree.leaves(to)
    for i, x in enumerate(leaves):
        if getattr(x, "committed", False) and x.sharding.device_set != to[i].device_set:
            leaves[i] = jax.device_put(x, to[i])
    others = [i for i, x in enumerate(leaves) if not _lies(x, to[i])]
    # One program: of several at once, simulated devices may run different ones, and wait for ever.
    move = jax.jit(_same, out_shardings=[to[i] for i in others])
    for i, x in zip(others, move([leaves[i] for i in others]), strict=True):
        leaves[i] = x
    return structure.unflatten(leaves)


def on_each(mesh: Mesh, program: Callable, *trees: Any) -> Any:
    """What a program of one device, jitted, makes of arrays that are whole on each; whole again."""
    return _assembled([program(*own) for _, own in _own(mesh, trees)], NamedSharding(mesh, P()))


def tree_of(joined: Callable, blocks: Iterable[Any]) -> Any:
    """What `joined` makes of a power of two of blocks, neighbours first, as a binary tree.

    One waits for its neighbour on each level, as the digits of a counter carry.
    """
    waiting: list[tuple[int, Any]] = []
    for found in blocks:
        level = 0
        while waiting and waiting[-1][0] == level:
            found, level = joined(waiting.pop()[1], found), level + 1
        waiting.append((level, found))
    return waiting[0][1]


@contextlib.contextmanager
def outside(who: str, *trees: Any) -> Iterator[None]:
    """A context without the mesh that `jax.set_mesh` has set; within a trace, a ValueError."""
    # There even what follows from no argument is traced.
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((trees, jnp.zeros(())))):
        raise ValueError(
            f"{who}: with exact= this is several programs, and one around them, whose compiler "
            f"would round as it likes, is what exact= avoids. Call it outside of jit."
        )
    with meshes.outside():
        yield


def _meanings(layout):
    """The meanings of marks on a device that has whole rows."""
    found = {} if layout.remat is None else {"layer": Remat(layout.remat)}
    return found | ({} if layout.kernel is None else {"attend": layout.kernel})


def _ways(aux, sums):
    """How those of all blocks become one, for each leaf of (total, gradients, aux)."""
    *summed, extra = sums
    return ["sum"] * len(jax.tree.leaves(summed)) + objective.ways(aux, extra)


def _by_way(aux, function, *sums):
    ways, structure = _ways(aux, sums[0]), jax.tree.structure(sums[0])
    return structure.unflatten(map(function, ways, *map(jax.tree.leaves, sums)))


def _part(count, way, x):
    """A block's part, rows or [1, ...]; a mean's is exact, since `count` is a power of two."""
    x = jnp.asarray(x)
    if way == "concatenate":
        if x.ndim == 0:
            raise ValueError("aux='concatenate' of a scalar; expected an array that has rows.")
        return x
    if way == "max":
        return x[None]
    x = jnp.sum(x[None], axis=0, dtype=objective.wide(jnp.sum(x).dtype))  # of few bits, in more
    return (x / count if way == "mean" else x)[None]


def _joined(way, one, other):
    if way == "concatenate":
        return jnp.concatenate([one, other])
    return jnp.maximum(one, other) if way == "max" else one + other


@jax.jit
def _added(one, other):
    return jax.tree.map(jnp.add, one, other)


@functools.cache
def _over_devices(mesh, ways):
    """The upper levels of the tree, over arrays [devices, ...]: as many bytes as an all-reduce."""
    names = mesh.axis_names
    specs = [P(names) if way == "concatenate" else P() for way in ways]

    def joined(xs):
        alike: dict[Any, list[int]] = {}
        for i, (x, way) in enumerate(zip(xs, ways, strict=True)):
            if way != "concatenate":
                alike.setdefault((way == "max", x.dtype, x.size > 0), []).append(i)
        for (most, _, some), numbers in alike.items():
            flat = jnp.concatenate([xs[i].ravel() for i in numbers])
            if some:
                parts = jnp.pad(flat, (0, -flat.size % mesh.size)).reshape(mesh.size, -1)
                parts = jax.lax.all_to_all(parts, names, 0, 0)
                while len(parts) > 1:
                    parts = _joined("max" if most else "sum", parts[0::2], parts[1::2])
                flat = jax.lax.all_gather(parts[0], names, tiled=True)
            ends = np.cumsum([xs[i].size for i in numbers])
            for i, x in zip(numbers, jnp.split(flat, ends), strict=False):
                xs[i] = x.reshape(xs[i].shape[1:])
        return xs

    # JAX's check does not see that what is gathered is the same everywhere.
    over = jax.shard_map(joined, mesh=mesh, in_specs=P(names), out_specs=specs, check_vma=False)
    return jax.jit(over)


@functools.partial(jax.jit, static_argnums=1)
def _apart(rows, here):
    """The rows of a device as those of each of its blocks."""
    leaves, structure = jax.tree.flatten(rows)
    leaves = [x.reshape(here, x.shape[0] // here, *x.shape[1:]) for x in leaves]
    return [structure.unflatten([x[j] for x in leaves]) for j in range(here)]


def _own(mesh: Mesh, tree: Any) -> Iterator[tuple[int, Any]]:
    """(place in the mesh, its parts of the arrays) of each device of this process."""
    leaves, structure = jax.tree.flatten(tree)
    held = [{shard.device: shard.data for shard in x.addressable_shards} for x in leaves]
    for place, device in enumerate(mesh.devices.flat):
        if device.process_index == jax.process_index():
            yield place, structure.unflatten([parts[device] for parts in held])


def _assembled(own: Sequence[Any], to: NamedSharding) -> Any:
    """The arrays over all devices, of the parts that those of this process have."""

    def one(*parts):
        shape = parts[0].shape
        shape = (to.mesh.size * shape[0], *shape[1:]) if to.spec else shape
        return jax.make_array_from_single_device_arrays(shape, to, list(parts))

    # What follows from no input is made on JAX's default device.
    pairs = zip(own, to.mesh.local_devices, strict=True)
    return jax.tree.map(one, *(jax.device_put(tree, device) for tree, device in pairs))


def _lies(x, to):
    lies = getattr(x, "sharding", None)
    own = isinstance(lies, NamedSharding) and lies.mesh == to.mesh
    return own and lies.is_equivalent_to(to, x.ndim)


def _same(x):
    return x
