"""Rules put to work on trees: shardings, placing, gathering, constraining."""

import contextlib
import contextvars
from collections.abc import Sequence
from typing import Any

import jax
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

    try:
        jax.tree.broadcast(jax.tree.map(lambda _: 0, rule, is_leaf=_is_rule), tree)
    except ValueError as error:
        raise ValueError(
            f"The tree of rules, a prefix tree, does not fit the tree. Give a rule, or a tree of "
            f"rules with the same keys. {error}"
        ) from None
    return jax.tree_util.tree_map_with_path(resolve, rule, tree, is_leaf=_is_rule)


def place(tree: Any, rule: Any, mesh: Mesh) -> Any:
    """`tree` with each array laid out by `rule`, wherever it was before.

    An array that lies so already, on a device or on all, may share its memory with the result:
    after donating one of them, use neither.
    """
    return jax.device_put(tree, shardings(rule, tree, mesh))


def whole(tree: Any) -> Any:
    """`tree` with each array whole on every device of its mesh, hence readable in each process."""
    leaves, structure = jax.tree.flatten(tree)

    def to(x):
        lies = getattr(x, "sharding", None)
        return (
            NamedSharding(lies.mesh, PartitionSpec()) if isinstance(lies, NamedSharding) else None
        )

    return structure.unflatten(moved(leaves, [*map(to, leaves)]))


def moved(arrays: Sequence[jax.Array], to: Sequence[NamedSharding | None]) -> list[jax.Array]:
    """The arrays, laid out by these shardings over their own devices; where None, as they are.

    In one program for a mesh: of many at once, each with its gather, simulated devices may run
    different ones, and wait for each other for ever.
    """
    found, of_mesh = list(arrays), {}
    for i, sharding in enumerate(to):
        if sharding is not None:
            of_mesh.setdefault(sharding.mesh, []).append(i)
    for numbers in of_mesh.values():
        move = jax.jit(_same, out_shardings=[to[i] for i in numbers])
        for i, x in zip(numbers, move([arrays[i] for i in numbers]), strict=True):
            found[i] = x
    return found


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
