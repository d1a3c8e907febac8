"""Which chips, and how many: of each kind the fewest on which a model fits, or is done in time."""

import dataclasses
import math

from shardwise import topology
from shardwise.model import Config
from shardwise.plan import published, tables
from shardwise.plan.planning import Candidate, Plan, plan
from shardwise.plan.seconds import model_flops
from shardwise.topology import CHIPS
from shardwise.train import Optimizer

_ADAMW = Optimizer()
_DAY = 86_400
_GB = 1e9, 2**30  # makers' GB are either
_NEXT = "GiB are of a device. Name chips (--chips) for more of their plan."


@dataclasses.dataclass(frozen=True)
class Found:
    """The fewest chips of a kind that do, and the plan for them."""

    plan: Plan
    low: float  # the lowest MFU that published runs reached on such chips

    @property
    def best(self) -> Candidate:
        return self.plan.best[0]

    def days(self, tokens: float) -> tuple[float, float]:
        """(by the plan, by the lowest published MFU): the days that so many tokens take."""
        c, steps = self.best, tokens / (self.plan.batch * self.plan.sequence)
        slow = max(c.step.seconds, c.flops / c.peak / self.low)
        return c.step.seconds * steps / _DAY, slow * steps / _DAY


def survey(
    config: Config,
    batch: int,
    sequence: int,
    counts: tuple[int, int] = (1, 16_384),
    memory: float | None = None,
    tokens: float = 0.0,
    days: float = math.inf,
    optimizer: Optimizer = _ADAMW,
) -> list[Found]:
    """Of each kind of chips the fewest, in usual shapes, on which a step fits; the fewest first.

    `counts` are the fewest and the most to try, `memory` the GB that a chip is to have (16, 80,
    95). `tokens` are to take no more than `days`, at the lowest MFU that published runs reached on
    such chips, or at the plan's where that is lower.
    """
    flops = model_flops(config, batch, sequence) / (batch * sequence) * tokens
    found = []
    for chip in CHIPS.values():
        if memory and not any(math.isclose(memory * b, chip.hbm_bytes, rel_tol=0.02) for b in _GB):
            continue
        low = published.reached(chip, bool(config.experts)).low
        least = flops / (days * _DAY * low * chip.peak() * chip.devices)
        for chips in topology.usual(chip.kind, max(counts[0], math.ceil(least)), counts[1]):
            told = plan(config, chips, batch, sequence, optimizer=optimizer)
            if told.fitting and Found(told, low).days(tokens)[1] <= days:
                found.append(Found(told, low))
                break
    return sorted(found, key=lambda f: f.plan.chips.number)


def text(found: list[Found], tokens: float) -> str:
    """The fewest of each kind, as a table."""
    columns = ["chips", "number", "layout", "GiB", "of", "step s", "at most"]
    columns += ["days"] if tokens else []
    rows = []
    for f in found:
        c = f.best
        row = [str(f.plan.chips), f"{f.plan.chips.number:,}", str(c.roles)]
        row += [f"{c.memory.total / 2**30:.1f}", f"{f.plan.usable / 2**30:.1f}"]
        row += [f"{c.step.seconds:.3g}", f"{c.mfu_bound:.0%}"]
        row += ["{:.3g} to {:.3g}".format(*f.days(tokens))] if tokens else []
        rows.append(tuple(row))
    if not rows:
        return "No chips do. Give more of them (--count), of any memory, or more days."
    told = ["The fewest of each kind that do, in shapes that clouds offer (powers of two)."]
    if tokens:
        told += ["Days: by the plan's seconds, and by the lowest MFU of published runs on such."]
    missing = ", ".join(kind for kind in CHIPS if kind not in {f.plan.chips.kind for f in found})
    last = ["", f"None of {missing} do within these limits."] if missing else []
    return "\n".join([*told, "", *tables.table(tuple(columns), rows), *last, _NEXT])
