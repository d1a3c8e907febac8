"""Pytrees: the paths of their leaves, and the parameter that an optimizer's array belongs to.

    tree.leaves(params)                   # [("blocks/q/kernel", array), ...], for any pytree
    tree.owners(tx.init(params), params)  # for each array of the state its parameter, or None

An optimizer keeps trees that are built as the parameters are: Adam's `mu` and `nu`, an average, the
accumulated gradients. Such a part of the state is found wherever it stands, below chains, masks and
wrappers; an array in it belongs to the parameter in the same place. The ends of paths would not do:
parameters `{"w": …, "mu": {"w": …}}` have two moments whose paths end in `mu/w`.
"""

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
    """[(path, leaf)] in the order of `jax.tree.leaves`.

    Paths read `blocks/q/kernel` whether the tree is a dict, a tuple, a dataclass or an `nnx.State`.
    What boxes an array, an NNX variable or Linen's `Partitioned`, adds nothing to its path. A bare
    array has the path "". Keys that hold a "/" may give two leaves one path.
    """
    return [("/".join(keys), leaf) for keys, leaf, _ in walk(tree)]


def walk(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """(components of the path, leaf, its box or None) for each leaf of `tree`."""

    def stops(x):
        return _is_box(x) or (is_leaf is not None and is_leaf(x))

    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stops)[0]:
        above = tuple(map(_component, keys))
        if not _is_box(leaf):
            yield above, leaf, None
            continue
        for inner, array in jax.tree_util.tree_flatten_with_path(leaf)[0]:
            # The first key is the box's own; more follow where it holds a tree.
            yield (*above, *map(_component, inner[1:])), array, leaf


def path(keys: Iterable[Any]) -> str:
    """The text of a path of JAX's keys, as `jax.tree_util.tree_flatten_with_path` gives them."""
    return "/".join(map(_component, keys))


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
    if box is None:
        return None
    if hasattr(box, "get_metadata"):
        metadata = box.get_metadata()
        found = next((metadata[key] for key in _METADATA if metadata.get(key) is not None), None)
    else:
        found = getattr(box, "names", None)
    if not isinstance(found, tuple | list | PartitionSpec):
        return None
    names = tuple(found)
    return names if all(name is None or isinstance(name, str) for name in names) else None


def _component(key):
    """One component of a path: a dict's key, a field's name or a position."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


class Owner(NamedTuple):
    """The parameter of an array: its place among the parameters' leaves, its path and its shape.

    `axes` says for each axis of the array which axis of the parameter it is, as `_kept_axes` does;
    it is None where the shapes have nothing in common, or the parameter has no shape.
    """

    index: int
    path: str
    shape: tuple[int, ...] | None
    axes: tuple[int | None, ...] | None


def owners(
    state: Any, params: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[Owner | None]:
    """The `Owner` of each leaf of `state`, in order; None for counters, tables and the like.

    `params` may hold anything with a shape; of a leaf without one (`is_leaf` says what is one in
    `params`) only its place counts. A part of the state that is built as the parameters are may
    have holes, where a mask left parameters out. What is in no such part is looked for in those
    that have several arrays for a parameter, and then in those that have some of the parameters.
    """
    arrays, parameters = _by_keys(state), _by_keys(params, is_leaf)
    parts: dict[tuple, dict] = {}  # of the state, from the outside in: {where: {keys there: leaf}}
    for keys, leaf in arrays.items():
        for i in range(len(keys) + 1):
            parts.setdefault(keys[:i], {})[keys[i:]] = leaf
    found: dict[int, Owner] = {}
    for alike in (_same, _related, _built_alike, _shared):
        for part in parts.values():
            # A part that holds an owned array is a container of such parts: a chain, a mask.
            if alike is _shared or not any(leaf and leaf.index in found for leaf in part.values()):
                for leaf, parameter in alike(part, parameters) or []:
                    path, axes = "/".join(parameter.keys), _axes(leaf, parameter)
                    owner = Owner(parameter.index, path, parameter.shape, axes)
                    found.setdefault(leaf.index, owner)
    return [found.get(leaf.index) for leaf in arrays.values() if leaf]


class _Leaf(NamedTuple):
    index: int
    keys: tuple
    shape: tuple | None


def _by_keys(tree, is_leaf=None):
    """{the components of a path: the `_Leaf` there, or None for a hole}."""
    found, index = {}, 0
    for keys, x, _ in walk(tree, is_leaf or _is_hole):
        hole = is_leaf is None and _is_hole(x)
        found[keys] = None if hole else _Leaf(index, keys, _shape(x))
        index += not hole
    return found


def _same(part, params):
    """The pairs of a part in which every array has its parameter's shape, or one element."""
    pairs = _pairs(part, params)
    return pairs if pairs and all(_is_same(*pair) for pair in pairs) else None


