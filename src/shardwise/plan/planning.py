"""All layouts of a model on some chips: what each holds, sends and takes; the best first."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from shardwise import topology
from shardwise.costs.arrays import Arrays, Roles, parts
from shardwise.costs.ledger import Sent
from shardwise.costs.memory import Memory, memory
from shardwise.costs.sent import largest, sent
from shardwise.model import Config
from shardwise.plan import roles
from shardwise.plan.arrays import ADAMW, of_decoder
from shardwise.plan.published import preset
from shardwise.plan.roles import Refusal
from shardwise.plan.seconds import Step, flops, model_flops, read, step
from shardwise.topology.slices import Chips
from shardwise.train import Optimizer


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout with what it costs on its busiest device.

    Fields:
      roles: its `Roles`, which say how to make its mesh and `layouts.Layout`.
      memory: the bytes on a device, a `Memory`.
      flops, peak: the FLOPs that MFU counts in a step, and the chips' FLOP/s, of all devices.
      costs: a function that returns (`sent`, `step`), called when one of them is asked for.
    """

    roles: Roles
    memory: Memory
    flops: float
    peak: float
    costs: Callable[[], tuple[tuple[Sent, ...], Step]] = dataclasses.field(
        repr=False, compare=False
    )

    @property
    def sent(self) -> tuple[Sent, ...]:
        """The ring bytes that a device sends in a step, of each kind the most of any stage."""
        return self.costs()[0]

    @property
    def step(self) -> Step:
        """The step on the busiest stage: its `.seconds`, and those of its parts."""
        return self.costs()[1]

    @property
    def mfu(self) -> float:
        """The model FLOPs over what the chips could do in the step's estimated seconds."""
        return self.flops / self.peak / self.step.seconds

    @property
    def mfu_bound(self) -> float:
        """The MFU if all transfers ran beside products."""
        return self.flops / self.peak / self.step.bound


@dataclasses.dataclass(frozen=True)
class Plan:
    """The layouts that fit, best first; those that are too large; those that cannot be.

    `plan` and `own` return it. `config`, `chips`, `batch`, `sequence`, `optimizer` and `document`
    are what was asked; of a program of your own, `config` and `sequence` are None, and `own` has
    its `create`, `loss`, `tx` and `batch`.
    """

    config: Config | None
    chips: Chips
    batch: int
    sequence: int | None
    fitting: tuple[Candidate, ...] = ()
    too_large: tuple[Candidate, ...] = ()
    refused: tuple[Refusal, ...] = ()
    own: Any = None
    optimizer: Optimizer = ADAMW
    document: int | None = None

    def filled(
        self,
        divisions: Iterable[Roles],
        variants: Callable[[Roles], Iterable[Roles]],
        candidate: Callable[[Roles], Candidate],
    ) -> "Plan":
        """A new `Plan` with its layouts sorted; for `plan` and `own`, not for users.

        Of `divisions`, `Roles` in one microbatch, those that cannot be (a role does not divide what
        it cuts, say) go to `refused`. Of others `variants` yields `Roles` to make candidates of.
        """
        fitting, too_large, refused = [], [], []
        for division in divisions:
            if told := roles.refusal(division, self.config, self.chips, self.batch, self.sequence):
                refused.append(told)
                continue
            for c in map(candidate, variants(division)):
                (too_large if self.lacking(c) else fitting).append(c)
        found = dict(fitting=sorted(fitting, key=_order), too_large=too_large, refused=refused)
        return dataclasses.replace(self, **{name: tuple(those) for name, those in found.items()})

    @property
    def usable(self) -> int:
        """The bytes of memory that a program may take on a device."""
        return self.chips.usable_hbm

    def lacking(self, c: Candidate) -> tuple[str, float, float] | None:
        """None if the `Candidate` fits; else (who, the bytes that it needs, the bytes there are).

        Who has too little memory is a "device", or its "host", of which a device has a part.
        """
        on_host = (self.chips.chip.host_bytes or math.inf) / self.chips.chip.devices
        asked = ("device", c.memory.most, self.usable), ("host", c.memory.host, on_host)
        return next(((who, needs, has) for who, needs, has in asked if needs > has), None)

    @property
    def best(self) -> tuple[Candidate, ...]:
        """The best `Candidate` of each division of devices, the fastest first; () if none fits."""
        found = {tuple(c.roles.sizes.items()): c for c in reversed(self.fitting)}
        return tuple(sorted(found.values(), key=_order))

    @property
    def why_not(self) -> dict[str, tuple[int, str]]:
        """A dict from reason to (number of layouts, example), of what cannot be or does not fit."""
        found: dict[str, list[str]] = collections.defaultdict(list)
        for refusal in self.refused:
            found[refusal.kind].append(f"{refusal.roles}: {refusal.reason}")
        for c in sorted(self.too_large, key=lambda c: c.memory.most):
            who, needs, has = self.lacking(c)
            told = f"{c.roles}: {needs / 2**30:.1f} of {has / 2**30:.1f} GiB"
            told += " for a device" if who == "host" else ""
            found[f"more memory than a {who} has"].append(told)
        return {kind: (len(told), told[0]) for kind, told in found.items()}


