"""The division of a batch into parts, numbers of their rows, and one tree of what they return."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise import mesh as meshes
from shardwise import tree as trees

SEQUENCE = "sequence"
WAYS = ("sum", "mean", "max", "concatenate")


@dataclasses.dataclass(frozen=True)
class Division:
    """The division of a batch into `microbatches`, one after the other, of parts on devices.

    `rows` are the axes of `mesh` by hand that cut rows, `columns` those that cut the sequence, in
    this `order`; without a mesh no axis cuts anything by hand. As a function it is the meaning of
    `marks.total` in such a part. Errors begin with `who`: what the user called.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    microbatches: int = 1
    mesh: Mesh | None = None
    order: Callable[[int, int], Any] | None = None
    who: str = "value_and_grad"

    def __post_init__(self):
        if self.microbatches < 1:
            raise ValueError(f"{self.who}: microbatches={self.microbatches}; expected 1 or more.")

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that cut rows or columns, over which the parts' sums are added up."""
        return (*self.columns, *self.rows)

    def cut(self, batch: Any) -> tuple[Any, Any, tuple]:
        """(the batch, its columns in order; the numbers of rows and columns; the specs of both)."""
        if self.mesh is not None or self.microbatches > 1:
            check_rows(batch, meshes.parts(self.mesh, self.rows) * self.microbatches, self.who)
        order = None
        if self.columns:
            length, parts = self._length(batch), meshes.parts(self.mesh, self.columns)
            check_cut(self.who, f"a sequence of {length}", length, parts, f"over {self.columns}")
            order = np.arange(length) if self.order is None else self.order(length, parts)
            if (np.asarray(order) != np.arange(length)).any():
                batch = jax.tree.map(lambda x: x[:, order] if jnp.ndim(x) > 1 else x, batch)
        places = numbers(batch, order)

        def spec(x):
            return P(*(self.rows, self.columns)[: jnp.ndim(x)])

        return batch, places, (jax.tree.map(spec, batch), jax.tree.map(spec, places))

    def _length(self, batch):
        """The length of the batch's sequences, axis 1 of each array that has two or more."""
        lengths = sizes(batch, 1)
        if len(lengths) != 1:
            told = ", ".join(f"{path} has {n}" for n, path in lengths.items()) or "there is none"
            raise ValueError(
                f"{self.who}: the sequence is cut, axis 1 of each array of the batch that has two "
                f"axes or more, which has to be one length: {told}. Hand over what is no sequence "
                f"as a further argument."
            )
        return next(iter(lengths))

    def together(self, x: Any) -> Any:
        """The sum of `x` over the parts on all devices."""
        return jax.lax.psum(x, self.axes) if self.axes else x

    def over_devices(self, leaves: Sequence[Any], ways: Sequence[str]) -> tuple:
        """(leaves that are whole on every device, those of rows, which stay cut), in shard_map."""
        if self.columns and "concatenate" in ways:
            raise ValueError(
                f"{self.who}: aux 'concatenate' joins rows, and of each row a device has a part of "
                f"the sequence alone, over {self.columns}. Return sums over tokens, or lay the "
                f"sequence out by the compiler."
            )
        sums = {"sum": jax.lax.psum, "mean": jax.lax.pmean, "max": jax.lax.pmax}
        pairs, axes = [*zip(leaves, ways, strict=True)], self.axes
        whole = [sums[w](x, axes) if axes else x for x, w in pairs if w != "concatenate"]
        return whole, [x for x, w in pairs if w == "concatenate"]

    def fold(self, key: Any) -> Any:
        """The key of this device's part, made of the batch's."""
        for name in self.axes if key is not None else ():
            key = jax.random.fold_in(key, jax.lax.axis_index(name))
        return key

    def __call__(self, x: Any, axes: tuple[str, ...]) -> Any:
        """The total of `x`; raises ValueError where no part ever sees the whole batch."""
        if "rows" not in axes:
            return jax.lax.psum(x, self.columns) if self.columns else x
        if self.microbatches > 1:
            raise ValueError(
                f"marks.total: the loss needs a sum over the rows of the whole batch, which is "
                f"taken in {self.microbatches} microbatches or blocks, one after the other: none "
                f"sees the others. Use one microbatch, or sums over each row (for experts: "
                f"over='rows'), or balance experts by a bias, from the loads that aux adds up."
            )
        return self.together(x)


