"""Whether rows look at each other in a loss, found in its traces for two numbers of rows.

What is certain is an error: rows compared with rows, sorted or chosen among, and sums over rows
that go on otherwise than linearly, as batch statistics do. What these traces cannot tell is left
alone: rows that the batch's own numbers point to, loops that end by what they compute, kernels,
traces of which the steps do not correspond, and a sum over rows by a collective of the loss's own.
"""

import dataclasses
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr

from shardwise.objective import following, row_axes
from shardwise.objective.row_values import ROW, SUM, Value, after
from shardwise.objective.side_by_side import Pair, carries, grown

CALLS = following.CALLS - {"shard_map"}
CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
ACROSS = {"psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_to_all"}
ACROSS |= {"all_gather", "all_gather_invariant", "all_gather_reduced", "reduce_scatter"}


def check(closed: ClosedJaxpr, again: ClosedJaxpr, of_batch: list[bool], outputs: int) -> None:
    """Raise ValueError where rows look at each other in the first `outputs` of a loss.

    `closed` and `again` are its traces for one number of rows and for twice that; `of_batch` says
    of each input whether its first axis is the batch's rows.
    """
    given = [
        Value(frozenset({0}) if rows and v.aval.shape else frozenset())
        for v, rows in zip(closed.jaxpr.invars, of_batch, strict=True)
    ]
    try:
        found = Rows().run(closed.jaxpr, again.jaxpr, given)
    except Unlike:
        return
    for value in found[:outputs]:
        if value.mixed:
            raise ValueError(
                f"rows of the batch look at each other in the loss: {value.mixed}. Each part of "
                f"the batch, in a microbatch or on a device, has its own rows alone, and this "
                f"would be another function of them. Take sums by marks.total, which adds up "
                f"those of all devices, without a gradient; or lay the batch out by the compiler "
                f"(by='compiler', rules.jit) and without microbatches, which is exact for every "
                f"loss. Where a part's own rows are meant, or make no difference, say so of the "
                f"result: marks.local(x)."
            )


def check_draws(draws: list, more: list) -> None:
    """Raise TypeError for numbers drawn for rows from a key that is the same in every part.

    `draws` are those of a `Program`, `more` those of the same for twice as many rows.
    """
    for (labels, shape), (_, longer) in zip(draws, more, strict=False):
        if shape != longer and not labels & {"key", "batch", "rows"}:
            raise TypeError(
                f"the loss draws random numbers of shape {shape}, in which there are rows, from a "
                f"key of its own, such as one it closes over or has among its parameters: each "
                f"part of the batch would draw the same for its rows. Hand the key over by key=."
            )


class Unlike(Exception):
    """The two programs are not one program for two numbers of rows."""


class Rows(Pair):
    """Both programs, with a `Value` for each of theirs."""

    nothing = Value()

    def __init__(self):
        self.path = ()  # the calls that lead to a step: several may share one program

    def differ(self, what):
        raise Unlike

    def through(self, a, b, given):
        name = a.primitive.name
        try:
            if name == "scan":
                return self._scan(a, b, given)
            if name == "while":
                return self._while(a, b, given)
            if name == "cond":
                return self._cond(a, b, given)
            if name in CALLS:
                return self._call(a, b, given)
        except Unlike:
            return [Value()] * len(a.outvars)
        over_places = name in row_axes.COLLECTIVE and row_axes.over_places(a)
        if following.is_local(name, a.params) or (name in ACROSS and not over_places):
            return [Value()] * len(a.outvars)
        return self._step(a, b, given, over_places)

    def _step(self, a, b, given, each):
        """The values of its outputs; where it does the same to `each` input, of its own alone."""
        found, before = [], self.union(given).mixed
        number = hash((*map(id, self.path), id(a)))
        for i, (v, w) in enumerate(zip(a.outvars, b.outvars, strict=True)):
            value = after(a, given[i : i + 1] if each else given, grown(v, w), i, number)
            mixed = before or (value.mixed and value.mixed + _place(*self.path, a))
            found.append(dataclasses.replace(value, mixed=mixed))
        return found

    def _call(self, a, b, given):
        before, self.path = self.path, (*self.path, a)
        try:
            return self.called(self.within(a, b), given, len(a.outvars))
        finally:
            self.path = before

    def _cond(self, a, b, given):
        branches = a.params["branches"], b.params["branches"]
        if len(branches[0]) != len(branches[1]):
            raise Unlike
        inner = [(p.jaxpr, q.jaxpr) for p, q in zip(*branches, strict=True)]
        out = self.called(inner, given[1:], len(a.outvars))
        return [v | Value(mixed=given[0].mixed) for v in out]

    def _while(self, a, b, given):
        first, second = a.params["cond_nconsts"], a.params["body_nconsts"]
        inner = a.params["body_jaxpr"].jaxpr, b.params["body_jaxpr"].jaxpr
        return self.looped(inner, given[first:], slice(second, None))

    def _scan(self, a, b, given):
        """A loop over rows hands each of them to its program, and sums from one to the next."""
        inner = self.within(a, b)[0]
        kept = carries(a, inner[0])
        given = [*given[: kept.stop], *map(_one, given[kept.stop :])]
        over_rows = a.params["length"] != b.params["length"]
        out = self.looped(inner, given, kept)
        if over_rows:
            for i, (v, w) in enumerate(zip(a.outvars, b.outvars, strict=True)):
                at = kept.start + i
                if at < kept.stop and grown(v, w) == [] and out[i].of_rows:
                    given[at] |= Value(flags=frozenset({SUM}))
            out = self.looped(inner, given, kept)
        count = kept.stop - kept.start
        return [_all(v, over_rows, i >= count) for i, v in enumerate(out)]


def _one(v: Value) -> Value:
    """What a loop hands to its program of a value that it goes over."""
    rows = frozenset({ROW}) if 0 in v.axes else frozenset()
    return dataclasses.replace(v, axes=frozenset(k - 1 for k in v.axes if k), flags=v.flags | rows)


def _all(v: Value, over_rows: bool, stacked: bool) -> Value:
    """What comes out of a loop, of which its program makes this each time."""
    rows = over_rows and v.has(ROW)
    axes = frozenset(k + 1 for k in v.axes) if stacked else v.axes
    axes |= {0} if rows and stacked else frozenset()
    return dataclasses.replace(v, axes=axes, flags=v.flags - {ROW} if rows else v.flags)


def _place(*eqns: Any) -> str:
    """Where the loss says so, file, line and function: the last that is known."""
    for eqn in reversed(eqns):
        told = source_info_util.summarize(eqn.source_info).rpartition("/")[2]
        if ":" in told:
            return f" ({told})"
    return ""
