"""Pytrees: their leaves, by path, and the parameter to which each array of an optimizer belongs.

Both functions take any pytree:

    tree.leaves(params)                   # [("blocks/q/kernel", array), ...]
    tree.owners(tx.init(params), params)  # for each leaf of the state an Owner, or None

An optimizer keeps copies of the parameters' tree: Adam's `mu` and `nu`, an average, the accumulated
gradients. Such a copy is found wherever it stands in the state, below chains, masks and wrappers;
an array in it belongs to the parameter in the same place. The ends of paths would not do: of
parameters `{"w": …, "mu": {"w": …}}` two moments have paths that end in `mu/w`.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

__all__ = ["leaves", "owners"]

LAYERS = "layers"  # the leading axis of a stack
# Our own first; then those of nnx.with_partitioning, by the name of this Flax and of earlier ones.
_METADATA = ("logical_axes", "out_sharding", "sharding_names", "sharding")


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """A list of (path, leaf), in the order of `jax.tree.leaves`.

    Paths read `blocks/q/kernel` whether the tree is a dict, a tuple, a dataclass or an `nnx.State`.
    What boxes an array, an NNX variable or Linen's `Partitioned`, adds nothing to its path. A bare
    array has the path "". If keys have a "/" in them, two leaves may have one path.
    """
    return [("/".join(keys), leaf) for keys, leaf, _ in walk(tree)]


def walk(tree: Any, is_leaf: Callable = lambda x: False) -> Iterator[tuple[tuple, Any, Any]]:
    """(components of the path, leaf, its box or None) for each leaf of `tree`."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, lambda x: _is_box(x) or is_leaf(x))
    for keys, leaf in found:
        box = leaf if _is_box(leaf) else None
        for inner, array in jax.tree_util.tree_flatten_with_path(leaf, is_leaf)[0]:
            # The first key is the box's own; more follow where it holds a tree.
            yield tuple(map(_component, (*keys, *inner[1:]))), array, box


def path(keys: Iterable[Any]) -> str:
    """The text of a path of JAX's keys, as `jax.tree_util.tree_flatten_with_path` gives them."""
    return "/".join(map(_component, keys))


def _component(key):  # keys of another library's own classes have these attributes too
    return str(next((getattr(key, x) for x in ("key", "name", "idx") if hasattr(key, x)), key))


def _is_box(x: Any) -> bool:
    """Whether `x` holds an array and what is said of it: an NNX variable, or Linen's metadata."""
    # Told by their methods, so that a tree of another library needs no Flax.
    linen = hasattr(x, "unbox") and hasattr(x, "replace_boxed")
    return not isinstance(x, type) and (hasattr(x, "get_metadata") or linen)


def axis_names(box: Any) -> tuple[str | None, ...] | None:
    """The names that an NNX variable's metadata or a box of Linen's gives an array's axes.

    A name for each axis, or for each but the leading one of a stack; None where there are none, or
    where they are no names but mesh axes in tuples.
    """
    if hasattr(box, "get_metadata"):
        metadata = box.get_metadata()
        found = next((metadata[key] for key in _METADATA if metadata.get(key) is not None), None)
    else:
        found = getattr(box, "names", None)
    if not isinstance(found, tuple | list | PartitionSpec):
        return None
    names = tuple(found)
    return names if all(name is None or isinstance(name, str) for name in names) else None


class Leaf(NamedTuple):
    """One array of a tree, as rules see it.

    `axes` names each of its axes, or is None if none is known; an unnamed leading one is "layers".
    """

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...] | None
    array: Any

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def label(self) -> str:
        """The name of the leaf in messages, which is its path unless the tree is this one array."""
        return self.path or "the array"

    @property
    def is_factored(self) -> bool:
        """Whether its path is that of a factored second moment in an optax state."""
        return not {"v_row", "v_col"}.isdisjoint(self.path.split("/"))

    def axis(self, i: int) -> str:
        """The name of axis i in messages: its number, and its name where it has one."""
        return f"axis {i}" + (f" ({self.axes[i]!r})" if self.axes and self.axes[i] else "")


def read(tree: Any, names: Any = None) -> list[Leaf]:
    """The tree's `Leaf`s; a leaf's axes come from `names`, or from what it carries.

    `names` is a tree of tuples, as the parameters are; what belongs to a parameter (`owners`), such
    as an optimizer's moment, has the same names.
    """
    found = [*walk(tree)]
    axes = [axis_names(box) for _, _, box in found]
    if names is not None:
        named = _names(names)
        # Of no names there are no owners, who would want each array by its own path.
        whose = owners(tree, names, _is_names) if names else [None] * len(found)
        axes = [owner and named[owner.index] for owner in whose]
    bare = [Leaf("/".join(keys), jnp.shape(x), None, x) for keys, x, _ in found]
    return [x._replace(axes=_for_each_axis(x, own)) for x, own in zip(bare, axes, strict=True)]


def _names(tree):
    """The tuples of names in a tree of them, in order."""
    found = [*walk(tree, _is_names)]
    for keys, axes, _ in found:
        if not _is_names(axes):
            raise ValueError(
                f"names: {'/'.join(keys)} is {axes!r}; expected a tuple of axis names, such as "
                f"('embed', 'mlp')."
            )
    return [axes for _, axes, _ in found]


def _is_names(x):
    is_plain = isinstance(x, tuple) and not isinstance(x, PartitionSpec)  # one before JAX 0.10
    return is_plain and all(isinstance(a, str | None) for a in x)


