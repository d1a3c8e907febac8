"""The parameter that an array of an optimizer's state belongs to, told by the state's structure.

An optimizer keeps trees that are built as the parameters are: Adam's `mu` and `nu`, an average, the
accumulated gradients. Such a part of the state is found wherever it stands, below chains, masks and
wrappers; an array in it belongs to the parameter in the same place. The ends of paths would not do:
parameters `{"w": …, "mu": {"w": …}}` have two moments whose paths end in `mu/w`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardwise.tree.paths import walk


class Owner(NamedTuple):
    """The parameter of an array: its place among the parameters' leaves, its path and its shape.

    `axes` says for each axis of the array which axis of the parameter it is, as `kept_axes` does;
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
    return _Matching(_Node.of(state), _Node.of(params, is_leaf)).owners()


class _Node:
    """A place in a tree: its children by their keys, or a leaf; with neither it is a hole."""

    def __init__(self):
        self.children, self.leaf = {}, None

    @classmethod
    def of(cls, tree, is_leaf=None):
        root, index = cls(), 0
        for keys, x, _ in walk(tree, is_leaf or _is_hole):
            node = root
            for key in keys:
                node = node.children.setdefault(key, cls())
            if is_leaf or not _is_hole(x):
                node.leaf, index = _Leaf(index, keys, _shape(x)), index + 1
        return root

    def nodes(self):
        """The node itself and all below, from the outside in."""
        yield self
        for child in self.children.values():
            yield from child.nodes()

    def leaves(self):
        return [node.leaf for node in self.nodes() if node.leaf]

    @property
    def is_hole(self):
        return not self.children and self.leaf is None


class _Leaf(NamedTuple):
    index: int
    keys: tuple
    shape: tuple | None


class _Matching:
    """Parts of a state beside the parameters; the likest first, and among these the outermost."""

    def __init__(self, state, params):
        self.state, self.params, self.found = state, params, {}
        for ways in (_same, _related, _built_alike, _shared):
            for node in state.nodes():
                # A part that holds an owned array is a container of such parts: a chain, a mask.
                if not any(leaf.index in self.found for leaf in node.leaves()) or ways is _shared:
                    self._take(ways(node, params) or [])

    def owners(self):
        return [self.found.get(leaf.index) for leaf in self.state.leaves()]

    def _take(self, pairs):
        for leaf, parameter in pairs:
            path = "/".join(parameter.keys)
            owner = Owner(parameter.index, path, parameter.shape, _axes(leaf, parameter))
            self.found.setdefault(leaf.index, owner)


def _same(node, params):
    """The pairs of a part in which every array has its parameter's shape, or one element."""
    pairs = _exact(node, params)
    return pairs if pairs and all(_is_same(*pair) for pair in pairs) else None


def _related(node, params):
    """The pairs of a part whose arrays all have axes of their parameters; one may have several."""
    if params.leaf and not node.leaf:
        return None  # for a bare array anything would do
    pairs = _prefix(node, params)
    return pairs if pairs and all(_is_related(*pair) for pair in pairs) else None


def _built_alike(node, params):
    return None if params.leaf else _exact(node, params)


def _shared(node, params):
    """The pairs of those arrays that stand where a parameter does, and have its axes."""
    if params.leaf:
        return None
    pairs = list(_overlap(node, params))
    return [pair for pair in pairs if _is_related(*pair)]


def _exact(node, params):
    """[(array, parameter)] if the part is built as the parameters are, holes aside; else None."""
    return None if _deeper(node, params) else _prefix(node, params)


def _prefix(node, params):
    """[(array, parameter)] as by `_exact`, with any tree of arrays for a parameter."""
    if params.leaf:
        return [(leaf, params.leaf) for leaf in node.leaves()]
    if node.is_hole:
        return []
    inner = {key for key, child in node.children.items() if not child.is_hole}
    if not params.children.keys() <= node.children.keys() or inner - params.children.keys():
        return None
    pairs = []
    for key, child in params.children.items():
        below = _prefix(node.children[key], child)
        if below is None:
            return None
        pairs += below
    return pairs


def _deeper(node, params):
    """Whether the part has a tree where the parameters have an array."""
    if params.leaf:
        return bool(node.children)
    shared = node.children.keys() & params.children.keys()
    return any(_deeper(node.children[key], params.children[key]) for key in shared)


def _overlap(node, params):
    if node.leaf and params.leaf:
        yield node.leaf, params.leaf
    for key in node.children.keys() & params.children.keys():
        yield from _overlap(node.children[key], params.children[key])


def _is_same(leaf, parameter):
    if leaf.shape is None or parameter.shape is None:
        return True
    return leaf.shape == parameter.shape or math.prod(leaf.shape) == 1


def _is_related(leaf, parameter):
    return _is_same(leaf, parameter) or _axes(leaf, parameter) is not None


def _axes(leaf, parameter):
    if leaf.shape is None or parameter.shape is None:
        return None
    return kept_axes(leaf.shape, parameter.shape, leaf.keys)


def _is_hole(x):
    return x is None or (isinstance(x, tuple) and not x)  # as Optax's MaskedNode


def _shape(x):
    if isinstance(x, tuple | str) or callable(x):
        return None
    return tuple(jnp.shape(x))


def kept_axes(
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
