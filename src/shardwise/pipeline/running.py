"""The run of a `Program` on its devices: a scan over ticks, in each the device's own task.

A table says what a device does at each tick (`pipeline.ticks`); activations and cotangents go round
rings between ticks. A task is a loop of one turn or none, so that the slots that it changes stay
where they are; all that it reads is tied to the turn, or XLA would compute it at every tick.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardwise import marks
from shardwise.objective.means import wide
from shardwise.pipeline import cut
from shardwise.pipeline.program import Kind, Program, is_inexact


class State(NamedTuple):
    """What a device has between ticks; the first four are slots, in which arrays are stacked."""

    act: list
    cot: list
    kept: list
    pend: list
    grads: list
    outputs: list


class Given(NamedTuple):
    """What tasks read and do not change: parameters as carried, the data, the tick's row."""

    carried: list
    parts: list
    row: dict


def run(program: Program, carried: list, parts: list, seeds: Callable) -> tuple[list, list]:
    """(the loss's outputs of each microbatch [m, ...], sums of gradients), inside shard_map.

    `carried` has what `Program.there` makes, and the sums are of the same form; without backward
    tasks there are none: []. `parts` have microbatches first, but those in `program.whole`.
    `seeds(outputs)` are the cotangents of the loss's differentiable outputs. Outputs are the last
    stage's, and elsewhere zeros.
    """
    return _Run(program, seeds)([jnp.stack(xs) for xs in carried], parts)


class _Run:
    def __init__(self, program: Program, seeds: Callable):
        kinds = program.kinds[0]
        self.program, self.seeds, self.table = program, seeds, program.ticks
        self.act, self.cot = program.passed["act"], program.passed["cot"]
        self.kept, self.pend = program.left["kept"], program.left["pend"]
        self.spots = [program.spots(kind.stage) for kind in kinds]
        halves = [self.forward, self.to_input, self.to_weights][: 3 if program.backward else 1]
        self.tasks = [functools.partial(half, kind) for half in halves for kind in kinds]

    def __call__(self, carried, parts):
        me, columns = jax.lax.axis_index(self.program.axis), self.table.columns
        mine = {name: jnp.asarray(x)[:, me] for name, x in (columns | {"task": self.task}).items()}

        def tick(state, row):
            return self.tick(state, Given(carried, parts, row)), None

        state, _ = jax.lax.scan(tick, self.blank(carried), mine)
        return state.outputs, state.grads

    @functools.cached_property
    def task(self):
        """int32 [ticks, devices]: which of the `tasks` it is, from 1 on; 0 for none."""
        kinds, of = self.program.kinds
        half, stage = self.table.columns["kind"], self.table.columns["stage"]
        number = 1 + (half - 1) * len(kinds) + np.array(of)[stage]
        return np.where(half == 0, 0, number).astype(np.int32)

    def blank(self, carried):
        """The state before the first tick."""
        program, slots = self.program, self.program.slots
        grads = [
            jnp.zeros((len(x), *program.shares.sum_shape(i, x.shape[1:])), wide(x.dtype))
            if is_inexact(x)
            else None
            for i, x in zip(program.first, carried, strict=True)
        ]
        m, last = program.schedule.microbatches, program.stages[-1]
        return State(
            *(getattr(self, name).slots(slots[name]) for name in ("act", "cot", "kept", "pend")),
            grads if program.backward else [],
            [jnp.zeros((m, *x.shape), x.dtype) for x in last.outputs],
        )

    def tick(self, state, given):
        """The state after a tick: the device's task, then what arrives from others."""
        carried = state, self.act.blank(), self.cot.blank()
        for number, task in enumerate(self.tasks, 1):
            turns = (given.row["task"] == number).astype(jnp.int32)
            once = functools.partial(_tied, task, given)
            with marks.turns((self.task == number).sum(0), of=len(self.task)):  # for `measure`
                begun = jnp.zeros_like(turns), carried
                carried = jax.lax.while_loop(lambda loop, n=turns: loop[0] < n, once, begun)[1]
        state, *sent = carried
        for name, arrays in zip(("act", "cot"), sent, strict=True):
            inbox = getattr(state, name)
            for ring in self.table.rings[name]:
                inbox = _arrived(inbox, given.row[f"{name}+{ring}"], self.passed(arrays, ring))
            state = state._replace(**{name: inbox})
        return state

    def passed(self, arrays, ring):
        """The arrays of the device so many places before."""
        if ring == 0:
            return arrays
        n = self.program.schedule.devices
        pairs = [(i, (i + ring) % n) for i in range(n)]
        return [jax.lax.ppermute(x, self.program.axis, pairs) for x in arrays]

    def forward(self, kind: Kind, state: State, given: Given) -> tuple:
        """A microbatch's activations, on their way to the next stage; of the last, its outputs."""
        stage, row = kind.stage, given.row
        x = self.act.read(state.act, row["act"], stage.carry)
        out, kept = _arrays(kind.halves.forward(*self.inputs(kind, "forward", given), x))
        if self.program.backward:
            state = state._replace(kept=self.kept.write(state.kept, row["kept"], kept))
        if stage.last:
            done = _write(state.outputs, row["microbatch"], out)
            return row["turn"], state._replace(outputs=done), self.act.blank(), self.cot.blank()
        return row["turn"], state, self.act.pack(out), self.cot.blank()

    def to_input(self, kind: Kind, state: State, given: Given) -> tuple:
        """A microbatch's cotangents, on their way to the stage before."""
        stage = kind.stage
        kept, row = _read(self.kept, state.kept, given.row, "kept", kind.kept)
        numbers = cut.differentiable(stage)
        if stage.last:
            back = self.seeds([_at(x, row["microbatch"]) for x in state.outputs])
            cots = [back[i].astype(stage.outputs[i].dtype) for i in numbers]
        else:
            cots = self.cot.read(state.cot, row["cot"], [stage.outputs[i] for i in numbers])
        inputs = self.inputs(kind, "to_input", given)
        sent, pending = _arrays(kind.halves.to_input(*inputs, kept, cots))
        state = state._replace(pend=self.pend.write(state.pend, row["pend"], pending))
        return row["turn"], state, self.act.blank(), self.cot.pack(sent if stage.index else [])

    def to_weights(self, kind: Kind, state: State, given: Given) -> tuple:
        """A microbatch's gradients, added to the sums."""
        kept, row = _read(self.kept, state.kept, given.row, "kept", kind.kept)
        pending, row = _read(self.pend, state.pend, row, "pend", kind.pending)
        inputs = self.inputs(kind, "to_weights", given)
        grads = _arrays(kind.halves.to_weights(*inputs, kept, pending))
        state = state._replace(grads=self.added(kind.stage, state.grads, grads, given.row))
        return row["turn"], state, self.act.blank(), self.cot.blank()

    def inputs(self, kind, task, given):
        """(the parameters that a task takes, the data)."""
        program, stage, reads = self.program, kind.stage, kind.halves.reads[task]
        own = [_at(given.carried[at], place) for at, place in self.places(stage, given.row)]
        own = program.shares.enter(list(stage.rows), own, reads)
        ends = [program.sliced(stage, i) for i in stage.rows]
        own = [x if e is None else x[slice(*e)] for e, x in zip(ends, own, strict=True)]
        each = [(i in program.whole, given.parts[i]) for i in stage.data]
        return own, [x if whole else _at(x, given.row["microbatch"]) for whole, x in each]

    def places(self, stage, row):
        """(the carrier, the place there) of each parameter of the stage at hand."""
        found = self.spots[self.program.kinds[1][stage.index]]
        return [(at, jnp.asarray(p, jnp.int32)[row["stage"]]) for at, p in found.values()]

    def added(self, stage, sums, grads, row):
        """The sums with a task's gradients in them."""
        shares, whole = self.program.shares, []
        for i, g in zip(stage.rows, grads, strict=True):
            if (ends := self.program.sliced(stage, i)) is not None:
                zeros = jnp.zeros((shares.all_rows(i), *g.shape[1:]), g.dtype)
                g = zeros.at[slice(*ends)].set(g)
            whole.append(g)
        # Tied, or the TPU compiler moves scatters out of the task, or fails to (libtpu 0.0.41).
        sums, left = list(sums), _barrier(shares.leave(list(stage.rows), whole))
        for (at, place), g in zip(self.places(stage, row), left, strict=True):
            if sums[at] is not None:
                g = _at(sums[at], place) + g.astype(sums[at].dtype)
                sums[at] = jax.lax.dynamic_update_index_in_dim(sums[at], g, place, 0)
        return sums