def _related(part, params):
    """The pairs of a part whose arrays all have axes of their parameters; one may have several."""
    if () in params and () not in part:
        return None  # for a bare array anything would do
    pairs = _pairs(part, params, several=True)
    return pairs if pairs and all(_is_related(*pair) for pair in pairs) else None


def _built_alike(part, params):
    return None if () in params else _pairs(part, params)


def _shared(part, params):
    """The pairs of those arrays that stand where a parameter does, and have its axes."""
    if () in params:
        return None
    pairs = [(leaf, params.get(keys)) for keys, leaf in part.items()]
    return [(leaf, p) for leaf, p in pairs if leaf and p and _is_related(leaf, p)]


def _pairs(part, params, several=False):
    """[(array, parameter)] if the part is built as the parameters are, holes aside; else None.

    There may be `several` arrays, a tree of them, for one parameter.
    """
    pairs, met, holes = [], set(), set()
    for keys, leaf in part.items():
        at = next((keys[:i] for i in range(len(keys) + 1) if keys[:i] in params), None)
        if at is None:
            around = keys[:-1]
            if leaf or not any(other[: len(around)] == around for other in params):
                return None
            holes.add(keys)
        elif at != keys and not several:
            return None
        elif leaf and params[at]:
            pairs.append((leaf, params[at]))
        met.add(at)
    missing = params.keys() - met
    masked = (any(keys[:i] in holes for i in range(len(keys))) for keys in missing)
    return pairs if all(masked) else None


def _is_same(leaf, parameter):
    if leaf.shape is None or parameter.shape is None:
        return True
    return leaf.shape == parameter.shape or math.prod(leaf.shape) == 1


def _is_related(leaf, parameter):
    return _is_same(leaf, parameter) or _axes(leaf, parameter) is not None


def _axes(leaf, parameter):
    if leaf.shape is None or parameter.shape is None:
        return None
    return _kept_axes(leaf.shape, parameter.shape, leaf.keys)


def _is_hole(x):
    return x is None or (isinstance(x, tuple) and not x)  # as Optax's MaskedNode


def _shape(x):
    if isinstance(x, tuple | str) or callable(x):
        return None
    return tuple(jnp.shape(x))


def _kept_axes(
    shape: tuple[int, ...], whole: tuple[int, ...], keys: tuple[str, ...] = ()
) -> tuple[int | None, ...] | None:
    """The axis of a parameter of shape `whole` that each axis of its array of `shape` is.

    The array has the parameter's shape; or lacks some of its axes, as a factored moment does
    (Adafactor, Shazeer and Stern 2018); or keeps them with size 1; or has one more in front, such
    as the steps that L-BFGS remembers: None for these. `keys` are the components of its path, which
    tell factored moments of a square matrix apart. None if it is none of these.
    """
    if shape == whole:
        return tuple(range(len(whole)))
    if shape and shape[1:] == whole:
        return (None, *range(len(whole)))
    if len(shape) == len(whole):
        fits = all(a in (1, b) for a, b in zip(shape, whole, strict=True))
        return tuple(None if a == 1 else i for i, a in enumerate(shape)) if fits else None
    if len(shape) == len(whole) - 1:
        return _factored(shape, whole, keys)
    return _chosen(shape, whole)


def _factored(shape, whole, keys):
    missing = [i for i in range(len(whole)) if whole[:i] + whole[i + 1 :] == shape]
    if not missing:
        return None
    # Optax factors the two largest axes, of equal ones the last: v_row lacks the largest,
    # v_col the other. That decides where two axes are equally long.
    by_size = sorted(range(len(whole)), key=lambda i: whole[i])
    lacks = by_size[-2 if "v_col" in keys and len(whole) > 1 else -1]
    gone = lacks if lacks in missing else missing[0]
    return tuple(i for i in range(len(whole)) if i != gone)


def _chosen(shape, whole):
    """The first axes of the parameter that have these sizes, in this order."""
    if math.prod(shape) == 1:
        return None
    axes, at = [], 0
    for size in shape:
        while at < len(whole) and whole[at] != size:
            at += 1
        if at == len(whole):
            return None
        axes, at = [*axes, at], at + 1
    return tuple(axes)