def split(batch: Any, m: int) -> Any:
    """Each array [rows, ...] of the batch as [m, rows/m, ...]: part j has the rows r, r % m == j.

    Raises:
      ValueError: for m > 1, an array without rows, rows that are no multiple of m, or arrays of
        different numbers of rows, of which no rule says what belongs together.
    """
    if m == 1:
        return jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
    check_rows(batch, m, f"microbatches={m}")
    if len(rows := sizes(batch)) > 1:
        told = ", ".join(f"{path} {count}" for count, path in rows.items())
        raise ValueError(
            f"microbatches={m}: the batch's arrays have different numbers of rows ({told}), and "
            f"nothing says which belong together. Give each row its own part of the longer ones, "
            f"as [rows, per row, ...], or use one microbatch."
        )

    def parts(x):
        return jnp.swapaxes(jnp.asarray(x).reshape(len(x) // m, m, *jnp.shape(x)[1:]), 0, 1)

    return jax.tree.map(parts, batch)


def check_rows(batch: Any, parts: int, who: str) -> None:
    """Raise where an array of the batch does not split into so many parts, or it has none."""
    cut = f"into {parts} parts (devices times microbatches)"
    if not jax.tree.leaves(batch):
        raise ValueError(
            f"{who}: the batch is {batch!r}, and has no arrays whose rows could be cut {cut}; hand "
            f"over rows, be they numbers that the loss does not look at."
        )
    for path, x in trees.leaves(batch):
        path = path or "the batch"
        if jnp.ndim(x) == 0:
            raise ValueError(
                f"{who}: {path} is a scalar, and has no rows to cut {cut}; hand it to the loss as "
                f"a further argument."
            )
        if jnp.shape(x)[0] % parts:
            raise ValueError(
                f"{who}: {path} of shape {jnp.shape(x)} does not split {cut} along its rows; add "
                f"masked rows: fsdp.pad(batch, {parts}), and a loss that returns objective.Mean."
            )


def check_cut(who: str, what: str, size: int, parts: int, along: str) -> None:
    """Raise where `what`, of this size `along` what is cut, does not split into so many parts."""
    if size % parts:
        raise ValueError(
            f"{who}: {what} does not split into {parts} parts {along}; pad it to "
            f"{-(-size // parts) * parts}, with a mask of 0."
        )


GIVEN = (
    "Keep what is no array out of the tree, and put it back within the loss (nnx.split and "
    "nnx.merge; eqx.partition with eqx.is_array and eqx.combine)."
)
RETURNED = "Return arrays and numbers, of which those of all parts become one."


def check_arrays(tree: Any, who: str, remedy: str = GIVEN) -> None:
    """Raise TypeError where a leaf is neither an array nor a number."""
    for path, x in trees.leaves(tree):
        if not hasattr(x, "dtype") and not isinstance(x, int | float | complex):
            kind = type(x).__name__
            raise TypeError(f"{who}: {path or 'the tree'} is a {kind}, not an array. {remedy}")


def check_params(params: Any, mesh: Mesh, who: str) -> None:
    """Raise where a parameter has no gradient, or another mesh than this one is set."""
    check_arrays(params, who)
    for path, x in trees.leaves(params):
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise TypeError(
                f"{who}: {path or 'the parameter'} is {jnp.result_type(x)}, which has no gradient; "
                f"pass keys by key=, and counters in the batch or as further arguments."
            )
    meshes.check_around(who, mesh)


def numbers(batch: Any, order: Any = None) -> dict[str, jax.Array]:
    """The row numbers [rows] for each number of rows that arrays of the batch have.

    They travel beside the batch, are divided as it is, and answer `marks.index("rows", ...)`.
    Where the sequence is cut too, `order` [sequence] has the place of each entry in the whole
    sequence: as "sequence" [rows, sequence], it answers `marks.index("sequence", ...)`.
    """
    found = {str(size): jnp.arange(size, dtype=jnp.int32) for size in sorted(sizes(batch))}
    if order is not None:
        places = jnp.asarray(order, jnp.int32)
        found[SEQUENCE] = jnp.broadcast_to(places, (min(sizes(batch)), *places.shape))
    return found


def sizes(batch: Any, axis: int = 0) -> dict[int, str]:
    """{size along this axis: the path of the first array of that size}, of those that have it."""
    found: dict[int, str] = {}
    for path, x in trees.leaves(batch):
        if jnp.ndim(x) > axis:
            found.setdefault(jnp.shape(x)[axis], path or "the batch")
    return found


def unit_of(batch: Any) -> int:
    """The greatest number that divides the rows of each array; 0 for a batch without rows."""
    return math.gcd(*sizes(batch))


def length_of(batch: Any) -> int:
    """The length of the sequence, axis 1 of arrays; 0 where none has one."""
    return next(iter(sizes(batch, 1)), 0)


def meaning(rows: dict[str, jax.Array]) -> Any:
    """The meaning of `marks.index` in a part whose rows have these numbers."""
    places = rows.get(SEQUENCE)
    of_size = {x.shape[0]: x for name, x in rows.items() if name != SEQUENCE}

    def index(axis, size):
        if axis != "rows" and places is None:
            return jnp.arange(size, dtype=jnp.int32)
        found = of_size if axis == "rows" else {places.shape[1]: places[0]}
        if size not in found:
            raise ValueError(
                f"marks.index({axis!r}, {size}): this part of the batch has {sorted(found)} "
                f"entries along its {axis}; ask for as many as the model's input has."
            )
        return found[size]

    return index


def ways(aux: Any, tree: Any) -> list[str]:
    """The way in which the parts of each leaf of `tree` are joined.

    `aux` is one way, or a prefix tree of ways; None, where nobody reads the outputs, is "sum" too.

    Raises:
      ValueError: a way that is none of `WAYS`, or `aux` is no prefix of `tree`.
    """
    aux = "sum" if aux is None else aux
    try:
        # Not by jax.tree.broadcast, which makes the caller's own nodes, of strings.
        spread = jax.tree.map(lambda way, part: [way] * len(jax.tree.leaves(part)), aux, tree)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"aux={aux!r} does not fit the auxiliary outputs, {jax.tree.structure(tree)}: expected "
            f"one of {', '.join(WAYS)}, or a tree of these that is a prefix of the outputs'."
        ) from error
    found = jax.tree.leaves(spread)
    if unknown := [way for way in found if way not in WAYS]:
        raise ValueError(f"aux={unknown[0]!r}; expected one of {', '.join(WAYS)}.")
    return found


def reduced(stacked: jax.Array, way: str) -> jax.Array:
    """The one array that `way` makes of a leaf of all parts, stacked along a new first axis."""
    if way == "concatenate":
        if stacked.ndim < 2:
            raise ValueError("aux='concatenate' of a scalar; expected an array that has rows.")
        m, rows = stacked.shape[:2]  # back to the order of the whole batch
        return jnp.swapaxes(stacked, 0, 1).reshape(m * rows, *stacked.shape[2:])
    return {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max}[way](stacked, axis=0)


def merged(whole: Sequence[Any], rows: Sequence[Any], ways: Sequence[str], structure: Any) -> Any:
    """The tree of auxiliary outputs, of the two groups that `Division.over_devices` made of it."""
    groups = iter(whole), iter(rows)
    return jax.tree.unflatten(structure, [next(groups[way == "concatenate"]) for way in ways])


def outputs(aux: Any, tree: Any) -> list[tuple[str, Any, str]]:
    """(path, leaf, way) of each auxiliary output; none where `aux` is None: nobody reads them."""
    if aux is None:
        return []
    leaves = zip(trees.leaves(tree), ways(aux, tree), strict=True)
    return [(path or "tree", x, way) for (path, x), way in leaves]
