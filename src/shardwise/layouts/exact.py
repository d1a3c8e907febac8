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

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import marks, objective
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
    mesh, count = layout.auto, layout.exact
    here = count // mesh.size

    def used(params, *args, **options):
        return loss(cast(layout, params), *args, **options)

    def of_block(params, args, key, part, number):
        given = used, params, *part, args, key, number, count
        with marks.bind(**_meanings(layout)):
            sums = objective.of_block(*given, has_aux, backward)
        return _by_way(aux, functools.partial(_part, count), sums)

    def divided(params, mean, grads):
        empty, each = mean.count == 0, jnp.where(mean.count == 0, 1, mean.count)
        like = params if backward else None
        grads = jax.tree.map(
            lambda g, p: jnp.where(empty, 0, g / each).astype(p.dtype), grads, like
        )
        return objective.quotient(mean), grads

    of_block, divided = jax.jit(of_block), jax.jit(divided)
    joined = jax.jit(functools.partial(_by_way, aux, _joined))

    def run(params, batch, *args, key=None):
        check_outside(who, params, batch, args, key)
        check_rows(batch, count, who)
        whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names))
        given = laid((params, args, key), whole)
        rows, sums = laid((batch, objective.numbers(batch)), cut), []
        for place, (own, part) in _own(mesh, (given, rows)):
            blocks = enumerate(_apart(part, here), place * here)
            sums.append(tree_of(joined, (of_block(*own, x, np.int32(j)) for j, x in blocks)))
        leaves, structure = jax.tree.flatten(_assembled(sums, cut))
        added = _over_devices(mesh, tuple(_ways(aux, sums[0])))(leaves)
        mean, grads, extra = structure.unflatten(added)
        value, grads = on_each(mesh, divided, given[0], mean, grads)
        return ((value, extra) if has_aux else value), grads

    return run


def value_and_grad(layout: Layout, mean_and_grad: Callable, who: str) -> Callable:
    """`mean_and_grad` with gradients laid out as parameters."""

    def run(params, batch, *args, key=None):
        value, grads = mean_and_grad(params, batch, *args, key=key)
        return value, laid(grads, shardings(layout, params, None, who))

    return run


def init(layout: Layout, create: Callable, tx: Any, key: jax.Array) -> tuple[Any, Any]:
    """(params, opt_state), whole on each device: what one device makes, and copies of it."""
    check_outside("layouts.init", key)
    whole = NamedSharding(layout.auto, P())
    _, key = next(_own(layout.auto, laid(key, whole)))
    params = jax.jit(create)(key)
    made = params, jax.jit(tx.init)(params)
    return _assembled([jax.device_put(made, device) for device in layout.auto.local_devices], whole)


def step(layout: Layout, tx: Any, update: Callable, outputs: Callable) -> Callable:
    """A function `(params, opt_state, batch, *args, key=None) -> (params, opt_state, *outputs)`.

    `outputs` of (params, batch, *args, key) has what `update` takes, and last what comes out; the
    update is a program of one device, to which whole parameters and state are donated.
    """
    update = jax.jit(update, donate_argnums=(0, 1))

    def run(params, opt_state, batch, *args, key=None):
        to = shardings(layout, params, tx, "layouts.step")
        check_outside("layouts.step", params, opt_state, batch, args, key)
        params, opt_state = laid((params, opt_state), NamedSharding(layout.auto, P()))
        *found, out = outputs(params, batch, *args, key=key)
        return *laid(on_each(layout.auto, update, params, opt_state, *found), to), *out

    return run


def laid(tree: Any, to: Any) -> Any:
    """The arrays of `tree` laid out by one sharding, or by a tree of them; those that are stay."""
    leaves, structure = jax.tree.flatten(tree)
    to = [to] * len(leaves) if isinstance(to, NamedSharding) else jax.tree.leaves(to)
    others = [i for i, x in enumerate(leaves) if not _lies(x, to[i])]
    # One program: of several at once, simulated devices may run different ones, and wait for ever.
    move = jax.jit(_same, out_shardings=[to[i] for i in others])
    for i, x in zip(others, move([leaves[i] for i in others]), strict=True):
        leaves[i] = x
    return structure.unflatten(leaves)


