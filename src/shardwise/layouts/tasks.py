"""Collectives that a compiler puts into the tasks of stages: found before the program runs.

Devices of one stage run a task together, and those of other stages run another meanwhile. So within
a task only collectives among the former can meet. A permute names pairs, and still all devices of
the mesh wait for it on CPU; a group that leaves its stage waits for good.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from shardwise.layouts.layout import Layout
from shardwise.marks import turns_said
from shardwise.measure import hlo
from shardwise.measure.program import Instruction, Program


class Checked:
    """A jitted function of a layout with stages, which looks at what was compiled before it runs.

    Within another trace it is called as it is.

    Raises, when called:
      ValueError: a collective within a task that would wait for other stages.
    """

    def __init__(self, run: Any, layout: Layout, who: str):
        self._run, self._layout, self._who = run, layout, who
        self._known: set = set()

    def __call__(self, *args, **options):
        leaves, structure = jax.tree.flatten((args, options))
        if not any(isinstance(x, jax.core.Tracer) for x in leaves):
            told = structure, *((np.shape(x), jax.numpy.result_type(x)) for x in leaves)
            if told not in self._known:
                refuse(self._run.lower(*args, **options).compile(), self._layout, self._who)
                self._known.add(told)
        return self._run(*args, **options)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._run, name)


def checked(run: Callable, layout: Layout, who: str) -> Callable:
    """`run` as `Checked`, where a compiler has axes beside stages."""
    by_hand = (*layout.rows, *layout.context) if layout.by_hand else ()
    sizes = {n: size for n, size in layout.auto.shape.items() if n not in (*layout.stage, *by_hand)}
    return Checked(run, layout, who) if max(sizes.values(), default=1) > 1 else run


def refuse(compiled: Any, layout: Layout, who: str) -> None:
    """Raise where a task of this compiled program has a collective that waits for other stages."""
    program = hlo.parse(compiled.as_text())
    places = list(layout.auto.axis_names).index(layout.stage[0])
    stage_of = np.indices(layout.auto.devices.shape)[places].ravel()
    for op in _within_tasks(program):
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


def _within_tasks(program: Program) -> Iterator[Instruction]:
    """All instructions within loops that `marks.turns` names."""
    every = [op for body in program.computations.values() for op in body.instructions.values()]
    waiting = [op for op in every if op.opcode == "while" and turns_said(op.source)]
    seen: set[str] = set()
    while waiting:
        op = waiting.pop()
        named = [op.attributes.get(key, "") for key in ("body", "condition", "to_apply", "calls")]
        for name in (*op.branches, *(n.lstrip("%") for n in named)):
            if name in program.computations and name not in seen:
                seen.add(name)
                inner = list(program.computations[name].instructions.values())
                waiting += inner
                yield from inner
