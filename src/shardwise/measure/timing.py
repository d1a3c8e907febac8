"""The time that a step takes."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np


class StepTime(NamedTuple):
    """The seconds of a call: their median, the spread between their quartiles, and the device."""

    median_s: float
    spread_s: float
    device_kind: str


def step_time(fn: Callable, *args: Any, repeats: int = 10, carry: int = 0) -> StepTime:
    """The `StepTime` of `fn(*args)`, of `repeats` calls, each waited for, after one that compiles.

    `carry=k` gives the first k results of each call to the next as its first k arguments: a step
    that donates its state needs that, and consumes the state that it was given.

    Raises:
      ValueError: `fn` donates what the next call needs, or returns fewer than `carry` results;
        `repeats` is below 1, or `carry` is not between 0 and the number of arguments.
    """
    if repeats < 1 or not 0 <= carry <= len(args):
        raise ValueError(
            f"measure.step_time: repeats={repeats}, carry={carry}: expected at least 1, and 0 to "
            f"{len(args)} (the number of arguments)."
        )
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        out = jax.block_until_ready(fn(*args))
        seconds.append(time.perf_counter() - start)
        results = out if isinstance(out, tuple | list) else (out,)
        if len(results) < carry:
            raise ValueError(
                f"measure.step_time: carry={carry}, but the function returned {len(results)} "
                f"result(s); expected at least {carry}, the next call's first arguments."
            )
        args = (*results[:carry], *args[carry:])
        if gone := [i for i, arg in enumerate(args) if any(map(_is_gone, jax.tree.leaves(arg)))]:
            raise ValueError(
                f"measure.step_time calls the function again with the same arguments, but argument "
                f"{', '.join(map(str, gone))} was donated and is gone. If the first results are "
                f"the next call's first arguments, pass carry={gone[-1] + 1}; or do not donate."
            )
    low, median, high = np.percentile(seconds[1:], [25, 50, 75])
    arrays = [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)]
    kind = next(iter(arrays[0].devices())).device_kind if arrays else "host"
    return StepTime(float(median), float(high - low), kind)


def _is_gone(x):
    return isinstance(x, jax.Array) and x.is_deleted()