def _for_each_axis(leaf, names):
    """The names of all axes of a leaf; None where there are none, or they are its parameter's."""
    if names is None or leaf.size == 1 or leaf.is_factored:
        return None
    if len(leaf.shape) - len(names) not in (0, 1):
        raise ValueError(
            f"{leaf.path} has shape {leaf.shape} and the logical axes {tuple(names)}; expected a "
            f"name for each axis, or for each but the leading one of a stack. For an optimizer's "
            f"state whose arrays have other shapes, use rules.follow(rule, params)."
        )
    return (LAYERS,) * (len(leaf.shape) - len(names)) + tuple(names)


class Owner(NamedTuple):
    """The parameter to which an array belongs: its number among the parameters' leaves, its path
    and its shape. `axes` has, for each axis of the array, the number of the parameter's axis that
    it is, or None for an axis of its own; it is None if the array has no axis of the parameter.
    """

    index: int
    path: str
    shape: tuple[int, ...] | None
    axes: tuple[int | None, ...] | None = None


def owners(state: Any, params: Any, is_leaf: Callable | None = None) -> list[Owner | None]:
    """A list with an `Owner` for each leaf of `state`: the parameter to which the leaf belongs.

    It is None for counters, tables and the like. A leaf of `params` that has no shape is matched by
    its place alone; `is_leaf` says what is a leaf of `params`, as for `jax.tree.leaves`. A copy of
    their tree may have holes, where a mask left parameters out. Leaves in no such copy are looked
    for in parts that have several arrays for each parameter, then in those whose arrays have other
    shapes, and last in those that have only some of the parameters.
    """
    arrays, parameters = _by_keys(state), _by_keys(params, is_leaf)
    parts: dict[tuple, dict] = {}  # of the state, from the outside in: {where: {keys there: leaf}}
    for keys, leaf in arrays.items():
        for i in range(len(keys) + 1):
            parts.setdefault(keys[:i], {})[keys[i:]] = leaf
    found: dict[int, Owner] = {}

    def take(pairs):
        for leaf, parameter in pairs:
            found.setdefault(leaf.index, parameter._replace(axes=_axes(leaf, parameter)))

    is_tree = () not in parameters  # of a bare array, anything else would be
    ways = (False, _has_its_shape), (is_tree, _has_axes), (False, lambda *pair: is_tree)
    for several, fits in ways:
        for part in parts.values():
            # A part that holds an owned array is a container of such parts: a chain, a mask.
            if not any(leaf and leaf.index in found for leaf in part.values()):
                pairs = _pairs(part, parameters, several)
                take(pairs if all(fits(*pair) for pair in pairs) else [])
    for part in parts.values() if is_tree else []:
        pairs = [(leaf, parameters.get(keys)) for keys, leaf in part.items()]
        take(pair for pair in pairs if all(pair) and _has_axes(*pair))
    return [found.get(leaf.index) for leaf in arrays.values() if leaf]


def _by_keys(tree, is_leaf=None):
    """{the components of a path: the array there, as an `Owner`, or None for a hole}."""
    found, index = {}, 0
    for keys, x, _ in walk(tree, is_leaf or _is_hole):
        if is_leaf is None and _is_hole(x):
            found[keys] = None
            continue
        shape = None if isinstance(x, tuple | str) or callable(x) else tuple(jnp.shape(x))
        found[keys] = Owner(index, "/".join(keys), shape)
        index += 1
    return found


def _is_hole(x):
    return x is None or (isinstance(x, tuple) and not x)  # as Optax's MaskedNode


def _pairs(part, params, several):
    """[(array, parameter)] if the part is built as the parameters are, holes aside; else none.

    There may be `several` arrays, a tree of them, for one parameter.
    """
    pairs, met, holes = [], set(), set()
    for keys, leaf in part.items():
        at = next((keys[:i] for i in range(len(keys) + 1) if keys[:i] in params), None)
        if at is None:
            around = keys[:-1]
            if leaf or not any(other[: len(around)] == around for other in params):
                return []
            holes.add(keys)
        elif at != keys and not several:
            return []
        elif leaf and params[at]:
            pairs.append((leaf, params[at]))
        met.add(at)
    missing = params.keys() - met
    masked = (any(keys[:i] in holes for i in range(len(keys))) for keys in missing)
    return pairs if all(masked) else []


def _has_its_shape(leaf, parameter):
    """Whether an array has its parameter's shape, or one element, or nobody can tell."""
    unknown = leaf.shape is None or parameter.shape is None
    return unknown or leaf.shape == parameter.shape or math.prod(leaf.shape) == 1


def _has_axes(leaf, parameter):
    return _has_its_shape(leaf, parameter) or _axes(leaf, parameter) is not None


def _axes(leaf, parameter):
    """The axis of a parameter that each axis of its array is; None where they are none.

    The array has the parameter's shape, or has 1 in the place of some sizes; or has one axis more
    in front, such as the steps that L-BFGS remembers: None for these. Or it lacks some of its axes,
    as a factored moment does (Adafactor, Shazeer and Stern 2018).
    """
    shape, whole = leaf.shape, parameter.shape
    if shape is None or whole is None:
        return None
    numbers = range(len(whole))
    if shape and shape[1:] == whole:
        return (None, *numbers)
    if len(shape) == len(whole):
        fits = all(a in (1, b) for a, b in zip(shape, whole, strict=True))
        return tuple(i if shape[i] == whole[i] else None for i in numbers) if fits else None
    kept = [
        axes
        for axes in itertools.combinations(numbers, len(shape))
        if shape == tuple(whole[i] for i in axes)
    ]
    if "v_col" in leaf.path.split("/") and len(whole) > 1:
        # Optax factors the two largest axes, of equal ones the last; v_row lacks the largest, and
        # v_col the other. That tells them apart where two axes are equally long.
        lacks = sorted(numbers, key=lambda i: whole[i])[-2]
        kept.sort(key=lambda axes: lacks in axes)
    return kept[0] if kept else None
