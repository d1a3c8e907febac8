"""Functions that look at their arguments before they run, and else are what they were."""

import functools
from collections.abc import Callable

import jax


class Around:
    """`call(run, ...)` in the place of `run(...)`; all else, such as `lower`, is the function's."""

    def __init__(self, run: Callable, call: Callable):
        self._run, self._call = run, call
        functools.update_wrapper(self, run, updated=())

    def __call__(self, *args, **options):
        return self._call(self._run, *args, **options)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._run, name)


def looked_at(
    run: Callable, look: Callable, kind: Callable, of: Callable = lambda *args, **options: args
) -> Callable:
    """`run`, before which `look` sees the arguments, once for each kind of what `of` takes of them.

    Kinds are told by structure and by `kind(x)` of each array. Within a trace of the caller's
    nothing is looked at.
    """
    known = set()

    def call(run, *args, **options):
        leaves, structure = jax.tree.flatten((of(*args, **options), options))
        if not any(isinstance(x, jax.core.Tracer) for x in leaves):
            told = structure, *map(kind, leaves)
            if told not in known:
                look(*args, **options)
                known.add(told)
        return run(*args, **options)

    return Around(run, call)
