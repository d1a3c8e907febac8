"""The run of a `Program` on its devices: a scan over ticks, in each the device's own task.

A table says what a device does at each tick (`pipeline.ticks`); activations and cotangents go round
rings between ticks. A task is a loop of one turn or none, so that the slots that it changes stay
where they are; all that it reads is tied to the turn, or XLA would compute it at every tick.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardwise import marks
from shardwise.objective.means import wide
from shardwise.pipeline import cut
from shardwise.pipeline.program import Program, at, put

# What a device has between ticks: "act", "cot", "kept" and "pend" are its `Program.buffers`,
# "grads" sums of gradients as parameters are carried, "outputs" the loss's, [m, ...]. Within a tick
# also what is "sent" at its end, and the loop's "turn".
State = dict


class Given(NamedTuple):
    """What tasks read and do not change: parameters as carried, the data, the tick's row."""

    carried: list
    parts: list
    row: dict


class Run:
    """The run of a program, called inside shard_map with parameters and data.

    It returns (the loss's outputs [m, ...], on the last stage's devices, and zeros elsewhere; sums
    of gradients, in the form of `carried`, or [] without backward tasks). `carried` has what
    `Program.there` makes. `parts` have microbatches first, but those in `program.whole`.
    `seeds(outputs)` are the cotangents of the loss's differentiable outputs.
    """

    def __init__(self, program: Program, seeds: Callable):
        self.program, self.seeds, self.table = program, seeds, program.ticks
        self.buffers, (kinds, of) = program.buffers, program.kinds
        halves = [self.forward, self.to_input, self.to_weights][: 3 if program.backward else 1]
        self.tasks = [functools.partial(half, kind) for half in halves for kind in kinds]
        half, stage = self.table.columns["kind"], self.table.columns["stage"]
        number = 1 + (half - 1) * len(kinds) + np.array(of)[stage]
        # int32 [ticks, devices]: which of the `tasks` it is, from 1 on; 0 for none.
        self.task = np.where(half == 0, 0, number).astype(np.int32)

    def __call__(self, carried: list, parts: list) -> tuple[list, list]:
        carried = [jnp.stack(xs) for xs in carried]
        program, m = self.program, self.program.schedule.microbatches
        me, columns = jax.lax.axis_index(program.axis), self.table.columns | {"task": self.task}
        mine = {name: jnp.asarray(x)[:, me] for name, x in columns.items()}
        state = {name: buffers.zeros() for name, buffers in self.buffers.items()}
        state["outputs"] = [jnp.zeros((m, *x.shape), x.dtype) for x in program.stages[-1].outputs]
        pairs = zip(program.carriers, carried, strict=True)
        state["grads"] = [self.sums(c.leaf, x) for c, x in pairs if program.backward]

        def tick(state, row):
            return self.tick(state, Given(carried, parts, row)), None

        state, _ = jax.lax.scan(tick, state, mine)
        return state["outputs"], state["grads"]

    def sums(self, leaf, carried):
        """The sums of gradients, all 0, for what is carried of a parameter."""

        def gradient(x):
            shares = self.program.shares
            return shares.leave([leaf], shares.enter([leaf], [x], (0,)))[0]

        shape = jax.eval_shape(gradient, carried[0]).shape
        return jnp.zeros((len(carried), *shape), wide(carried.dtype))

    def tick(self, state, given):
        """The state after a tick: the device's task, then what arrives from others."""
        state = state | {"sent": {name: self.buffers[name].pack() for name in self.table.rings}}
        for number, task in enumerate(self.tasks, 1):
            turns = (given.row["task"] == number).astype(jnp.int32)
            once = functools.partial(self.turn, task, given)
            with marks.turns((self.task == number).sum(0), of=len(self.task)):  # for `measure`
                state["turn"] = jnp.zeros_like(turns)
                state = jax.lax.while_loop(lambda s, n=turns: s["turn"] < n, once, state)
        del state["turn"]
        n = self.program.schedule.devices
        for name, arrays in state.pop("sent").items():
            for ring in self.table.rings[name]:
                pairs = [(i, (i + ring) % n) for i in range(n)]
                arrived = jax.lax.ppermute(arrays, self.program.axis, pairs) if ring else arrays
                slot = given.row[f"{name}+{ring}"]
                state[name] = [_arrived(*x, slot) for x in zip(state[name], arrived, strict=True)]
        return state

    def turn(self, task, given, state):
        """One turn: what the task reads depends on the turn, or XLA moves it out of the loop."""
        slots = {name: state[name] for name in ("act", "cot", "outputs", "turn")}
        slots, given = jax.lax.optimization_barrier((slots, given))
        state, sent = task(state | slots, given)
        sent = {name: self.buffers[name].pack(sent.get(name, ())) for name in self.table.rings}
        return state | {"sent": sent, "turn": state["turn"] + 1}

    def forward(self, kind: cut.Halves, state: State, given: Given) -> tuple[State, dict]:
        """A microbatch's activations, on their way to the next stage; of the last, its outputs."""
        stage, row = kind.stage, given.row
        x = self.buffers["act"].read(state["act"], row["act"], stage.carry)
        out, kept = kind.forward(*self.inputs(kind, kind.forward, given), x)
        if self.program.backward:
            slots = self.buffers["kept"].write(state["kept"], row["kept"], kept)
            state = state | {"kept": slots}
        if stage.last:
            pairs = zip(state["outputs"], out, strict=True)
            return state | {"outputs": [put(x, row["microbatch"], y) for x, y in pairs]}, {}
        return state, {"act": out}

    def to_input(self, kind: cut.Halves, state: State, given: Given) -> tuple[State, dict]:
        """A microbatch's cotangents, on their way to the stage before."""
        stage, row = kind.stage, given.row
        kept, state = self.waiting(state, "kept", row, kind.kept)
        like = [stage.outputs[i] for i in stage.seeds]
        if stage.last:
            back = self.seeds([at(x, row["microbatch"]) for x in state["outputs"]])
            cots = [back[i].astype(x.dtype) for i, x in zip(stage.seeds, like, strict=True)]
        else:
            cots = self.buffers["cot"].read(state["cot"], row["cot"], like)
        inputs = self.inputs(kind, kind.to_input, given)
        sent, pending = kind.to_input(*inputs, kept, cots)
        state = state | {"pend": self.buffers["pend"].write(state["pend"], row["pend"], pending)}
        return state, {"cot": sent}

    def to_weights(self, kind: cut.Halves, state: State, given: Given) -> tuple[State, dict]:
        """A microbatch's gradients, added to the sums."""
        kept, state = self.waiting(state, "kept", given.row, kind.kept)
        pending, state = self.waiting(state, "pend", given.row, kind.pending)
        inputs = self.inputs(kind, kind.to_weights, given)
        grads = kind.to_weights(*inputs, kept, pending)
        return state | {"grads": self.added(kind.stage, state["grads"], grads, given.row)}, {}

    def waiting(self, state, name, row, like):
        """(arrays in a slot, tied to the turn; the state with that turn).

        Of a single slot, all would be the same at every tick; and where that turn did not become
        the loop's, weights tasks of one layer ran at every tick (jaxlib 0.10.1, libtpu 0.0.41).
        """
        found = self.buffers[name].read(state[name], row[name], like)
        arrays, turn = jax.lax.optimization_barrier((found, state["turn"]))
        return arrays, state | {"turn": turn}

    def inputs(self, kind, task, given):
        """(the parameters that a task takes, the data)."""
        program, stage, places = self.program, kind.stage, self.places(kind.stage, given.row)
        own = [at(given.carried[carrier], place) for carrier, place, _ in places]
        own = program.shares.enter(list(stage.rows), own, task.reads)
        pairs = zip(own, places, strict=True)
        own = [x if ends is None else x[slice(*ends)] for x, (_, _, ends) in pairs]
        each = [(i in program.whole, given.parts[i]) for i in stage.data]
        data = [x if whole else at(x, given.row["microbatch"]) for whole, x in each]
        starts = [s.starts for s in program.stages]
        return own, data + ([self.of_stage(stage, given.row, starts)] if stage.starts else [])

    def places(self, stage, row):
        """(the carrier, the place there, the rows of it) of each parameter of the stage at hand."""
        own = self.program.places
        at_hand = self.of_stage(stage, row, [[place for _, place, _ in each] for each in own])
        return [(c, at_hand[i], ends) for i, (c, _, ends) in enumerate(own[stage.index])]

    def of_stage(self, stage, row, numbers):
        """int32 [k]: `numbers[s]`, of the stage s at hand, which is one of this stage's kind."""
        of = self.program.kinds[1]
        alike = [s if kind == of[stage.index] else stage.index for s, kind in enumerate(of)]
        return jnp.asarray(np.array([numbers[s] for s in alike], np.int32))[row["stage"]]

    def added(self, stage, sums, grads, row):
        """The sums with a task's gradients in them."""
        shares, whole, places = self.program.shares, [], self.places(stage, row)
        for i, g, (c, _, ends) in zip(stage.rows, grads, places, strict=True):
            if ends is not None:
                carrier = self.program.carriers[c]
                rows = shares.rows(i) if carrier.table is None else carrier.size
                zeros = jnp.zeros((rows, *g.shape[1:]), g.dtype)
                g = zeros.at[slice(*ends)].set(g)
            whole.append(g)
        # Tied, or the TPU compiler moves scatters out of the task, or fails to (libtpu 0.0.41).
        left = jax.lax.optimization_barrier(shares.leave(list(stage.rows), whole))
        sums = list(sums)
        for (c, place, _), g in zip(places, left, strict=True):
            sums[c] = put(sums[c], place, at(sums[c], place) + g.astype(sums[c].dtype))
        return sums


def _arrived(inbox, x, slot):
    """What arrives goes to its slot; what nobody waits for nowhere."""
    here = jnp.maximum(slot, 0)
    return put(inbox, here, jnp.where(slot >= 0, x, at(inbox, here)))
