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
from shardwise.rules.placement import constrain_tree, mesh_for_constraints, shardings


def jit(
    fn: Callable,
    mesh: Mesh,
    in_rules: Any = None,
    out_rules: Any = None,
    arg_constraints: Any = None,
    names: Mapping[str, Any] | None = None,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Callable:
    """`jax.jit(fn)` over `mesh`, with rules in the place of shardings.

    Rules need shapes: they are resolved at the first call, or `.lower`, with arguments of a new
    structure, shape or dtype, or other static arguments; for each of these `fn` runs in Python
    once. Arguments may be given by keyword.

    `in_rules` and `arg_constraints` are one rule for every argument, or a tuple with an entry for
    each argument that is not static: a rule, a PartitionSpec, a sharding, None, or a tree of
    these that is a prefix of the argument. `out_rules` is the same for the result. An argument
    committed to another layout than `in_rules` gives it is an error, as with `jax.jit`;
    `arg_constraints` are applied inside the program, which then moves what lies elsewhere.
    `names` gives `marks.constrain(x, name)` a meaning within `fn`: {name: rule or spec}.

    An `fn` that is jitted already is traced again, and its marks are seen; what it donates and
    which of its arguments are static has to be said here.

    Parameters that are cut along two mesh axes, as by FSDP over tensor parallelism, want their
    activations pinned, by `names` or by constraints of the model's own: left free, the compiler
    moves them between layouts, holds and sends several times as much.

    On a mesh of Explicit axes, JAX's own default, `fn` sees Auto ones: arguments are taken as they
    lie, and results have the caller's types. Within a trace of the caller's, results that
    `out_rules` does not lay out are whole.

    Raises:
      ValueError: at that first call, what the rules raise, a tuple of the wrong length, a name that
        `fn` never marks, an argument that lies elsewhere (named by its path).
    """
    given, auto = dict(in_rules=in_rules, arg_constraints=arg_constraints), meshes.auto(mesh)
    run = _Jit(fn, auto, given, out_rules, names or {}, static_argnums, donate_argnums)

    def specs(out):
        rule = PartitionSpec() if out_rules is None else out_rules
        return jax.tree.map(lambda to: to.spec, shardings(rule, out, auto))

    return run if auto is mesh else meshes.OnAuto(run, mesh, specs)


class _Jit:
    """The jitted function; one program for each kind of call."""

    def __init__(self, fn, mesh, given, out_rules, names, static_argnums, donate_argnums):
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._mesh, self._names = fn, mesh, names
        self._name = getattr(fn, "__name__", repr(fn))  # a functools.partial has none
        self._given, self._out_rules = given, out_rules
        self._signature = inspect.signature(fn)
        self._parameters = self._signature.parameters
        self._static = self._positions(static_argnums)
        self._donated = self._positions(donate_argnums)
        self._programs, self._lock = {}, threading.RLock()

    def __call__(self, *args, **kwargs):
        return self._used("__call__", args, kwargs)

    def lower(self, *args, **kwargs):
        """The lowered program, as `jax.jit(fn).lower`; compiled, it takes arguments by position."""
        return self._used("lower", args, kwargs)

    def trace(self, *args, **kwargs):
        """The traced program, as `jax.jit(fn).trace`: to lower for a platform that is not here."""
        return self._used("trace", args, kwargs)

    def _used(self, way, args, kwargs):
        program, wanted, dynamic = self._program(args, kwargs)
        try:
            return getattr(program, way)(*dynamic)
        except ValueError as error:
            raise self._explained(error, wanted, dynamic) from error

    def _program(self, args, kwargs):
        bound = self._signature.bind(*args, **kwargs)
        order = list(self._parameters)
        slots = [*range(len(bound.args)), *(_index(order, name) for name in bound.kwargs)]
        values = [*bound.args, *bound.kwargs.values()]
        fixed = {i: v for i, v in enumerate(values) if slots[i] in self._static}
        free = [i for i in range(len(values)) if i not in fixed]
        dynamic = tuple(values[i] for i in free)

        def call(*dynamic):
            rest, count = iter(dynamic), len(bound.args)
            full = [fixed[i] if i in fixed else next(rest) for i in range(len(values))]
            return self._fn(*full[:count], **dict(zip(bound.kwargs, full[count:], strict=True)))

        leaves, structure = jax.tree.flatten(dynamic)
        static = tuple((i, type(v), v) for i, v in fixed.items())  # 1, 1.0 and True are equal
        key = static, tuple(bound.kwargs), structure, tuple(map(_kind, leaves))
        with self._lock:
            if key not in self._programs:
                at = [slots[i] for i in free]
                self._programs[key] = self._build(call, at, dynamic)
        return *self._programs[key], dynamic

    def _build(self, call, at, dynamic):
        """Trace once, resolve the rules by what was seen, and jit what was traced."""
        wanted = self._entries("in_rules", at)
        wanted = None if wanted is None else shardings(wanted, dynamic, self._mesh)
        closed, out = jax.make_jaxpr(self._marked(call, at), return_shape=True)(*dynamic)
        run, structure = jaxpr_as_fun(closed), jax.tree.structure(out)

        def program(*args):
            return jax.tree.unflatten(structure, run(*jax.tree.leaves(args)))

        program.__name__ = getattr(self._fn, "__name__", "program")  # as profiles show it
        options = {} if wanted is None else dict(in_shardings=wanted)
        if self._out_rules is not None:
            options["out_shardings"] = shardings(self._out_rules, out, self._mesh)
        donated = tuple(i for i, slot in enumerate(at) if slot in self._donated)
        return jax.jit(program, donate_argnums=donated, **options), wanted

    def _marked(self, call, at):
        """`call` with its arguments constrained and its named activations bound."""
        constraints, seen = self._entries("arg_constraints", at), set()

        def constrain(x, name):
            seen.add(name)
            rule = self._names.get(name)
            return x if rule is None else constrain_tree({name: x}, rule)[name]

        def marked(*args):
            bound = dict(constrain=constrain) if self._names else {}
            with mesh_for_constraints(self._mesh), marks.bind(**bound):
                if constraints is not None:
                    args = constrain_tree(args, constraints, self._mesh)
                out = call(*args)
            if unused := set(self._names) - seen:
                raise ValueError(
                    f"rules.jit: names has {min(unused)!r}, which {self._name} never marks; it "
                    f"marks {sorted(seen)}. (A jaxpr or an exported program hides its marks.)"
                )
            return out

        return marked

    def _entries(self, which, at):
        """The entries of option `which` for the arguments at these positions: a tuple, or None."""
        given = self._given[which]
        if given is None:
            return None
        if not isinstance(given, tuple) or hasattr(given, "_fields"):
            return (given,) * len(at)
        most = max([*at, len(self._parameters) - 1])
        dynamic = [i for i in range(most + 1) if i not in self._static]
        position = {slot: dynamic.index(slot) for slot in at}
        if not len(at) <= len(given) <= len(dynamic) or max(position.values()) >= len(given):
            raise ValueError(
                f"rules.jit: {which} has {len(given)} entries, and {self._name} takes "
                f"{len(dynamic)} arguments that are not static; expected one entry for each."
            )
        return tuple(given[position[slot]] for slot in at)

    def _explained(self, error, wanted, dynamic):
        """The error with the path of the argument that lies elsewhere, if that is the reason."""
        if wanted is None:
            return error
        targets = jax.tree.structure(dynamic).flatten_up_to(wanted)  # None: not said
        for (path, array), target in zip(tree.leaves(dynamic), targets, strict=True):
            lies = getattr(array, "sharding", None)
            if target is None or lies is None or not getattr(array, "committed", False):
                continue
            if not lies.is_equivalent_to(target, array.ndim):
                return ValueError(
                    f"rules.jit: argument {path} lies as {lies}, and in_rules expects {target}; "
                    f"place it first, with rules.place(tree, rule, mesh), or use arg_constraints."
                )
        return error

    def _positions(self, numbers):
        numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
        return {n % len(self._parameters) if n < 0 else n for n in numbers}


def _index(order, name):
    return order.index(name) if name in order else len(order)


def _kind(leaf):
    """(shape, dtype, weak type) of an argument: what a program depends on."""
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, aval.weak_type
