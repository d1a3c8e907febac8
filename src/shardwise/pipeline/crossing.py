"""The numbers that travel between stages, in the order of their exchanges."""

from typing import Any

from jax.extend.core import Literal


def exchanges(located: Any, steps: list, goals: list) -> list[dict[int, list]]:
    """[{stage: numbers that other stages need}], in the order in which they can be computed.

    `located` knows which stage computes a number; `goals` are [(variable, `Piece`)].
    """
    crossing, depth = _crossing(located, steps, goals), {}
    for step in steps:
        inputs = [v for v in step.invars if not isinstance(v, Literal)]
        at = max((depth.get(v, 0) + (v in crossing) for v in inputs), default=0)
        depth.update(dict.fromkeys(step.outvars, at))
    found = [{} for _ in range(max((depth[v] for v in crossing), default=-1) + 1)]
    for v, stage in crossing.items():
        found[depth[v]].setdefault(stage, []).append(v)
    return found


def _crossing(located, steps, goals):
    """{number: its stage}, of numbers that one stage computes and others need."""
    uses = [(v, step.homes) for step in steps for v in step.invars]
    uses += [(v, piece.homes) for v, piece in goals]
    found = {}
    for v, homes in uses:
        stage = None if isinstance(v, Literal) else located.stage_of(v)
        needed = None if homes is None else [stage for stage, _ in homes]
        if stage is not None and needed != [stage]:
            found[v] = stage
    return found
