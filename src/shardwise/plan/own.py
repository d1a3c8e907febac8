"""Layouts for a model, a loss and an optimizer of your own: rows divided over data and fsdp."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwise import jaxprs, layouts, marks, measure, topology
from shardwise import tree as trees
from shardwise.costs.arrays import Roles
from shardwise.costs.memory import COUNTS, OF_GPUS, Memory
from shardwise.costs.terms import Terms
from shardwise.layouts.meanings import meanings
from shardwise.layouts.placing import abstract, array_layouts
from shardwise.layouts.sent import LayoutLedger
from shardwise.objective.means import normal, quotient
from shardwise.plan import planning, residuals, roles
from shardwise.plan.seconds import step
from shardwise.topology.slices import Chips

SETTINGS = ("min_size", "stacked", "dtype", "reduce_dtype", "remat", "kernel")


def own(
    create: Callable[..., Any],
    loss: Callable[..., Any],
    tx: Any,
    chips: str | Chips,
    batch: Any,
    has_aux: bool = False,
    **settings: Any,
) -> planning.Plan:
    """All layouts of your program over data and fsdp, with microbatches, from a trace of its loss.

    `create(key)`, `loss(params, batch)` and `tx` are those of `layouts.init` and `layouts.step`.
    The loss gets no key: `key=` needs a default. `batch` has all rows of a step; only its shapes
    and dtypes are used. Layouts are by hand, with ZeRO 3; `settings` are further ones of
    `layouts.Layout`: min_size, stacked, dtype, reduce_dtype, remat, kernel. Without remat=, layouts
    are also tried that recompute the layers that a loss marks (`marks.layer`), entirely or all but
    their products. No array of the model is allocated, no step is run. Left out are roles with
    marks (tensor, context, expert, stage) and offloading.

    Parameters, state (of what `tx` freezes there is none), and the bytes that the program asks to
    send (without sums of aux) are exact. What a step needs besides is an estimate, the sum of

    - what JAX keeps from the forward pass to the backward one, with weights that are gathered or
      cast, but without what elementwise operations make of the rest: a compiler computes it again;
    - the largest of three: the gradient of the largest array that is kept; the largest product in a
      loop, with weights that are gathered for it alone; or the gradients of all parameters, and
      what a rematerialised body keeps while it runs again, with the largest gradient there, less
      what is gone after the last such body;
    - with microbatches, the sum of their gradients.

    `benchmarks/plan_own.py` sets it beside what the TPU compiler reserves: 20 % low to 16 % high
    for 18 decoders with the loss in chunks, 13 % low to 131 % high for 32 with logits whole, which
    it counts in float32, and 11 % low to 5 % high for networks of Flax's parts. XLA computes less
    again on GPUs: there it is the least, by which half of a vision transformer's is missing. The
    most, which is asked to fit, is all that JAX keeps, with all of the above and a second array of
    the largest at once: 2 % low to 236 % high for 35 programs. So compile it:
    `shardwise plan --own FILE --chips v5e:4x4 --compile 3` has it judge the best three. In Python,
    `from shardwise.plan import compiling` has a function that judges one candidate of what
    `found = own(...)` returned, `compiling.check(candidate, found)`. `topology.compile` judges a
    layout that is not among these.

    Seconds are a roofline. FLOPs of products are counted in the program of one device, compiled for
    this machine, and taken to grow with the rows; MFU counts three times those of the forward pass,
    or those of both passes where these are fewer.

    Raises:
      ValueError: no such chips; arrays of the batch with unequal numbers of rows; another setting;
        a loss that moves arrays to the host; what `layouts.predict` and `measure.flops` raise.
    """
    chips = topology.chips(chips) if isinstance(chips, str) else chips
    if unknown := sorted(settings.keys() - SETTINGS):
        raise ValueError(f"plan.own: {unknown[0]}= is no setting here; {', '.join(SETTINGS)} are.")
    job = Own(create, loss, tx, abstract(batch), has_aux, settings)
    return planning.Plan(None, chips, job.rows, None, own=job).filled(
        (Roles(data=chips.devices // n, fsdp=n) for n in roles.divisors(chips.devices)),
        lambda each: (v for v in roles.variants(each, job.rows, chips) if job.may(v)),
        lambda each: candidate(job, each, chips),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Own:
    """A program: `create(key)`, `loss(params, batch)`, optimizer, and `batch` as shapes."""

    create: Callable[..., Any]
    loss: Callable[..., Any]
    tx: Any
    batch: Any
    has_aux: bool = False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def params(self) -> Any:
        """The parameters' shapes."""
        return jax.eval_shape(self.create, jax.random.key(0))

    def may(self, each: Roles) -> bool:
        """Whether a layout's way to recompute layers is one to try."""
        return not each.remat or (self.marks_layers and not each.offload)

    @functools.cached_property
    def marks_layers(self) -> bool:
        """Whether the loss marks layers, of which no setting says whether they are recomputed."""
        found = []
        with marks.bind(layer=lambda body: found.append(body) or body):
            jax.eval_shape(lambda *given: self.mean(*given), self.params, self.part(1))
        return bool(found) and "remat" not in self.settings

    @functools.cached_property
    def again(self) -> dict[bool, "Own"]:
        """{whether products are kept: the program whose layers are recomputed}."""
        policies = jax.checkpoint_policies
        ways = policies.nothing_saveable, policies.dots_with_no_batch_dims_saveable
        each = (dataclasses.replace(self, settings=self.settings | {"remat": way}) for way in ways)
        return dict(zip((False, True), each, strict=True))

    def under(self, each: Roles) -> "Own":
        """The program whose layers are recomputed as a layout says."""
        return self.again[each.products] if each.remat else self

    @property
    def rows(self) -> int:
        """The number of rows of a step, which all arrays of the batch have."""
        found = [(path, x.shape[0] if x.shape else 0) for path, x in trees.leaves(self.batch)]
        first, *others = {rows for _, rows in found} or {0}
        if others or not first:
            told = ", ".join(f"{path or 'one array'} {rows}" for path, rows in found)
            raise ValueError(
                f"plan.own: expected arrays with as many rows, and one at least; the batch has "
                f"{told or 'none'}."
            )
        return first

    def part(self, rows: int) -> Any:
        """The shapes of `rows` rows of the batch."""
        return jax.tree.map(lambda x: x.update(shape=(rows, *x.shape[1:])), self.batch)

    def mean(self, params: Any, batch: Any) -> Any:
        """The mean loss, without aux; marks mean what the settings say alone, on one device."""
        mesh = jax.sharding.AbstractMesh((1,), ("data",))
        with marks.bind(**meanings(roles.layout_on(mesh, Roles(), **self.settings))):
            return quotient(normal(self.loss, self.has_aux)(params, batch)[0])

    @functools.cached_property
    def forward(self) -> float:
        """The FLOPs of a row's forward pass, in a program for one device."""
        return self._flops(self.mean)

    @functools.cached_property
    def flops(self) -> float:
        """The FLOPs of a row's forward and backward pass, in a program for one device."""
        return self._flops(jax.value_and_grad(self.mean, allow_int=True))

    def _flops(self, of):
        # Of one row, gradients of weights are outer products, which are not counted. Products are
        # the same at every level of optimization, and the lowest takes a third of the time.
        lowered = jax.jit(of).lower(self.params, self.part(2))
        return measure.flops(lowered.compile({"xla_backend_optimization_level": 0})) / 2

    @functools.cached_property
    def gathers_again(self) -> bool:
        """Whether weights are gathered once more in the backward pass, by the loss's own doing."""
        barrier = jax.lax.optimization_barrier
        with marks.bind(use=lambda tree: jax.tree.map(barrier, tree)):
            traced = jax.make_jaxpr(self.mean)(self.params, self.part(1))
        again = (e for e in jaxprs.every(traced.jaxpr) if e.primitive.name in jaxprs.REMAT)
        inside = (e.primitive.name for eqn in again for e in jaxprs.within(eqn))
        return "optimization_barrier" in inside

    @functools.cached_property
    def kept(self) -> Callable[[tuple, int], Terms]:
        """What the loss of so many rows keeps, its parameters laid so; traced once for each."""
        find, dtype = residuals.residuals, self.settings.get("dtype")
        return functools.cache(
            lambda laid, rows: find(self.mean, self.params, laid, self.part(rows), dtype)
        )