def plan(
    model: str | Config,
    chips: str | Chips,
    batch: int,
    sequence: int,
    optimizer: Optimizer = ADAMW,
    document: int | None = None,
) -> Plan:
    """All layouts of `model.Decoder` for `batch` rows of `sequence` tokens in a step, by formula.

    `model` is what `preset` takes, or a `model.Config`, in whose dtype weights are gathered and
    products computed; its remat, stages and loss_chunks are chosen here (without stages the
    loss takes its tokens in up to 8 chunks). `chips` are a name that `topology.chips` takes, or
    what it returns. `optimizer` is a `train.Optimizer`, which names one of optax's; no
    transformation of optax itself. Layouts are by hand, with ZeRO 3, sequence parallelism beside
    tensor, zigzag over context and the schedule 1f1b. Attention never keeps its scores. Activations
    may wait on the host (offload) where layers are recomputed, without stages, if it is known how
    fast a chip reaches its host (v4, v5e, v5p, v6e; how much a host of v4 holds is not known);
    state stays.

    Parameters and state are exact, and so is what is sent along axes by hand. What a step needs
    besides is estimated by a formula that was fitted to TPUs' compiler or to GPUs'; seconds are a
    roofline. Not planned are programs of your own (see `own`), experts on the axis of another role,
    and stages by other schedules.

    `document` is the number of tokens of each document, where several are packed into a row, with
    their numbers and positions in the batch. MFU then counts attention within documents. Seconds
    count a row's as before, since the TPUs' kernel skips no tile of two documents.

    Raises:
      ValueError: no such model or chips; a batch or sequence below 1; documents that are longer
        than a row; an optimizer such as Muon, which gathers matrices whole.
    """
    config = preset(model) if isinstance(model, str) else model
    config = dataclasses.replace(config, remat=False, stages=1, loss_chunks=1)
    chips = topology.chips(chips) if isinstance(chips, str) else chips
    for name, value in (("batch", batch), ("sequence", sequence)):
        if value < 1:
            raise ValueError(f"plan: {name}={value}; expected 1 or more.")
    if document is not None and not 1 <= document <= sequence:
        raise ValueError(
            f"plan: document={document} tokens; expected 1 to the sequence={sequence} of a row."
        )
    given = config, of_decoder(config, optimizer), chips, batch, sequence, document
    return Plan(config, chips, batch, sequence, optimizer=optimizer, document=document).filled(
        roles.every(chips.devices),
        lambda each: roles.variants(each, batch, chips, config, sequence),
        lambda each: candidate(each, *given),
    )


def _order(c: Candidate):
    """The key to sort by: the fastest first; of equally fast ones what sends, then holds, least."""
    return c.step.seconds, c.step.hidden + c.step.waited + 2 * c.step.host, c.memory.total


def candidate(
    each: Roles,
    config: Config,
    arrays: Arrays,
    chips: Chips,
    batch: int,
    sequence: int,
    document: int | None = None,
) -> Candidate:
    """The `Candidate` of a layout that can be: what it costs, whether it fits or not."""
    of_stages = parts(each, config, arrays, batch, sequence, packed=bool(document))
    # They run one program: each device has what the stage with most layers needs.
    held = memory(max(of_stages, key=lambda part: part.layers), gpu=bool(chips.chip.node))

    @functools.cache
    def costs():
        by_stage = [sent(part) for part in of_stages]
        steps = (
            step(each, chips, held, told, flops(part), read(part))
            for part, told in zip(of_stages, by_stage, strict=True)
        )
        return largest(by_stage), max(steps, key=lambda s: s.seconds)

    work = model_flops(config, batch, sequence, document=document)
    peak = chips.chip.peak() * chips.devices
    return Candidate(each, held, work, peak, costs)
