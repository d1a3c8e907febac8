"""The layout of each parameter, which part of it is gathered, and a look at how arguments lie."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import rules
from shardwise import tree as trees
from shardwise.mesh import axes_of, entry_of
from shardwise.rules.rule import specs

Axes = str | tuple[str, ...]


class ArrayLayout(NamedTuple):
    """One array of parameters: its true shape, its spec, and what becomes of that where it is used.

    `stacked`: axis 0 is one of layers; `cut`: the axis along which it is gathered, None if it is
    not; `apart`: the axes by hand along which each device uses its own part, as of experts;
    `manual`: the entries of the spec that are by hand, those of `cut` and `apart`.
    """

    path: str
    shape: tuple[int, ...]
    spec: P
    stacked: bool
    cut: int | None
    apart: P
    manual: P

    def copied(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of these axes by hand along which devices have copies of it, or of its share."""
        return tuple(name for name in axes if name not in jax.tree.leaves(tuple(self.manual)))

    def inside(self, mesh: Mesh) -> tuple[int, ...]:
        """The array's shape where it is used: of what is never gathered, one device's part."""
        return NamedSharding(mesh, self.apart).shard_shape(self.shape)

    def inner(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of what has to stay together: of one layer, where there are layers."""
        return self.inside(mesh)[1:] if self.stacked else self.inside(mesh)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of one device's part, whole along the axes that the compiler has."""
        return NamedSharding(mesh, self.manual).shard_shape(self.shape)


def rule(axis: Axes = "fsdp", **settings: Any) -> rules.FSDPRule:
    """The rule of FSDP by hand: each array is cut along the first of its axes that divides.

    An array of which none divides stays whole. `settings` are further ones of `rules.FSDPRule`.
    """
    return rules.FSDPRule(axis, **dict(min_size=0, pick="first", uneven="replicate") | settings)


def pad(batch: dict, n: int, mask: str = "mask") -> dict:
    """`batch` with rows of zeros added, up to a multiple of `n` rows.

    Raises:
      ValueError: `batch` is not a dict with a `mask`, by which the added rows count nothing.
    """
    if not isinstance(batch, dict) or mask not in batch:
        raise ValueError(
            f"fsdp.pad: expected a dict with {mask!r}, by which the loss counts only real rows; "
            f"got {sorted(batch) if isinstance(batch, dict) else type(batch).__name__}."
        )
    missing = -len(batch[mask]) % n
    return jax.tree.map(lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)), batch)


def array_layouts(tree, rule: rules.FSDPRule, mesh: Mesh, apart=None, leave_out=()) -> tuple:
    """The ArrayLayout, by `rule`, of each array of `tree`, which may be abstract.

    `apart`, a rule too, tells which of the axes that `rule` cuts are never gathered. The mesh axes
    in `leave_out` are those of a program around, which cuts along them itself.
    """
    axes, layouts, arrays = axes_of(rule.axis), [], trees.leaves(tree)
    own = specs(apart or P(), tree, mesh)
    each = zip(arrays, specs(rule, tree, mesh), own, rule.stacks(tree), strict=True)
    for (path, x), spec, kept, stacked in each:
        spec, taken = without(spec, leave_out), [*kept, *[None] * len(spec)]
        free = (i for i, e in enumerate(spec) if e and not taken[i])
        cut = next((i for i in free if axes_of(spec[i]) == axes), None)
        manual = P(*(e if i == cut or taken[i] else None for i, e in enumerate(spec)))
        layouts.append(ArrayLayout(path, jnp.shape(x), spec, stacked, cut, kept, manual))
    return tuple(layouts)


def laid_out(run: Any, rule: rules.FSDPRule, mesh: Mesh, who: str) -> Callable:
    """`run`, a jitted function of parameters first, that refuses parameters laid out otherwise."""

    def look(params, *args, **options):
        shardings = jax.tree.leaves(rules.shardings(rule, params, mesh))
        for (path, x), wanted in zip(trees.leaves(params), shardings, strict=True):
            lies = getattr(x, "sharding", None)
            if lies is None or not lies.is_equivalent_to(wanted, jnp.ndim(x)):
                raise ValueError(
                    f"{who}: {path or 'the parameter'} of shape {jnp.shape(x)} "
                    f"{'is no array of JAX' if lies is None else f'lies as {lies}'}; expected "
                    f"{wanted}. Make parameters by layouts.init, or lay them out: "
                    f"jax.device_put(params, layouts.shardings(layout, params))."
                )

    def lies(x):
        return jnp.shape(x), getattr(x, "sharding", None)

    return looked_at(run, look, lies, of=lambda params, *args, **options: params)


def without(spec: P, axes: Sequence[str]) -> P:
    """The spec without these mesh axes."""
    kept = (tuple(name for name in axes_of(entry) if name not in axes) for entry in spec)
    return P(*map(entry_of, kept))


def around(run: Callable, call: Callable) -> Callable:
    """`call` in the place of `run`, whose ways to lower and trace it, or ask for shapes, it has."""
    for way in ("lower", "trace", "eval_shape", "clear_cache"):
        if hasattr(run, way):
            setattr(call, way, getattr(run, way))
    return functools.update_wrapper(call, run)


def looked_at(
    run: Callable, look: Callable, kind: Callable, of: Callable = lambda *args, **options: args
) -> Callable:
    """`run`, before which `look` sees the arguments, once for each kind of what `of` takes of them.

    Kinds are told by structure and `kind(x)` of each array. A caller's trace is not looked at.
    """
    known = set()

    def call(*args, **options):
        leaves, structure = jax.tree.flatten((of(*args, **options), options))
        if not any(isinstance(x, jax.core.Tracer) for x in leaves):
            told = structure, *map(kind, leaves)
            if told not in known:
                look(*args, **options)
                known.add(told)
        return run(*args, **options)

    return around(run, call)
