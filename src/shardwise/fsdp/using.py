"""The meaning of `marks.use` under FSDP, and the places where a loss reads its parameters.

A parameter that is given in shares may be read only at `use`, which gathers it; on the way there it
may be sliced along its layers, carried into scans and jitted blocks, and cast. In shares, another
read can give a number without an error, by broadcasting. So a trace is made at true shapes, of one
device; `use` leaves a name in it, and every parameter is followed to where it is read.

Where all is gathered before the loss (ZeRO 1 and 2), gradients are scattered at `use` all the same,
one layer's at a time. The loss is differentiated in shares for that: in their place it gets arrays
of the numbers of layers, by which `use` finds a layer in what is gathered.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from shardwise import jaxprs, marks
from shardwise import tree as trees
from shardwise.fsdp.arrays import ArrayLayout
from shardwise.fsdp.gathering import How, gather

LAYERS = 2**8  # whose numbers bfloat16 has, and wider dtypes
MARK = "shardwise use "

# What leaves the entries of one layer side by side, if their axes come out as they went in.
CARRIED = {"broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "gather", "name"}
CARRIED |= {"optimization_barrier", "reshape", "slice", "split", "squeeze"}


class Reads(jaxprs.Follower):
    """The reads of parameters in a loss, followed by labels, the numbers of those a value may be.

    `uses` has for each array that `marks.use` receives its path there, its shape, and the
    parameters that it may be; `elsewhere` says by which operation a parameter is read outside
    `use`; `mesh_axes` are those over which the loss lays out an activation itself.
    """

    uses: list[tuple[str, tuple[int, ...], frozenset[int]]]
    mesh_axes: set[str]

    def __init__(self, inner: Sequence[tuple]):
        self.inner = inner
        self.owners: dict[int, frozenset[int]] = {}
        self.elsewhere: dict[int, str] = {}

    def read(self, owners, operation):
        """Note that one of the `owners` is read by an operation other than `use`."""
        for owner in owners:
            self.elsewhere.setdefault(owner, operation)

    def enter(self, v, owners):
        return self._whole(v, owners, "a loop over another axis than its layers")

    def through(self, eqn, given):
        name, owners = eqn.primitive.name, jaxprs.NOTHING.union(*given)
        mark = str(eqn.params.get("name", "")) if name == "name" else ""
        if mark.startswith(MARK):
            number = int(mark.removeprefix(MARK))
            self.owners[number] = self.owners.get(number, jaxprs.NOTHING) | owners
            return [jaxprs.NOTHING]
        if name not in CARRIED or not owners:
            self.read(owners, name)
            return [jaxprs.NOTHING] * len(eqn.outvars)
        if name == "optimization_barrier":
            return given
        self.read(jaxprs.NOTHING.union(*given[1:]), name)  # as an index
        if not _keeps_inner(eqn, max(len(self.inner[i]) for i in given[0])):
            self.read(given[0], name)
        return [self._whole(v, given[0], name) for v in eqn.outvars]

    def _whole(self, v, owners, operation):
        """The owners whose layers this value holds whole; of any other a part is read."""
        shape, inner = v.aval.shape, self.inner
        kept = frozenset(i for i in owners if shape[len(shape) - len(inner[i]) :] == inner[i])
        self.read(owners - kept, operation)
        return kept


def reads(loss: Callable, params, arrays, mesh: Mesh, hows, dtype, batch, args, options) -> Reads:
    """The `Reads`, by `loss(params, batch, *args, **options)`, of what has a `How`.

    Of `params` the structure counts and, without a `dtype`, theirs; all else may be abstract.
    """
    given = []

    def name(weights):
        leaves = []
        for path, x in trees.leaves(weights):
            leaves.append(checkpoint_name(x, f"{MARK}{len(given)}"))
            given.append((path, jnp.shape(x)))
        return jax.tree.unflatten(jax.tree.structure(weights), leaves)

    leaves, structure = jax.tree.flatten(params)
    pairs = zip(arrays, leaves, strict=True)
    used = [jax.ShapeDtypeStruct(array.inside(mesh), dtype or x.dtype) for array, x in pairs]
    with marks.bind(use=name):
        program = jax.make_jaxpr(loss)(structure.unflatten(used), batch, *args, **options).jaxpr
    labels = [jaxprs.NOTHING if how is None else frozenset([i]) for i, how in enumerate(hows)]
    labels += [jaxprs.NOTHING] * (len(program.invars) - len(labels))
    found = Reads([array.inner(mesh) for array in arrays])
    for owners in found.run(program, labels):
        found.read(owners, "the loss's output")
    found.uses = [(*given[i], owners) for i, owners in sorted(found.owners.items())]
    found.mesh_axes = {axis for eqn in jaxprs.every(program) for axis in _mesh_axes(eqn.params)}
    return found


def _keeps_inner(eqn, rank):
    """Whether an equation leaves its last `rank` axes as they are, as far as sizes do not tell."""
    last = eqn.outvars[0].aval.ndim - rank
    if eqn.primitive.name == "gather":
        numbers, operand = eqn.params["dimension_numbers"], eqn.invars[0].aval.ndim - rank
        moved = (*numbers.start_index_map, *numbers.operand_batching_dims)
        kept = tuple(numbers.offset_dims[len(numbers.offset_dims) - rank :])
        return all(i < operand for i in moved) and kept == tuple(range(last, last + rank))
    if eqn.primitive.name == "broadcast_in_dim":
        dims = eqn.params["broadcast_dimensions"]
        return tuple(dims[len(dims) - rank :]) == tuple(range(last, last + rank))
    return True


def _mesh_axes(params):
    """The mesh axes in the specs and shardings of one equation."""
    for x in jax.tree.leaves(list(params.values()), is_leaf=lambda x: isinstance(x, PartitionSpec)):
        spec = x if isinstance(x, PartitionSpec) else getattr(x, "spec", ())
        yield from (name for name in jax.tree.leaves(tuple(spec)) if isinstance(name, str))


@dataclasses.dataclass(frozen=True, eq=False)  # of one trace: nothing cached elsewhere fits
class Use:
    """The meaning of `marks.use`, by which a loss's arrays are gathered, or taken from `wholes`.

    `known` has the `How`, or None, of each array that the loss gives to it, and the number of the
    parameter that it is, by its path and shape. `deferred` says of each whether a loss gets shares.
    """

    known: Mapping[tuple, tuple]
    deferred: tuple[bool, ...]
    arrays: Sequence[ArrayLayout]
    wholes: Sequence[jax.Array] | None = None

    def __call__(self, weights):
        xs, structure = jax.tree.flatten(weights)
        told = [self._told(path, jnp.shape(x)) for path, x in trees.leaves(weights)]
        hows, wholes = [how for how, _ in told], None
        if self.wholes is not None:
            pairs = zip(xs, told, strict=True)
            wholes = [x if how is None else self._layers(x, how, i) for x, (how, i) in pairs]
        return jax.tree.unflatten(structure, gather(xs, hows, wholes))

    def _told(self, path, shape):
        if (path, shape) not in self.known:
            raise ValueError(
                f"fsdp: marks.use received {path or 'an array'} of shape {shape}, and no such "
                f"array when the loss was traced at true shapes: what the loss does before "
                f"marks.use, where weights are in shares, must not depend on their shapes."
            )
        return self.known[path, shape]

    def _layers(self, x, how, i):
        """The layer whose number `x` holds, or the layers, from the gathered array."""
        whole = self.wholes[i] if self.arrays[i].stacked else self.wholes[i][None]
        x = jax.lax.stop_gradient(x)
        if len(whole) > 2 ** (jnp.finfo(x.dtype).nmant + 1):
            raise ValueError(
                f"fsdp: {self.arrays[i].path} is cast to {x.dtype} before marks.use, which ZeRO 1 "
                f"and 2 cannot tell {len(whole)} layers by; cast what marks.use returns, or take "
                f"zero=3."
            )
        numbers = x[(..., *[0] * (whole.ndim - 1))].astype(jnp.int32)
        return whole[numbers].astype(x.dtype) if how.dtype is None else whole[numbers]


def numbered(share: jax.Array, array: ArrayLayout) -> jax.Array:
    """An array like a share, of the numbers of its layers."""
    if not array.stacked:
        return jnp.zeros_like(share)
    return jax.lax.broadcasted_iota(share.dtype, share.shape, 0)


def use_of(found: Reads, arrays: Sequence[ArrayLayout], mesh: Mesh, hows: Sequence) -> Use:
    """The meaning of `marks.use` for a loss that reads its parameters as `found`.

    Raises:
      ValueError: a stacked array that is read elsewhere, or that `use` cannot tell how to gather.
    """
    for i, operation in found.elsewhere.items():
        if arrays[i].stacked and hows[i] is not None:
            raise ValueError(
                f"fsdp: {arrays[i].path} is stacked, and read outside marks.use, by {operation}: "
                f"there a device has only its share of it. Call `weights = marks.use(weights)` "
                f"before, in the layer's body (or on the whole stack, where all of it is read), or "
                f"leave it out of stacked= (without stacked=, a Layout takes for a stack of layers "
                f"each array with one dimension more than its logical axes name)."
            )
    deferred = tuple(how is not None and i not in found.elsewhere for i, how in enumerate(hows))
    known: dict = {}
    for path, whole, owners in found.uses:
        for i in owners or [None]:
            later = i is not None and deferred[i]
            shape, how = _in_shares(whole, arrays[i], hows[i], mesh) if later else (whole, None)
            before, other = known.setdefault((path, shape), (how, i))
            axes = {name for each in (before, how) if each is not None for name in each.axis}
            if before != how and any(mesh.shape[name] > 1 for name in axes):
                whose = (
                    "what is whole" if how is None else arrays[i].path
                    for how, i in ((before, other), (how, i))
                )
                raise ValueError(
                    f"fsdp: marks.use receives {path or 'an array'} of shape {shape}, which may be "
                    f"of {' or of '.join(whose)}; give it the dict or state that holds the array, "
                    f"so that its path tells."
                )
    return Use(known, deferred, arrays)


def _in_shares(shape, array, how, mesh):
    """The shape in which `use` receives what is of this one when whole, and its `How`."""
    lead, local = len(shape) - len(array.inner(mesh)), array.local_shape(mesh)
    shares = (*shape[:lead], *local[len(local) - len(shape) + lead :])
    return shares, how.shifted(lead - array.stacked)


def late(found: Reads, arrays: Sequence[ArrayLayout], hows: Sequence) -> list[How | None]:
    """The `How`s of arrays whose gradients can be scattered at `use`, and None for the others:
    those that others read too, and those that it cannot tell apart by their paths.
    """
    owners: dict[str, set] = {}
    for path, _, some in found.uses:
        owners.setdefault(path, set()).update(some or {None})
    alone = {i for group in owners.values() if len(group) == 1 for i in group}
    alone -= {i for group in owners.values() if len(group) > 1 for i in group}
    alone -= {i for i, s in enumerate(arrays) if s.stacked and s.shape[0] > LAYERS}
    alone -= set(found.elsewhere)
    return [how if i in alone else None for i, how in enumerate(hows)]