def on_each(mesh: Mesh, program: Callable, *trees: Any) -> Any:
    """What a program of one device, jitted, makes of arrays that are whole on each; whole again."""
    made = []
    for place, own in _own(mesh, trees):
        # What follows from no input is made on JAX's default device.
        made.append(jax.device_put(program(*own), mesh.devices.flat[place]))
    return _assembled(made, NamedSharding(mesh, P()))


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


def check_outside(who: str, *trees: Any) -> None:
    """Raise ValueError within a trace."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(trees)):
        raise ValueError(
            f"{who}: with exact= this is several programs, and one around them, whose compiler "
            f"would round as it likes, is what exact= avoids. Call it outside of jit."
        )


def _meanings(layout):
    """The meanings of marks on a device that has whole rows."""
    found = {} if layout.remat is None else {"layer": Remat(layout.remat)}
    return found | ({} if layout.kernel is None else {"attend": layout.kernel})


def _ways(aux, sums):
    """How those of all blocks become one, for each leaf of (mean, gradients, aux)."""
    mean, grads, extra = sums
    return ["sum"] * len(jax.tree.leaves((mean, grads))) + objective.ways(aux, extra)


def _by_way(aux, function, *sums):
    ways, structure = _ways(aux, sums[0]), jax.tree.structure(sums[0])
    return structure.unflatten(map(function, ways, *map(jax.tree.leaves, sums)))


def _part(count, way, x):
    """A block's part, rows or [1, ...]; a mean's is exact, since `count` is a power of two."""
    x = jnp.asarray(x)
    if way == "concatenate" and x.ndim == 0:
        raise ValueError("aux='concatenate' of a scalar; expected an array that has rows.")
    x = x.astype(objective.wide(x.dtype)) if way in ("sum", "mean") else x
    x = x / count if way == "mean" else x
    return x if way == "concatenate" else x[None]


def _joined(way, one, other):
    if way == "concatenate":
        return jnp.concatenate([one, other])
    return jnp.maximum(one, other) if way == "max" else one + other


@functools.cache
def _over_devices(mesh, ways):
    """The upper levels of the tree, over arrays [devices, ...]: as many bytes as an all-reduce."""
    names = mesh.axis_names
    specs = [P(names) if way == "concatenate" else P() for way in ways]

    def added(xs):
        for i, way in enumerate(ways):
            xs[i] = jax.lax.pmax(xs[i][0], names) if way == "max" else xs[i]
        sums = [i for i, way in enumerate(ways) if way in ("sum", "mean")]
        for dtype in {xs[i].dtype for i in sums}:
            of_dtype = [i for i in sums if xs[i].dtype == dtype]
            flat = jnp.concatenate([xs[i].ravel() for i in of_dtype])
            parts = jnp.pad(flat, (0, -flat.size % mesh.size)).reshape(mesh.size, -1)
            parts = jax.lax.all_to_all(parts, names, 0, 0)
            while len(parts) > 1:
                parts = parts[0::2] + parts[1::2]
            flat = jax.lax.all_gather(parts[0], names, tiled=True)
            ends = np.cumsum([xs[i].size for i in of_dtype])
            for i, x in zip(of_dtype, jnp.split(flat, ends), strict=False):
                xs[i] = x.reshape(xs[i].shape[1:])
        return xs

    # JAX's check does not see that what is gathered is the same everywhere.
    over = jax.shard_map(added, mesh=mesh, in_specs=P(names), out_specs=specs, check_vma=False)
    return jax.jit(over)


@functools.partial(jax.jit, static_argnums=1)
def _apart(rows, here):
    """The rows of a device as those of each of its blocks."""
    leaves, structure = jax.tree.flatten(rows)
    leaves = [x.reshape(here, -1, *x.shape[1:]) for x in leaves]
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

    return jax.tree.map(one, *own)


def _lies(x, to):
    lies = getattr(x, "sharding", None)
    own = isinstance(lies, NamedSharding) and lies.mesh == to.mesh
    return own and lies.is_equivalent_to(to, x.ndim)


def _same(x):
    return x
