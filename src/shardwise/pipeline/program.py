"""The program of a pipeline's devices: a scan over ticks, in each the device's own task.

A table says what a device does at each tick (`pipeline.ticks`); activations and cotangents go round
rings between ticks. A task is a loop of one turn or none, so that the slots that it changes stay
where they are; all that it reads is tied to the turn, or XLA would compute it at every tick.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardwise import marks
from shardwise.objective.means import wide
from shardwise.pipeline import checks, cut
from shardwise.pipeline.moving import Moving
from shardwise.pipeline.packing import Packing
from shardwise.pipeline.ticking import Ticks, ticks


class Kind(NamedTuple):
    """Stages that run the same program: one of them, its halves, and what these hand on."""

    stage: cut.Stage
    halves: cut.Halves
    kept: list
    pending: list


class State(NamedTuple):
    """What a device has between ticks; the first four are slots, in which arrays are stacked."""

    act: list
    cot: list
    kept: list
    pend: list
    grads: list
    outputs: list


class Whole:
    """The operations on parameters that the devices of a stage share, where nothing is written out.

    They are whole, or the compiler's. `layouts.shares` has those by hand.
    """

    use: Callable | None = None  # the meaning of `marks.use`

    def received(self, tree: Any) -> Any:
        """The shapes of parameters as the loss receives them."""
        return tree

    def gather(self, arrays: list) -> list:
        """The parameters as tasks find them, once a step."""
        return arrays

    def total(self, grads: list) -> list:
        """The gradients, of the sums that tasks have made, once a step."""
        return grads

    def enter(self, numbers: list, arrays: list, reads: tuple) -> list:
        """A task's parameters as its program takes them; it reads those at the places `reads`."""
        return arrays

    def leave(self, numbers: list, grads: list) -> list:
        """A task's gradients as they are added to the sums."""
        return grads

    def sum_shape(self, i: int, shape: tuple) -> tuple:
        """The shape of the sum of gradients of a parameter that has this one in a task."""
        return shape

    def by_rows(self, i: int) -> bool:
        """Whether the stage's devices share the parameter's rows, so that a task gathers first."""
        return False


WHOLE = Whole()