def _tied(task, given, loop):
    """One turn: what the task reads depends on the turn, or XLA moves it out of the loop."""
    turn, (state, *_) = loop
    slots = state.act, state.cot, state.outputs
    slots, given, turn = _barrier((slots, given, turn))
    act, cot, outputs = slots
    given = given._replace(row=given.row | {"turn": turn})
    turn, *carried = task(state._replace(act=act, cot=cot, outputs=outputs), given)
    return turn + 1, tuple(carried)


def _read(packing, slots, row, name, like):
    """(arrays in a slot, tied to the turn; the row with that turn).

    Of a single slot, all would be the same at every tick. That turn has to become the loop's: where
    it was left unused, weights tasks of one layer ran at every tick (jaxlib 0.10.1, libtpu 0.0.41).
    """
    arrays, turn = _barrier((packing.read(slots, row[name], like), row["turn"]))
    return arrays, row | {"turn": turn}


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
    pairs = zip(arrays, inbox, strict=True)
    return _write(inbox, at, [jnp.where(slot >= 0, x, _at(old, at)) for x, old in pairs])


def _arrays(tree: Any) -> Any:
    """What a stage hands on may be a number that its trace has as a literal."""
    return jax.tree.map(jnp.asarray, tree)


def _at(x, j):
    return jax.lax.dynamic_index_in_dim(x, j, 0, keepdims=False)


def _write(buffers, slot, arrays):
    return [
        jax.lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), slot, 0)
        for x, y in zip(buffers, arrays, strict=True)
    ]
