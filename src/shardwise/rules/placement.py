"""Rules put to work on trees: shardings, placing, gathering, constraining."""

import contextlib
import contextvars
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardwise import tree as trees
from shardwise.rules.rule import specs

_MESH = contextvars.ContextVar("shardwise_rules_mesh", default=None)
_TRACED_UNDER = jax.make_user_context(None)  # _MESH, for JAX's caches


def shardings(rule: Any, tree: Any, mesh: Mesh) -> Any:
    """The tree's NamedShardings; `rule` may also be a tree of rules, a prefix of `tree`.

    In such a tree a sharding stands for itself, and None for "not said".

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

    if (unfit := _misfit(rule, tree)) is not None:
        raise ValueError(unfit)
    return jax.tree_util.tree_map_with_path(resolve, rule, tree, is_leaf=_is_rule)


def _misfit(rule, tree, path=()):
    """A message where and why a tree of rules is no prefix of `tree`; None if it is one."""
    if _is_rule(rule):
        return None
    ours, theirs = _children(rule), _children(tree)
    if ours is None:
        return None  # no rule at all, and told so when it is called
    if theirs is None or [key for key, _ in ours] != [key for key, _ in theirs]:
        return (
            f"The tree of rules does not fit the tree at {trees.path(path) or 'its top'}: there it "
            f"has {_told(rule, ours)}, and the tree has {_told(tree, theirs)}. Give a rule, or a "
            f"tree of rules with the same keys."
        )
    for (key, below), (_, part) in zip(ours, theirs, strict=True):
        if (unfit := _misfit(below, part, (*path, *key))) is not None:
            return unfit
    return None


def _children(node):
    """[(key, child)] of a container, of which None is an empty one; None for an array."""
    flat = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return None if len(flat) == 1 and not flat[0][0] else flat


def _told(node, children):
    if children is None:
        shape = f" of shape {jnp.shape(node)}" if hasattr(node, "shape") else ""
        return f"{'an array' if shape else reprlib.repr(node)}{shape}"
    return f"{type(node).__name__} with {[trees.path(key) for key, _ in children]}"


def place(tree: Any, rule: Any, mesh: Mesh) -> Any:
    """`tree` with each array laid out by `rule`, wherever it was before.

    An array that lies so already, on a device or on all, may share its memory with the result:
    after donating one of them, use neither.
    """
    return jax.device_put(tree, shardings(rule, tree, mesh))


def whole(tree: Any) -> Any:
    """`tree` with each array whole on every device of its mesh, hence readable in each process."""
    leaves, structure = jax.tree.flatten(tree)
    cut: dict[Mesh, list[int]] = {}
    for i, x in enumerate(leaves):
        if isinstance(getattr(x, "sharding", None), NamedSharding):
            cut.setdefault(x.sharding.mesh, []).append(i)
    for mesh, numbers in cut.items():
        to = [NamedSharding(mesh, PartitionSpec())] * len(numbers)
        for i, x in zip(numbers, moved([leaves[i] for i in numbers], to), strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def moved(arrays: list[jax.Array], shardings: list[Sharding]) -> list[jax.Array]:
    """The arrays, laid out by these shardings over their devices.

    In one program: of many at once, each with its gather, simulated devices may run different ones,
    and wait for each other for ever.
    """
    return jax.jit(_same, out_shardings=shardings)(arrays)


def _same(x):  # at the module's top level: trees that lie alike share a program
    return x


def constrain_tree(tree: Any, rule: Any, mesh: Mesh | None = None) -> Any:
    """`tree`, inside jit, with each array constrained to the layout that `rule` gives it.

    `rule` may be a tree of rules, as for `shardings`; where it says None, arrays stay as they are.
    The mesh is that of the `rules.jit` around it, unless given.

    Raises:
      ValueError: no mesh is given and none is around.
    """
    mesh = mesh or _MESH.get()
    if mesh is None:
        raise ValueError(
            "rules.constrain_tree: no mesh here; call it inside a function that rules.jit "
            "compiles, or pass mesh=."
        )
    leaves, structure = jax.tree.flatten(tree)
    wanted = structure.flatten_up_to(shardings(rule, tree, mesh))  # None may stand for an array
    return structure.unflatten(
        x if to is None else jax.lax.with_sharding_constraint(x, to)
        for x, to in zip(leaves, wanted, strict=True)
    )


@contextlib.contextmanager
def mesh_for_constraints(mesh):
    """A context in which `constrain_tree` finds this mesh."""
    token = _MESH.set(mesh)
    try:
        with _TRACED_UNDER(mesh):
            yield
    finally:
        _MESH.reset(token)


def _is_rule(x):
    return x is None or callable(x) or isinstance(x, PartitionSpec | Sharding)
