"""Rules put to work on trees: shardings, placing, gathering, constraining, and what they say."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardwise import tree as trees
from shardwise.mesh import parts, sizes
from shardwise.rules.rule import as_rule, short, specs, used_axes

MESH = jax.make_user_context(None)  # of constraints, and a part of the keys of JAX's caches


def shardings(rule: Any, tree: Any, mesh: Mesh) -> Any:
    """A tree of NamedShardings, one for each array of `tree`, by a rule or a tree of rules.

    A tree of rules is a prefix of `tree`, in which a sharding stands for itself, and None for "not
    said". Arrays may be abstract.

    Raises:
      ValueError: what the rule raises, or a tree of rules that is no prefix of `tree`.
    """

    def resolve(where, rule, part):
        if rule is None or isinstance(rule, Sharding):
            return jax.tree.map(lambda _: rule, part)
        try:
            found = [NamedSharding(mesh, spec) for spec in specs(rule, part, mesh)]
        except (TypeError, ValueError) as error:
            if not where:
                raise
            raise type(error)(f"At {trees.path(where)}: {error}") from error
        return jax.tree.unflatten(jax.tree.structure(part), found)

    try:
        jax.tree.broadcast(jax.tree.map(lambda _: 0, rule, is_leaf=_is_rule), tree)
    except ValueError as error:
        raise ValueError(
            f"The tree of rules, a prefix tree, does not fit the tree. Give a rule, or a tree of "
            f"rules with the same keys. {error}"
        ) from None
    return jax.tree_util.tree_map_with_path(resolve, rule, tree, is_leaf=_is_rule)


def place(tree: Any, rule: Any, mesh: Mesh) -> Any:
    """`tree` with each array laid out by `rule`, wherever it was; raises as `shardings` does.

    Of several processes all call it together, and a NumPy array has to be whole, and the same, in
    each of them. The result may share memory with an array that has this layout already: after
    donating one of them, use neither.
    """
    return jax.device_put(tree, shardings(rule, tree, mesh))


def whole(tree: Any) -> Any:
    """`tree` with each array whole on all devices of its mesh, so that each process can read it. Of
    several processes all call this together; what lies on no mesh, as NumPy's, stays as it is.
    """
    leaves, structure = jax.tree.flatten(tree)
    meshes = [getattr(getattr(x, "sharding", None), "mesh", None) for x in leaves]
    to = [NamedSharding(mesh, PartitionSpec()) if mesh is not None else None for mesh in meshes]
    return structure.unflatten(moved(leaves, to))


def moved(arrays: Sequence[jax.Array], to: Sequence[NamedSharding | None]) -> list[jax.Array]:
    """The arrays, laid out by these shardings over their own devices; where None, as they are.

    In one program for a mesh: of many at once, each with its gather, simulated devices may run
    different ones, and wait for each other for ever.
    """
    found = list(arrays)
    for mesh in dict.fromkeys(sharding.mesh for sharding in to if sharding is not None):
        numbers = [i for i, sharding in enumerate(to) if sharding and sharding.mesh == mesh]
        move = jax.jit(_same, out_shardings=[to[i] for i in numbers])
        for i, x in zip(numbers, move([arrays[i] for i in numbers]), strict=True):
            found[i] = x
    return found


def _same(x):  # at the module's top level: trees that lie alike share a program
    return x


def constrain_tree(tree: Any, rule: Any, mesh: Mesh | None = None) -> Any:
    """`tree`, inside jit, with each array constrained to the layout that `rule` gives it.

    `rule` may be a tree of rules, as for `shardings`; where it is None, arrays stay as they are.
    `mesh` is by default that of the `rules.jit` around this call.

    Raises:
      ValueError: no mesh is given and none is around; what `shardings` raises.
    """
    mesh = mesh or MESH.value
    if mesh is None:
        raise ValueError(
            "rules.constrain_tree: no mesh here; call it inside a function that rules.jit "
            "compiles, or pass mesh=."
        )

    def constrained(x, to):
        return x if to is None else jax.lax.with_sharding_constraint(x, to)

    return jax.tree.map(constrained, tree, shardings(rule, tree, mesh))


def _is_rule(x):
    return x is None or callable(x) or isinstance(x, PartitionSpec | Sharding)


_HEAD = ("path", "shape", "spec", "bytes/device", "replicated because")


class Row(NamedTuple):
    """One array of a `Description`: `bytes` on each device, and `why` all hold it whole, or ""."""

    path: str
    shape: tuple
    spec: PartitionSpec
    bytes: int
    why: str


@dataclasses.dataclass(frozen=True)
class Description:
    """The layout of a tree, which prints as a table.

    `rows` has for each array a named tuple with the fields `path`, `shape`, `spec`, `bytes` (on
    each device) and `why`, which is the reason why all devices hold it whole, or "". `whole_bytes`
    is the tree's size, `mesh` a text with its sizes.
    """

    rows: list
    whole_bytes: int
    mesh: str

    @property
    def bytes_per_device(self):
        """The bytes of all rows on each device."""
        return sum(row.bytes for row in self.rows)

    @property
    def replicated(self):
        """A dict from path to the reason, of each array that every device holds whole."""
        return {row.path: row.why for row in self.rows if row.why}

    def __str__(self):
        lines = [_HEAD, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        sides = zip("<<<><", widths, strict=True)
        line = "  ".join(f"{{:{side}{width}}}" for side, width in sides)
        return "\n".join([*(line.format(*cells).rstrip() for cells in lines), self._total()])

    __repr__ = __str__

    def _repr_markdown_(self):
        code = [(f"`{c[0]}`", c[1], f"`{c[2]}`", *c[3:]) for c in self._cells()]
        lines = [_HEAD, ("---", "---", "---", "---:", "---"), *code]
        return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), "", self._total()])

    def _cells(self):
        for row in self.rows:
            shape = "×".join(map(str, row.shape)) or "scalar"
            yield row.path, shape, short(row.spec), f"{row.bytes:,}", row.why

    def _total(self):
        whole = sum(row.bytes for row in self.rows if row.why)
        return (
            f"{self.bytes_per_device:,} bytes on each device of ({self.mesh}), of "
            f"{self.whole_bytes:,} in all; {len(self.replicated)} of {len(self.rows)} arrays, "
            f"{whole:,} bytes, are whole on every device."
        )


def describe(rule: Any, tree: Any, mesh: Mesh) -> Description:
    """The layout that `rule` gives `tree`, as a `Description`, which prints as a table.

    A row has an array's path, shape, spec and bytes on each device, and the reason if the array is
    whole on every device; sums follow. Arrays may be abstract. Raises what the rule raises.
    """
    rows, total = [], 0
    shapes = jax.eval_shape(lambda tree: tree, tree)  # as JAX keeps them: no float64, by default
    found = zip(trees.leaves(shapes), as_rule(rule).choices(tree, mesh), strict=True)
    for (path, x), (spec, why) in found:
        size = x.size * x.dtype.itemsize
        cut = parts(mesh, used_axes(spec))
        total += size
        rows.append(Row(path, x.shape, spec, size // cut, why))
    return Description(rows, total, sizes(mesh))
