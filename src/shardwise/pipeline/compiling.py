"""The programs of one stage, each a `jax.jit` for the devices of that stage."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut
from shardwise.objective import wide
from shardwise.pipeline.forms import Form


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs that one stage runs; `kinds` has the jitted functions of F, B, I and W.

    - F `(params, data, carry) -> outputs, kept, done`;
    - B `(params, data, kept, cotangents, sums) -> cotangents of carry, sums, done`;
    - I `(params, data, kept, cotangents) -> cotangents of carry, pending, done`;
    - W `(params, data, kept, pending, sums) -> sums, done`.

    The gradients are added to `sums`, which come in donated. `done` is a number that is there when
    the program has run: nothing else that it yields is sure to live until somebody waits for it.
    `gather` gathers the parameters of the form's `gathered`, once a step; `finish` takes sums
    (donated, where they can be the gradients) and the count, and returns the gradients.
    """

    form: Form
    kinds: dict[str, Callable]
    zeros: Callable
    gather: Callable
    finish: "Finish"

    @property
    def stage(self) -> cut.Stage:
        return self.form.stage

    @property
    def mesh(self) -> Mesh:
        return self.form.mesh

    @property
    def laid(self) -> dict[str, list[NamedSharding]]:
        return self.form.laid

    def parameters(self, stored: list[jax.Array]) -> list[jax.Array]:
        """The parameters as tasks take them: those of the form's `gathered` are gathered."""
        gathered = self.form.gathered
        if not gathered:
            return stored
        whole = dict(zip(gathered, self.gather(self.cut_up(stored)), strict=True))
        return [whole.get(i, x) for i, x in enumerate(stored)]

    def cut_up(self, stored: list[jax.Array]) -> list[jax.Array]:
        """The parameters that `gather` takes."""
        return [stored[i] for i in self.form.gathered]


def compile_stage(form: Form) -> Programs:
    """The `Programs` of a stage."""
    laid, halves = form.laid, form.halves
    here = NamedSharding(form.mesh, P())
    summed = [x.sharding for x in form.sums]
    kinds = {
        "F": jax.jit(_forward(halves), out_shardings=(laid["outputs"], None, here)),
        "B": jax.jit(_whole(halves), out_shardings=(laid["back"], summed, here), donate_argnums=4),
        "I": jax.jit(_to_input(halves), out_shardings=(laid["back"], None, here)),
        "W": jax.jit(_to_weights(halves), out_shardings=(summed, here), donate_argnums=4),
    }
    zeros = lambda: [jnp.zeros(x.shape, x.dtype) for x in form.sums]  # noqa: E731
    held = [form.held[i].sharding for i in form.gathered]
    return Programs(
        form=form,
        kinds=kinds,
        zeros=jax.jit(zeros, out_shardings=summed),
        gather=jax.jit(form.gather, out_shardings=held),
        finish=Finish(form),
    )


def _forward(halves):
    return lambda *given: (*halves.forward(*given), _done())


def _whole(halves):
    def whole(params, data, kept, cots, sums):
        back, grads = halves.whole(params, data, kept, cots)
        return back, _add(sums, grads), _done()

    return whole


def _to_input(halves):
    return lambda *given: (*halves.to_input(*given), _done())


def _to_weights(halves):
    def to_weights(params, data, kept, pending, sums):
        return _add(sums, halves.to_weights(params, data, kept, pending)), _done()

    return to_weights


def _done():
    return jnp.zeros((), jnp.int32)


def _add(sums, grads):
    return [total + g.astype(total.dtype) for total, g in zip(sums, grads, strict=True)]


class Finish:
    """The program that makes gradients of sums, 0 where nothing counts; it donates what it can."""

    def __init__(self, form: Form):
        self.form = form
        self.same = [
            wide(x.dtype) == x.dtype and (s.shape, s.sharding) == (x.shape, own)
            for x, s, own in zip(form.stage.params, form.sums, form.own, strict=True)
        ]
        self.jitted = jax.jit(self._gradients, out_shardings=form.own, donate_argnums=0)

    def __call__(self, sums: list[jax.Array], count: jax.Array) -> list[jax.Array]:
        return self.jitted(*self.arguments(sums, count))

    def arguments(self, sums: list, count: Any) -> tuple[list, list, Any]:
        """The arguments of `jitted`: the sums that it may use up, the other sums, the count."""
        pairs = list(zip(sums, self.same, strict=True))
        return [x for x, donated in pairs if donated], [x for x, d in pairs if not d], count

    def _gradients(self, kept, others, count):
        kept, others = iter(kept), iter(others)
        totals = self.form.total([next(kept) if d else next(others) for d in self.same])
        pairs = zip(self.form.stage.params, totals, strict=True)
        return [jnp.where(count == 0, 0, g).astype(x.dtype) for x, g in pairs]
