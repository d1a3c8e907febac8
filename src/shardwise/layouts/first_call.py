"""The first call of a layout's function: what is looked at before anything runs.

With real arrays the loss is judged, and then divided. With stages, so is what was compiled: devices
of one stage run a task together, and those of others another meanwhile, so that within a task only
collectives of one stage can meet. For a permute, of pairs, all devices of the mesh wait on CPU.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from shardwise.fsdp.arrays import around, looked_at
from shardwise.layouts.layout import Layout
from shardwise.marks import turns_said
from shardwise.measure import hlo
from shardwise.measure.hlo import Instruction, Program
from shardwise.objective import beforehand


def judged(run: Callable, layout: Layout, loss: Callable, has_aux, aux, who: str) -> Callable:
    """`run`, of `(params, ..., batch, *args, key=None)`, whose loss its first call with numbers
    judges; that a call has none is said once.
    """
    waits, told = bool(ways_of(layout)), False
    place = 1 if who == "layouts.step" else 0  # of the batch
    no_numbers = jax.ShapeDtypeStruct, jax.core.Tracer

    def call(params, *args, key=None):
        nonlocal waits, told
        reason = None
        if waits:
            batch, *further = args[place:]
            leaves = jax.tree.leaves((params, batch, further, key))
            waits = any(isinstance(x, no_numbers) for x in leaves)
            reason = "within a trace of the caller's there are no numbers"
            if not waits:
                reason = judge(layout, loss, params, batch, tuple(further), key, has_aux, aux)
        out = run(params, *args, key=key)  # which raises what is wrong with the loss itself
        if reason is not None and not told:
            told = True
            warn(reason, who)
        return out

    return around(run, call)


def judge(layout, loss, params, batch, args=(), key=None, has_aux=False, aux="sum") -> str | None:
    """The reason why a loss was not judged; None where it divides as the layout divides its batch.
    `Indivisible` where it does not.
    """
    if not (ways := ways_of(layout)):
        return None
    parts = layout.exact or layout.parts(layout.rows) * layout.microbatches
    rows = beforehand.unit_of(batch) // parts
    case = beforehand.Case(loss, params, batch, args, key, has_aux, aux, mesh=layout.auto)
    return beforehand.judge(case, ways, rows) if rows else None


def ways_of(layout: Layout) -> tuple[str, ...]:
    """The ways in which a layout divides batches; none where the compiler sees whole arrays."""
    hand = layout.by_hand and not layout.exact
    divided = {
        "devices": hand and layout.parts(layout.rows) > 1,
        "microbatches": (layout.exact or layout.microbatches) > 1,
        "sequence": hand and layout.size("context") > 1,
    }
    return tuple(way for way, is_divided in divided.items() if is_divided)


def warn(reason: str, who: str) -> None:
    """Say that a loss was not judged, and what its author can do."""
    warnings.warn(
        f"{who}: whether the loss is the same function where its batch is divided was not judged: "
        f"{reason}. Run objective.check(loss, params, batch) once, or say check=False.",
        stacklevel=4,
    )


def checked(run: Callable, layout: Layout, who: str) -> Callable:
    """`run`, jitted, which refuses a collective within a task that would wait for other stages."""
    if not layout.stage or layout.exact or layout.parts(layout.manual) == layout.mesh.size:
        return run

    def look(*args, **options):
        refuse(run.lower(*args, **options).compile(), layout, who)

    def kind(x):
        return np.shape(x), jax.numpy.result_type(x)

    return looked_at(run, look, kind)


def refuse(compiled: Any, layout: Layout, who: str) -> None:
    """Raise where a task of this compiled program has a collective that waits for other stages."""
    program = hlo.parse(compiled.as_text())
    places = list(layout.auto.axis_names).index(layout.stage[0])
    stage_of = np.indices(layout.auto.devices.shape)[places].ravel()
    loops = (op for op in program.instructions if op.opcode == "while")
    tasks, seen = [op for op in loops if turns_said(op.source)], set()
    for op in (inner for task in tasks for inner in _within(program, task, seen)):
        if op.opcode.removesuffix("-start") == "collective-permute":
            what = "a permute, for which all devices wait"
        elif "replica_groups" in op.attributes and any(
            len({stage_of[i] for i in group}) > 1 for group in hlo.replicas(op, program.devices)
        ):
            what = "among devices of several stages"
        else:
            continue
        raise ValueError(
            f"{who}: the compiler put {op.name} into a stage's task, {what}, and other stages do "
            f"something else meanwhile: the program would stand still. It moves "
            f"{', '.join(f'{a.dtype}{list(a.dims)}' for a in op.arrays)} for {op.source or '?'}. "
            f"Pin that array's layout by marks.constrain, or keep arrays apart that one product "
            f"packs{'' if layout.by_hand else '; or leave by= out: by hand rows are cut first'}."
        )


def _within(program: Program, op: Instruction, seen: set[str]) -> Iterator[Instruction]:
    """All instructions that this one runs, be it a loop, a conditional or a call, but those of
    computations that were `seen`, to which it adds.
    """
    named = (op.says("body"), op.says("condition"), *op.called, *op.branches)
    for name in {name.lstrip("%") for name in named} & program.computations.keys() - seen:
        seen.add(name)
        for inner in program.computations[name].instructions.values():
            yield inner
            yield from _within(program, inner, seen)