@dataclasses.dataclass(frozen=True)
class Program:
    """The stages of a traced loss by a schedule; a function of lists of arrays.

    `leaves` are the parameters' shapes on a device that has all stages'; `held` tells of each the
    axis along which devices of different stages hold parts between steps (None: each has all).
    Of the data, the leaves in `whole` are the same for all microbatches. `shares` is what tasks do
    with parameters that the devices of one stage share.
    """

    stages: list[cut.Stage]
    schedule: Any
    leaves: list
    held: tuple[int | None, ...]
    whole: frozenset[int]
    axis: str
    shares: Any = WHOLE
    backward: bool = True

    @functools.cached_property
    def ticks(self) -> Ticks:
        """The schedule's table; without `backward`, of its forward tasks."""
        return ticks(self.schedule, self.backward)

    @functools.cached_property
    def passed(self) -> dict[str, Packing]:
        """{"act": what activations lie in on their way round a ring, "cot": their cotangents}."""
        carries = [stage.carry for stage in self.stages[1:]]
        return {"act": Packing(carries), "cot": Packing(map(_inexact, carries))}

    def sends(self) -> dict[str, int]:
        """The bytes that a device sends along the stages in a step, by what is sent.

        `rings`: a tick's activation and cotangent, whether anyone waits for them or not; `sums`: of
        the loss's outputs; `parameters`: those that lie elsewhere than where stages read them,
        before the first tick, and the sums of their gradients after the last.
        """
        n, table = self.schedule.devices, self.ticks
        rings = sum(
            len(table.columns["kind"]) * self.passed[name].nbytes
            for name, offsets in table.rings.items()
            for offset in offsets
            if offset % n
        )
        summed = 2 * sum(self.schedule.microbatches * _nbytes(x) for x in self.stages[-1].outputs)
        moved = 0
        for i in self.trained:
            x = self.leaves[i]
            moved += self.moving[i].sent(x, x.dtype.itemsize)
            moved += self.moving[i].sent_back(x, wide(x.dtype).itemsize) if self.backward else 0
        return {"rings": rings, "sums": summed * (n - 1) // n, "parameters": moved}

    @functools.cached_property
    def moving(self) -> list[Moving]:
        """The way of each parameter to where the stages read it."""
        n = self.schedule.devices
        return [Moving(self.axis, n, k, self.order.get(i)) for i, k in enumerate(self.held)]

    @functools.cached_property
    def trained(self) -> list[int]:
        """The parameters of a dtype that has gradients."""
        return [i for i, x in enumerate(self.leaves) if _is_inexact(x)]

    @functools.cached_property
    def in_rows(self) -> dict[int, int]:
        """{parameter of which each stage reads rows of its own, equally many: how many}."""
        found = {}
        for i, x in enumerate(self.leaves):
            ends = [stage.rows.get(i) for stage in self.stages]
            if any(end is None for end in ends) or self.shares.by_rows(i):
                continue
            sizes = {b - a for a, b in ends}
            if len(sizes) == 1 and sizes.pop() * len(ends) == x.shape[0]:
                found[i] = ends[0][1] - ends[0][0]
        return found

    @functools.cached_property
    def order(self) -> dict[int, np.ndarray]:
        """{parameter in rows: the rows in the order in which devices hold their stages}."""
        device_of = self.schedule.device_of
        by_device = sorted(range(self.schedule.stages), key=lambda s: (device_of[s], s))
        return {
            i: np.concatenate([np.arange(*self.stages[s].rows[i]) for s in by_device])
            for i in self.in_rows
        }

    @functools.cached_property
    def kinds(self) -> tuple[list[Kind], list[int]]:
        """(the kinds of stages, the kind of each stage)."""
        signatures: dict[Any, int] = {}
        found, of = [], []
        for stage in self.stages:
            number = signatures.setdefault(self._signature(stage), len(signatures))
            of.append(number)
            if number == len(found):
                found.append(self._kind(stage))
        return found, of

    def _signature(self, stage):
        text = str(jax.make_jaxpr(stage.function)(stage.params, stage.inputs, stage.carry))
        text = re.sub(r"stage boundary [\d.]+", "", text)
        whole = tuple(i for i in stage.rows if i not in self.in_rows)
        taken = tuple(stage.rows[i] for i in whole)
        return stage.index == 0, stage.last, tuple(stage.rows), taken, stage.data, text

    def _kind(self, stage):
        halves = cut.backward(stage)
        checks.undivided(stage, halves, self.schedule)
        given = stage.params, stage.inputs
        kept = jax.eval_shape(halves.forward, *given, stage.carry)[1]
        cots = [stage.outputs[i] for i in cut.differentiable(stage)]
        pending = jax.eval_shape(halves.to_input, *given, kept, cots)[1]
        return Kind(stage, halves, list(kept), list(pending))

    def __call__(self, leaves: list, parts: list, seeds: Callable) -> tuple[list, list]:
        """(the loss's outputs of each microbatch [m, ...], the gradients), inside shard_map.

        Without `backward`, there are no gradients: [].

        `leaves` are this device's: of parameters in rows its stages' rows in order, of the others
        all. `parts` have microbatches first, but those in `whole`. `seeds(outputs)` are the
        cotangents of the loss's differentiable outputs. Outputs are the last stage's, and elsewhere
        zeros.
        """
        kinds, of = self.kinds
        table, me = self.ticks, jax.lax.axis_index(self.axis)
        act, cot = self.passed["act"], self.passed["cot"]
        kept, pend = Packing(k.kept for k in kinds), Packing(k.pending for k in kinds)
        m, last = self.schedule.microbatches, self.stages[-1]
        slots = table.slots
        state = State(
            act.blank(slots["act"]),
            cot.blank(slots["cot"]),
            kept.blank(slots["kept"]),
            pend.blank(slots["pend"]),
            [
                jnp.zeros(self.shares.sum_shape(i, x.shape), wide(x.dtype))
                if i in self.trained
                else None
                for i, x in enumerate(leaves if self.backward else ())
            ],
            [jnp.zeros((m, *x.shape), x.dtype) for x in last.outputs],
        )
        task = np.where(
            table.columns["kind"] == 0,
            0,
            1 + (table.columns["kind"] - 1) * len(kinds) + np.array(of)[table.columns["stage"]],
        )
        columns = {name: jnp.asarray(x)[:, me] for name, x in table.columns.items()}
        columns["task"] = jnp.asarray(task, jnp.int32)[:, me]

        def mine(leaves, stage, chunk, reads):
            """The parameters of a stage as its program takes them."""
            numbers = list(stage.rows)
            found = [rows(leaves[i], i, stage, chunk) for i in numbers]
            found = self.shares.enter(numbers, found, reads)
            pairs = zip(stage.rows.items(), found, strict=True)
            return [x[slice(*ends)] if self._later(i, ends) else x for (i, ends), x in pairs]

        def rows(x, i, stage, chunk):
            if i in self.in_rows:
                size = self.in_rows[i]
                return jax.lax.dynamic_slice_in_dim(x, chunk * size, size)
            ends = stage.rows[i]
            return x if ends is None or self._later(i, ends) else x[slice(*ends)]

        def added(sums, stage, chunk, grads):
            sums, whole = list(sums), []
            for (i, ends), g in zip(stage.rows.items(), grads, strict=True):
                if self._later(i, ends):
                    shape = (self.leaves[i].shape[0], *g.shape[1:])
                    g = jnp.zeros(shape, g.dtype).at[slice(*ends)].set(g)
                whole.append(g)
            left = self.shares.leave(list(stage.rows), whole)
            for (i, ends), g in zip(stage.rows.items(), left, strict=True):
                if sums[i] is None:
                    continue
                g = g.astype(sums[i].dtype)
                if i in self.in_rows:
                    at = chunk * self.in_rows[i]
                    g += jax.lax.dynamic_slice_in_dim(sums[i], at, self.in_rows[i])
                    sums[i] = jax.lax.dynamic_update_slice_in_dim(sums[i], g, at, 0)
                elif ends is None or self._later(i, ends):
                    sums[i] = sums[i] + g
                else:
                    sums[i] = sums[i].at[slice(*ends)].add(g)
            return sums

        def data(parts, stage, j):
            return [parts[i] if i in self.whole else _at(parts[i], j) for i in stage.data]

        def given_to(kind, task, leaves, parts, row):
            reads = kind.halves.reads[task]
            own = mine(leaves, kind.stage, row["chunk"], reads)
            return own, data(parts, kind.stage, row["microbatch"])

        def forward(kind, state, leaves, parts, row):
            stage = kind.stage
            x = act.unpack(_read(state.act, row["act"]), stage.carry)
            given = given_to(kind, "forward", leaves, parts, row)
            out, left = _arrays(kind.halves.forward(*given, x))
            if self.backward:
                state = state._replace(kept=_write(state.kept, row["kept"], kept.pack(left)))
            if stage.last:
                done = _write(state.outputs, row["microbatch"], out)
                return state._replace(outputs=done), act.blank(), cot.blank()
            return state, act.pack(out), cot.blank()

        def to_input(kind, state, leaves, parts, row):
            stage, j = kind.stage, row["microbatch"]
            given = given_to(kind, "to_input", leaves, parts, row)
            left = kept.unpack(_read(state.kept, row["kept"]), kind.kept)
            numbers = cut.differentiable(stage)
            if stage.last:
                back = seeds([x[j] for x in state.outputs])
                cots = [back[i].astype(stage.outputs[i].dtype) for i in numbers]
            else:
                shapes = [stage.outputs[i] for i in numbers]
                cots = cot.unpack(_read(state.cot, row["cot"]), shapes)
            sent, pending = _arrays(kind.halves.to_input(*given, left, cots))
            state = state._replace(pend=_write(state.pend, row["pend"], pend.pack(pending)))
            return state, act.blank(), cot.pack(sent) if stage.index else cot.blank()

        def to_weights(kind, state, leaves, parts, row):
            stage = kind.stage
            given = given_to(kind, "to_weights", leaves, parts, row)
            left = kept.unpack(_read(state.kept, row["kept"]), kind.kept)
            pending = pend.unpack(_read(state.pend, row["pend"]), kind.pending)
            grads = _arrays(kind.halves.to_weights(*given, left, pending))
            state = state._replace(grads=added(state.grads, stage, row["chunk"], grads))
            return state, act.blank(), cot.blank()

        halves = (forward, to_input, to_weights) if self.backward else (forward,)
        tasks = [functools.partial(f, kind) for f in halves for kind in kinds]

        def tick(state, row):
            carried = state, act.blank(), cot.blank()
            for number, run in enumerate(tasks, 1):
                turns = (row["task"] == number).astype(jnp.int32)
                once = functools.partial(_tied, run, leaves, parts, row)
                with marks.turns((task == number).sum(0), of=len(task)):  # for `measure`
                    carried = jax.lax.fori_loop(0, turns, once, carried)
            state, *sent = carried
            for name, arrays in zip(("act", "cot"), sent, strict=True):
                inbox = getattr(state, name)
                for ring in table.rings[name]:
                    slot = row[f"{name}+{ring}"]
                    inbox = _arrived(inbox, slot, self._passed(arrays, ring))
                state = state._replace(**{name: inbox})
            return state, None

        state, _ = jax.lax.scan(tick, state, columns)
        return state.outputs, state.grads

    def _later(self, i, ends):
        """Whether a task takes its rows of a parameter after it has gathered it."""
        return ends is not None and i not in self.in_rows and self.shares.by_rows(i)

    def _passed(self, arrays, ring):
        if ring == 0:
            return arrays
        n = self.schedule.devices
        pairs = [(i, (i + ring) % n) for i in range(n)]
        return [jax.lax.ppermute(x, self.axis, pairs) for x in arrays]


def _tied(run, leaves, parts, row, turn, carried):
    """One turn: what the task reads depends on the turn, or XLA moves it out of the loop."""
    state = carried[0]
    slots = state.act, state.cot, state.outputs
    slots, leaves, parts, row, _ = _barrier((slots, leaves, parts, row, turn))
    state = state._replace(act=slots[0], cot=slots[1], outputs=slots[2])
    return run(state, leaves, parts, row)


def _barrier(tree):
    """`optimization_barrier`; of typed keys, their numbers."""
    leaves, structure = jax.tree.flatten(tree)
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    bare = [jax.random.key_data(x) if k else x for x, k in zip(leaves, keys, strict=True)]
    tied = jax.lax.optimization_barrier(bare)
    back = [
        jax.random.wrap_key_data(y, impl=jax.random.key_impl(x)) if k else y
        for x, y, k in zip(leaves, tied, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, back)


def _arrived(inbox, slot, arrays):
    """What arrives goes to its slot; what nobody waits for nowhere."""
    at = jnp.maximum(slot, 0)
    own = _read(inbox, at)
    chosen = [jnp.where(slot >= 0, x, old) for x, old in zip(arrays, own, strict=True)]
    return _write(inbox, at, chosen)


def _arrays(tree):
    """What a stage hands on may be a number that its trace has as a literal."""
    return jax.tree.map(jnp.asarray, tree)


def _at(x, j):
    return jax.lax.dynamic_index_in_dim(x, j, 0, keepdims=False)


def _read(buffers, slot):
    return [_at(x, slot) for x in buffers]


def _write(buffers, slot, arrays):
    return [
        jax.lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), slot, 0)
        for x, y in zip(buffers, arrays, strict=True)
    ]


def _is_inexact(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _nbytes(x):
    """Of an array as a sum over devices sends it: truth values are counted in int32."""
    return x.size * (4 if x.dtype == jnp.bool_ else x.dtype.itemsize)


def _inexact(shapes):
    return [x for x in shapes if _is_inexact(x)]
