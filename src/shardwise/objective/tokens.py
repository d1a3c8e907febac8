"""What lets tokens see each other, in two traces of a loss: where a sequence is cut by hand."""

import jax.numpy as jnp
from jax.extend.core import Literal

from shardwise.objective.side_by_side import Pair, carries, grown

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


class Tokens(Pair):
    """Both programs, with `Flags` of each value; what lets tokens see each other is an error."""

    nothing = NONE

    def differ(self, what):
        refuse(what.format("sequence"))

    def through(self, a, b, flags):
        name = a.primitive.name
        inner = self.within(a, b)
        if name == "name" and TOTAL in str(a.params.get("name", "")):
            return [NONE]
        if name == "scan":
            return self._scan(a, b, inner[0], flags)
        if inner:
            return self.called(inner, flags, len(a.outvars))
        axes = [grown(v, w) for v, w in zip(a.outvars, b.outvars, strict=True)]
        sources = [grown(v, w) for v, w in zip(a.invars, b.invars, strict=True)]
        self._check_shapes(name, axes)
        if any(map(_differ, a.invars, b.invars)):
            refuse("a number is the length of a part, as that by which jnp.mean divides")
        if name in ALONG and any(sources):
            self._check_along(a, sources[0])
        if name == "iota":
            return [Flags({COUNTED}) if axes[0] == [a.params["dimension"]] else NONE]
        if any(sources) and not any(axes):
            if name not in ("reduce_sum", "dot_general"):
                refuse(f"{_NAMES.get(name, name)} takes one number of a sequence")
            return [Flags({PARTIAL})] * len(a.outvars)
        self._check_counted(a, flags, sources)
        return [self._flags(a, flags, one) for one in axes]

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
        return self.looped(inner, flags, carries(a, inner[0]))


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