def candidate(job: Own, each: Roles, chips: Chips) -> planning.Candidate:
    """The `Candidate` of a layout: what it costs, whether it fits or not."""
    counted = min(3 * job.forward, job.flops)  # of what enters, none needs a gradient
    job = job.under(each)
    layout = roles.layout_on(chips.mesh(**each.axes).abstract, each, **job.settings)
    held = layouts.predict(layout, job.params, job.batch, job.tx).held
    laid, rows = array_layouts(layout, job.params), job.rows // each.rows // each.microbatches
    summed = held["parameters"] if each.microbatches > 1 else 0.0
    terms = job.kept(laid, rows)._replace(gradients=held["parameters"], summed=summed)
    at_once, copies = 0.0, COUNTS
    if chips.chip.node:  # where a program may have all of this at once, and all that JAX keeps
        at_once = terms.beside + terms.layer + terms.gradients
        copies = COUNTS._replace(summed=OF_GPUS.summed)
    held = held["parameters"], held["state"], held["batch"]
    memory = Memory(*held, terms._replace(beside=at_once), copies)
    ledger = LayoutLedger(layout)
    ledger.parameters(laid, job.params, job.gathers_again or layout.remat is not None)
    peak, leaves = chips.chip.peak() * chips.devices, jax.tree.leaves(job.params)
    work = job.flops * job.rows / chips.devices
    used = (jnp.dtype(job.settings.get("dtype") or x.dtype) for x in leaves)
    read = sum(x.size * dtype.itemsize for x, dtype in zip(leaves, used, strict=True))
    sent = ledger.sent
    costs = functools.cache(lambda: (sent, step(each, chips, memory, sent, work, read)))
    return planning.Candidate(each, memory, counted * job.rows, peak, costs)
