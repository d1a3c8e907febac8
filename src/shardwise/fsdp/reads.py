"""The places where a loss reads its parameters, followed through its trace at true shapes.

A parameter that is given in shares may be read only at `marks.use`, which gathers it; on the way
there it may be sliced along its layers, carried into scans and jitted blocks, and cast. In shares,
another read can give a number without an error, by broadcasting. At true shapes the trace of one
device is made, `use` leaves a name in it, and every parameter is followed to where it is read.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from shardwise import jaxprs, marks
from shardwise import tree as trees
from shardwise.fsdp.arrays import ArrayLayout
from shardwise.fsdp.gathering import How

MARK = "shardwise use "

# What leaves the entries of one layer side by side, if their axes come out as they went in.
CARRIED = {"broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "gather", "name"}
CARRIED |= {"optimization_barrier", "reshape", "slice", "split", "squeeze"}


class Reads(NamedTuple):
    """The reads of parameters, which go by their numbers, that were found in a loss.

    `uses` has for each array that `marks.use` receives its path there, its shape, and the
    parameters that it may be; `elsewhere` says by which operation a parameter is read outside
    `use`; `mesh_axes` are those over which the loss lays out an activation itself.
    """

    uses: list[tuple[str, tuple[int, ...], frozenset[int]]]
    elsewhere: dict[int, str]
    mesh_axes: set[str]


def reads(
    loss: Callable,
    arrays: Sequence[ArrayLayout],
    mesh: Mesh,
    hows: Sequence[How | None],
    dtypes: Sequence[Any],
    batch: Any,
    args: tuple,
    options: dict[str, Any],
) -> Reads:
    """The `Reads`, by `loss(leaves, batch, *args, **options)`, of what has a `How`.

    `dtypes` are those of the leaves; all else may be abstract.
    """
    given = []

    def name(weights):
        leaves = []
        for path, x in trees.leaves(weights):
            given.append((path, jax.numpy.shape(x)))
            leaves.append(checkpoint_name(x, f"{MARK}{len(given) - 1}"))
        return jax.tree.unflatten(jax.tree.structure(weights), leaves)

    def traced(leaves, batch, args, options):
        with marks.bind(use=name):
            return loss(leaves, batch, *args, **options)

    pairs = zip(arrays, dtypes, strict=True)
    leaves = [jax.ShapeDtypeStruct(array.inside(mesh), dtype) for array, dtype in pairs]
    program = jax.make_jaxpr(traced)(leaves, batch, args, options).jaxpr
    labels = [frozenset() if how is None else frozenset([i]) for i, how in enumerate(hows)]
    labels += [jaxprs.NOTHING] * (len(program.invars) - len(labels))
    follower = _Follower([array.inner(mesh) for array in arrays])
    for owners in follower.run(program, labels):
        follower.read(owners, "the loss's output")
    uses = [(*given[i], owners) for i, owners in sorted(follower.uses.items())]
    axes = {axis for eqn in jaxprs.every(program) for axis in _mesh_axes(eqn.params)}
    return Reads(uses, follower.elsewhere, axes)


class _Follower(jaxprs.Follower):
    """A Follower whose labels are the numbers of the parameters that a value may be."""

    def __init__(self, inner: Sequence[tuple]):
        self.inner = inner
        self.uses: dict[int, frozenset[int]] = {}
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
            self.uses[number] = self.uses.get(number, jaxprs.NOTHING) | owners
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
        kept = frozenset(i for i in owners if _ends(v.aval.shape, self.inner[i]))
        self.read(owners - kept, operation)
        return kept


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


def _ends(shape, tail):
    return len(tail) <= len(shape) and tuple(shape[len(shape) - len(tail) :]) == tuple(tail)
