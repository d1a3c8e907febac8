"""Two traces of a loss, for one and for two lengths of a sequence, followed side by side."""

from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from shardwise.objective.following import programs, scan_carries

TOTAL = "shardwise total"
PARTIAL, COUNTED = "partial", "counted"  # a sum over the part's tokens; numbers along the sequence
ALONG = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "argmax", "argmin"}
ALONG |= {"top_k", "conv_general_dilated", "fft", "reduce_window_sum", "reduce_window"}
LINEAR = {"neg", "convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "reduce_sum"}
LINEAR |= {
    "stop_gradient",
    "copy",
    "transpose",
    "concatenate",
    "name",
    "expand_dims",
    "slice",
    "select_n",
    "stack",
}
COMPARING = {"lt", "le", "gt", "ge", "eq", "ne"}
Flags = frozenset
NONE: Flags = frozenset()


def refuse(what: str) -> None:
    """Raise: the loss is another function of a part of the sequence than of the whole."""
    raise ValueError(
        f"the sequence is cut by hand, and in the loss {what}. Tokens may see each other in "
        f"marks.attend alone, and number themselves by marks.places or marks.index('sequence', "
        f"size); shift targets when the batch is made. Or lay the sequence out by the compiler "
        f"(by='compiler'), which is exact for every loss."
    )


class Pair:
    """Both programs, followed side by side."""

    def run(self, one: Any, two: Any, given: list[Flags]) -> list[Flags]:
        """The flags of the outputs, from those of the inputs."""
        if len(one.eqns) != len(two.eqns):
            refuse("is another program for a longer sequence, such as a loop over its tokens")
        env = dict(zip(one.invars, given, strict=True))
        for a, b in zip(one.eqns, two.eqns, strict=True):
            if a.primitive is not b.primitive:
                refuse("is another program for a longer sequence")
            flags = [NONE if isinstance(v, Literal) else env.get(v, NONE) for v in a.invars]
            env.update(zip(a.outvars, self._through(a, b, flags), strict=True))
        return [NONE if isinstance(v, Literal) else env.get(v, NONE) for v in one.outvars]

    def _through(self, a, b, flags):
        name = a.primitive.name
        inner = list(zip(programs(a.params), programs(b.params), strict=True))
        if name == "name" and TOTAL in str(a.params.get("name", "")):
            return [NONE]
        if name == "scan":
            return self._scan(a, b, inner[0], flags)
        if inner:
            return self._called(inner, flags, len(a.outvars))
        grown = [_grown(v, w) for v, w in zip(a.outvars, b.outvars, strict=True)]
        sources = [_grown(v, w) for v, w in zip(a.invars, b.invars, strict=True)]
        self._check_shapes(name, grown)
        if any(map(_differ, a.invars, b.invars)):
            refuse("a number is the length of a part, as that by which jnp.mean divides")
        if name in ALONG and any(sources):
            self._check_along(a, sources[0])
        if name == "iota":
            return [Flags({COUNTED}) if grown[0] == [a.params["dimension"]] else NONE]
        if any(sources) and not any(grown):
            if name not in ("reduce_sum", "dot_general"):
                refuse(f"{_NAMES.get(name, name)} takes one number of a sequence")
            return [Flags({PARTIAL})] * len(a.outvars)
        self._check_counted(a, flags, sources)
        return [self._flags(a, flags, axes) for axes in grown]

    def _check_shapes(self, name, grown):
        for axes in grown:
            if axes is None:
                refuse(f"{_NAMES.get(name, name)} takes a part of the sequence, or adds to it")
            if len(axes) > 1:
                refuse(f"{_NAMES.get(name, name)} compares tokens with tokens")

    def _check_along(self, eqn, axes):
        params, name = eqn.params, eqn.primitive.name
        found = next(
            (params[k] for k in ("axis", "dimension", "dimensions", "axes") if k in params), None
        )
        found = (eqn.invars[0].aval.ndim - 1,) if found is None else found
        if {*axes} & {*(found if isinstance(found, tuple | list) else (found,))}:
            refuse(f"{name} goes along the sequence")

    def _check_counted(self, eqn, flags, sources):
        """Numbers along a part's own tokens are not those along the sequence."""
        name = eqn.primitive.name
        counted = [COUNTED in f for f in flags]
        if not any(counted):
            return
        floats = name == "convert_element_type" and jnp.issubdtype(
            eqn.params["new_dtype"], jnp.inexact
        )
        looked_up = name == "gather" and counted[-1] and not sources[0]
        others = [v for v, c in zip(eqn.invars, counted, strict=True) if not c]
        compared = name in COMPARING and not all(isinstance(v, Literal) for v in others)
        if floats or looked_up or compared:
            refuse("tokens are numbered by jnp.arange, which begins at 0 in each part")

    def _flags(self, eqn, flags, grown):
        name, union = eqn.primitive.name, NONE.union(*flags)
        kept = union & {COUNTED} if name not in COMPARING | {"gather"} else NONE
        if PARTIAL not in union:
            return kept
        partial = [PARTIAL in f for f in flags]
        if grown:
            refuse("a sum over tokens goes back to the tokens")
        whole = all(partial) or not _matters(eqn, partial)
        linear = name in LINEAR or (name in ("add", "sub", "add_any") and whole)
        linear |= name == "mul" and sum(partial) == 1
        linear |= name == "div" and partial == [True, False]
        if not linear:
            refuse(f"{_NAMES.get(name, name)} of a sum over tokens is no sum over tokens")
        return kept | {PARTIAL}

    def _scan(self, a, b, inner, flags):
        if a.params["length"] != b.params["length"]:
            refuse("a loop goes over the sequence")
        carries, flags = scan_carries(a.invars, a.outvars, inner[0]), list(flags)
        while True:
            out = self.run(*inner, flags)
            merged = [x | y for x, y in zip(flags[carries], out, strict=False)]
            if merged == flags[carries]:
                return out
            flags[carries] = merged

    def _called(self, inner, flags, count):
        found = [NONE] * count
        for one, two in inner:
            given = flags[len(flags) - len(one.invars) :] if len(one.invars) <= len(flags) else None
            given = [NONE.union(*flags)] * len(one.invars) if given is None else given
            out = self.run(one, two, given)
            if len(out) == count:
                found = [x | y for x, y in zip(found, out, strict=True)]
        return found


_NAMES = {"dynamic_slice": "a slice", "slice": "a slice", "pad": "padding"}
_NAMES |= {"concatenate": "a concatenation", "dot_general": "a product"}


def _differ(v, w):
    """Whether two floating-point numbers, that stand in the programs, are not the same."""
    if not (isinstance(v, Literal) and isinstance(w, Literal)) or jnp.ndim(v.val):
        return False
    return jnp.issubdtype(jnp.result_type(v.val), jnp.inexact) and v.val != w.val


def _matters(eqn, partial):
    """Whether what is added to a sum over tokens is anything but 0."""
    others = [v for v, p in zip(eqn.invars, partial, strict=True) if not p]
    return any(not (isinstance(v, Literal) and v.val == 0) for v in others)


def _grown(v, w):
    """The axes that are twice as long in the second program; None if one is longer otherwise."""
    one, two = (getattr(x.aval, "shape", ()) for x in (v, w))
    if len(one) != len(two):
        return None
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    return None if any(b != 2 * a for _, a, b in pairs) else [i for i, _, _ in pairs]
