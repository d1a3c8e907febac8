"""jax.jit that takes rules wherever it takes shardings."""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

from shardwise import marks, tree
from shardwise import mesh as meshes
from shardwise.rules.placement import MESH, constrain_tree, shardings


def jit(
    fn: Callable,
    mesh: Mesh,
    in_rules: Any = None,
    out_rules: Any = None,
    names: Mapping[str, Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
) -> Callable:
    """`jax.jit(fn)` over `mesh`, with rules in the place of shardings.

    Rules need shapes: they are resolved at the first call, or `.lower`, with arguments of a new
    structure, shape or dtype; for each of these `fn` runs in Python once. Arguments may be given by
    keyword; bind one that is no array by `functools.partial`.

    `in_rules` is one rule for every argument, or a tuple with an entry for each: a rule, a
    PartitionSpec, a sharding, None, or a tree of these that is a prefix of the argument.
    `out_rules` is the same for the result. An argument committed to another layout than `in_rules`
    gives it is an error, as with `jax.jit`; `rules.constrain_tree` within `fn` moves arrays to
    another. `names` gives `marks.constrain(x, name)` a meaning within `fn`: {name: rule or spec}.
    An `fn` that is jitted already is traced again; what it donates has to be said here, by
    `donate_argnums`, which are those of `jax.jit`.

    Where parameters are cut along two mesh axes, as by FSDP over tensor parallelism, pin
    activations, by `names` or by constraints of the model's own. If they are left free, the
    compiler moves them between layouts, and devices hold and send several times as much.

    On a mesh of Explicit axes, JAX's own default, `fn` is traced with Auto ones: arguments keep
    their shardings, and results have Explicit types again. Where this is called while another
    function is traced, results that `out_rules` does not lay out are replicated.

    Raises, when called:
      ValueError: what the rules raise, a tuple of the wrong length, a name that `fn` never marks,
        an argument that is laid out otherwise (named by its path).
    """
    auto = meshes.auto(mesh)

    def specs(out):
        rule = PartitionSpec() if out_rules is None else out_rules
        return jax.tree.map(lambda to: to.spec, shardings(rule, out, auto))

    run = _Jit(fn, auto, in_rules, out_rules, names or {}, donate_argnums)
    return meshes.for_caller(run, mesh, specs)


class _Jit:
    """The jitted function, a program for each kind of call; lowered, with arguments by position."""

    def __init__(self, fn, mesh, in_rules, out_rules, names, donate_argnums):
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._mesh, self._names = fn, mesh, names
        self._name = getattr(fn, "__name__", repr(fn))  # a functools.partial has none
        self._in_rules, self._out_rules = in_rules, out_rules
        self._signature = inspect.signature(fn)
        self._places = {name: i for i, name in enumerate(self._signature.parameters)}
        numbers = (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums
        self._donated = {n % len(self._places) if n < 0 else n for n in numbers}
        self._programs, self._lock = {}, threading.RLock()

    def _used(self, way, /, *args, **kwargs):
        bound = self._signature.bind(*args, **kwargs)
        names, given = tuple(bound.kwargs), (*bound.args, *bound.kwargs.values())
        leaves, structure = jax.tree.flatten(given)
        key = names, structure, tuple(map(_kind, leaves))
        with self._lock:
            if key not in self._programs:
                self._programs[key] = self._build(names, given)
        program, wanted = self._programs[key]
        try:
            return getattr(program, way)(*given)
        except ValueError as error:
            raise _explained(error, wanted, given) from error

    __call__ = functools.partialmethod(_used, "__call__")
    lower = functools.partialmethod(_used, "lower")
    trace = functools.partialmethod(_used, "trace")

    def _build(self, names, given):
        """Trace once, resolve the rules by what was seen, and jit what was traced."""
        count, last = len(given) - len(names), len(self._places) - 1
        # The place of each argument among the function's parameters, of which **more is the last.
        at = [*range(count), *(self._places.get(name, last) for name in names)]
        wanted = shardings(self._entries(at), given, self._mesh)
        call = functools.partial(self._marked, names)
        closed, out = jax.make_jaxpr(call, return_shape=True)(*given)
        run, structure = jaxpr_as_fun(closed), jax.tree.structure(out)

        def program(*args):
            return jax.tree.unflatten(structure, run(*jax.tree.leaves(args)))

        program.__name__ = getattr(self._fn, "__name__", "program")  # as profiles show it
        donated = tuple(i for i, place in enumerate(at) if place in self._donated)
        to = shardings(self._out_rules, out, self._mesh)
        jitted = jax.jit(program, in_shardings=wanted, out_shardings=to, donate_argnums=donated)
        return jitted, wanted

    def _marked(self, names, *args):
        """The function's result, its named activations pinned; the last arguments have `names`."""
        met, count = set(), len(args) - len(names)

        def pinned(x, name):
            met.add(name)
            return constrain_tree({name: x}, self._names.get(name))[name]

        bound = dict(constrain=pinned) if self._names else {}
        with MESH(self._mesh), marks.bind(**bound):
            out = self._fn(*args[:count], **dict(zip(names, args[count:], strict=True)))
        if unused := set(self._names) - met:
            raise ValueError(
                f"rules.jit: names has {min(unused)!r}, which {self._name} never marks; it marks "
                f"{sorted(met)}. (Marks are not seen in what was traced before, as a jaxpr or an "
                f"exported program.)"
            )
        return out

    def _entries(self, at):
        """The entries of `in_rules` for the arguments at these places, a tuple."""
        given, most = self._in_rules, max([len(self._places), *(place + 1 for place in at)])
        if not isinstance(given, tuple) or hasattr(given, "_fields"):
            return (given,) * len(at)
        if not max(at, default=-1) < len(given) <= most:
            raise ValueError(
                f"rules.jit: in_rules has {len(given)} entries, and {self._name} takes {most} "
                f"arguments; expected one entry for each."
            )
        return tuple(given[place] for place in at)


def _explained(error, wanted, given):
    """The error with the path of the argument that lies elsewhere, if that is the reason."""
    targets = jax.tree.structure(given).flatten_up_to(wanted)  # None: not said
    for (path, array), target in zip(tree.leaves(given), targets, strict=True):
        lies = getattr(array, "sharding", None)
        if target is None or lies is None or not getattr(array, "committed", False):
            continue
        if not lies.is_equivalent_to(target, array.ndim):
            return ValueError(
                f"rules.jit: argument {path} lies as {lies}, and in_rules expects {target}; place "
                f"it first, with rules.place(tree, rule, mesh), or constrain it within the "
                f"function, by rules.constrain_tree."
            )
    return error


def _kind(leaf):
    """(shape, dtype, weak type) of an argument: what a program depends on."""
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, aval.weak_type
