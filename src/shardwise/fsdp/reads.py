"""Where a loss reads its parameters, followed through its trace at true shapes.

A parameter that is given in shares may be read only at `marks.use`, which gathers it; on the way
there it may be sliced along its layers, carried into scans and jitted blocks, and cast. In shares,
another read can give a number without an error, by broadcasting. At true shapes the trace of one
device is made, `use` leaves a name in it, and every parameter is followed to where it is read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from shardwise import marks
from shardwise import tree as trees

MARK = "shardwise use "
NOTHING: frozenset[int] = frozenset()

# What leaves the entries of one layer side by side, if their axes come out as they went in.
CARRIED = {"broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "gather", "name"}
CARRIED |= {"optimization_barrier", "reshape", "slice", "split", "squeeze"}


class Received(NamedTuple):
    """An array as `marks.use` received it: its path there, its shape, the parameters it may be."""

    path: str
    shape: tuple[int, ...]
    owners: frozenset[int]


class Reads(NamedTuple):
    """What was found.

    `elsewhere` says by which operation a parameter is read outside `use`, {its number: a name};
    `mesh_axes` are those over which the loss lays out an activation itself.
    """

    uses: list[Received]
    elsewhere: dict[int, str]
    mesh_axes: set[str]


def reads(
    loss: Callable,
    arrays: Sequence,
    inner: Sequence[tuple | None],
    batch: Any,
    args: tuple = (),
    options: Mapping[str, Any] | None = None,
) -> Reads:
    """Follow the arrays through `loss(arrays, batch, *args, **options)`; all may be abstract.

    `inner` are the shapes of what has to stay together: of one layer, for a stacked array; None
    for an array that is not followed.
    """
    given = []

    def name(weights):
        leaves = []
        for path, x in trees.leaves(weights):
            given.append((path, jax.numpy.shape(x)))
            leaves.append(checkpoint_name(x, f"{MARK}{len(given) - 1}"))
        return jax.tree.unflatten(jax.tree.structure(weights), leaves)

    def traced(arrays, batch, args, options):
        with marks.bind(use=name):
            return loss(arrays, batch, *args, **options)

    program = jax.make_jaxpr(traced)(list(arrays), batch, args, options or {}).jaxpr
    follower = _Follower(inner, {}, {}, set())
    labels = [NOTHING if shape is None else frozenset([i]) for i, shape in enumerate(inner)]
    labels += [NOTHING] * (len(program.invars) - len(labels))
    for owners in follower.run(program, labels):
        follower.read(owners, "the loss's output")
    uses = [Received(*given[i], owners) for i, owners in sorted(follower.uses.items())]
    return Reads(uses, follower.elsewhere, follower.mesh_axes)


class _Follower(NamedTuple):
    """Labels, the numbers of parameters that a value may be, carried through programs."""

    inner: Sequence[tuple | None]
    uses: dict[int, frozenset[int]]
    elsewhere: dict[int, str]
    mesh_axes: set[str]

    def read(self, owners, operation):
        for owner in owners:
            self.elsewhere.setdefault(owner, operation)

    def run(self, jaxpr, given):
        """The labels of a program's outputs, from those of its inputs."""
        env = {}
        for v, owners in zip(jaxpr.invars, given, strict=True):
            env[v] = self._whole(v, owners, "a loop over another axis than its layers")
        for eqn in jaxpr.eqns:
            labels = [_label(env, v) for v in eqn.invars]
            self.mesh_axes.update(_mesh_axes(eqn.params))
            env.update(zip(eqn.outvars, self._through(eqn, labels), strict=True))
        return [_label(env, v) for v in jaxpr.outvars]

    def _through(self, eqn, given):
        name, params = eqn.primitive.name, eqn.params
        bodies = [body for value in params.values() for body in _programs(value)]
        owners = NOTHING.union(*given)
        if name == "scan":
            return self._scan(eqn, bodies[0], given)
        if name == "while":
            return self._while(params, given)
        if name == "cond":
            branches = [self.run(body, given[1:]) for body in bodies]
            return [NOTHING.union(*labels) for labels in zip(*branches, strict=True)]
        if len(bodies) == 1 and len(bodies[0].invars) == len(given):
            return self.run(bodies[0], given)
        mark = str(params.get("name", "")) if name == "name" else ""
        if mark.startswith(MARK):
            number = int(mark.removeprefix(MARK))
            self.uses[number] = self.uses.get(number, NOTHING) | owners
            return [NOTHING]
        if name not in CARRIED or not owners:
            self.read(owners, name)
            return [NOTHING] * len(eqn.outvars)
        if name == "optimization_barrier":
            return given
        self.read(NOTHING.union(*given[1:]), name)  # as an index
        if not _keeps_inner(eqn, max(len(self.inner[i]) for i in given[0])):
            self.read(given[0], name)
        return [self._whole(v, given[0], name) for v in eqn.outvars]

    def _whole(self, v, owners, operation):
        """The owners whose layers this value holds whole; of any other a part is read."""
        kept = frozenset(i for i in owners if _ends(v.aval.shape, self.inner[i]))
        self.read(owners - kept, operation)
        return kept

    def _scan(self, eqn, body, given):
        # By ranks, since JAX's versions count in different ways: what is stacked has one axis less
        # inside.
        ys = sum(_rank(a) > _rank(b) for a, b in zip(eqn.outvars, body.outvars, strict=True))
        xs = sum(_rank(a) > _rank(b) for a, b in zip(eqn.invars, body.invars, strict=True))
        last = len(given) - xs
        return self._loop(body, list(given), last - (len(body.outvars) - ys), last)

    def _while(self, params, given):
        conds, consts = params["cond_nconsts"], params["body_nconsts"]
        body, test = (_programs(params[key])[0] for key in ("body_jaxpr", "cond_jaxpr"))
        self.run(test, [*given[:conds], *given[conds + consts :]])
        return self._loop(body, list(given[conds:]), consts, len(given) - conds)

    def _loop(self, body, given, first, last):
        """Outputs of a body that carries its inputs `first` to `last` round, until these settle."""
        while True:
            out = self.run(body, given)
            carried = [a | b for a, b in zip(given[first:last], out, strict=False)]
            if carried == given[first:last]:
                return out
            given[first:last] = carried


def _keeps_inner(eqn, rank):
    """Whether the last `rank` axes come out as they went in, as far as sizes do not tell."""
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


def _label(env, v):
    return NOTHING if isinstance(v, Literal) else env.get(v, NOTHING)


def _mesh_axes(params):
    """The mesh axes in the specs and shardings of one equation."""
    for x in jax.tree.leaves(list(params.values()), is_leaf=lambda x: isinstance(x, PartitionSpec)):
        spec = x if isinstance(x, PartitionSpec) else getattr(x, "spec", ())
        yield from (name for name in jax.tree.leaves(tuple(spec)) if isinstance(name, str))


def _programs(value):
    """The programs in one parameter of an equation."""
    found = []
    for one in value if isinstance(value, tuple | list) else (value,):
        one = getattr(one, "jaxpr", one)
        if hasattr(one, "eqns"):
            found.append(one)
    return found


def _ends(shape, tail):
    return len(tail) <= len(shape) and tuple(shape[len(shape) - len(tail) :]) == tuple(tail)


def _rank(v):
    return len(getattr(v.aval, "shape", ()))
