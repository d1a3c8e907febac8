"""How checkers run an answer on devices, and compare what comes out with one device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise_book.puzzles.verdict import Wrong

QUICK = {"xla_backend_optimization_level": 0}  # each program runs once or twice


def whole_numbers(seed: int, *shape: int) -> np.ndarray:
    """Small whole numbers in float32, whose sums are exact in any order."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def normal(seed: int, *shape: int) -> np.ndarray:
    """Standard normal draws in float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def compiled(function: Callable, *args: Any, **options: Any) -> jax.stages.Compiled:
    """`function` compiled for these arguments; right, and slow to run."""
    return jax.jit(function, compiler_options=QUICK, **options).lower(*args).compile()


def on_each(
    function: Callable, mesh: Mesh, *args: Any, in_specs: Any = P("x"), out_specs: Any = P("x"),
    check: bool = True,
) -> jax.stages.Compiled:  # fmt: skip
    """`function` of one device's blocks, compiled for all devices of the mesh."""
    specs = dict(in_specs=in_specs, out_specs=out_specs, check_vma=check)
    return compiled(jax.shard_map(function, mesh=mesh, **specs), *args)


def require_equal(found: Any, expected: Any, where: str = "") -> None:
    """Raise `Wrong` where arrays differ at all, or in shape."""
    found, expected = np.asarray(found), np.asarray(expected)
    require_shape(found, expected, where)
    wrong = np.flatnonzero((found != expected).ravel())
    if wrong.size:
        at = tuple(int(i) for i in np.unravel_index(wrong[0], expected.shape))
        raise Wrong(
            f"{wrong.size:,} of {expected.size:,} numbers are wrong{where}; the first, at {at}, is "
            f"{found[at]:g} and should be {expected[at]:g}."
        )


def require_close(found: Any, expected: Any, what: str, tolerance: float = 1e-4) -> None:
    """Raise `Wrong` where arrays of a tree differ by `tolerance` of their largest entry."""
    if jax.tree.structure(found) != jax.tree.structure(expected):
        raise Wrong(f"{what} is to be a tree like {jax.tree.structure(expected)}.")
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        require_shape(ours, theirs, f" in {what}")
        off = np.abs(ours - theirs).max() / np.abs(theirs).max()
        if not off <= tolerance:
            ratio = np.vdot(ours, theirs) / np.vdot(theirs, theirs)
            raise Wrong(f"{what} is {ratio:.3g} times what it should be, off by up to {off:.0%}.")


def require_shape(found: np.ndarray, expected: np.ndarray, where: str) -> None:
    """Raise `Wrong` where two arrays have different shapes."""
    if found.shape != expected.shape:
        raise Wrong(
            f"the shape is {found.shape} over all devices{where}, expected {expected.shape}."
        )


def require_at_most(number: float, enough: float, what: str) -> None:
    """Raise `Wrong` where `number` is more than `enough`; the values are right by then."""
    if number > enough:
        raise Wrong(f"right values, {number:,.0f} {what}; {enough:,.0f} are enough.")


in_one = functools.partial(jax.jit, compiler_options=QUICK)
