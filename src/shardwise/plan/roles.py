"""The layouts that there are for a number of devices, and the reasons why some cannot be."""

import dataclasses
import functools
import math
from collections.abc import Iterator

from shardwise.layouts.catalogue import ORDER
from shardwise.model import Config
from shardwise.topology import Chips


@dataclasses.dataclass(frozen=True)
class Roles:
    """The number of devices of each role of a layout; these multiply to that of all devices.

    `expert` is an axis of its own, along which all but the experts is whole. With tensor the
    sequence is cut between its products. `remat` says whether a layer is recomputed in the backward
    pass, from what enters it; `products`, whether what its weights were multiplied to is kept and
    the rest recomputed; `offload`, whether what enters waits on the host meanwhile.
    """

    stage: int = 1
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    microbatches: int = 1
    remat: bool = False
    offload: bool = False
    products: bool = False

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """A dict of the number of devices of each role above 1, in the order of the mesh."""
        return {role: n for role in ORDER if (n := getattr(self, role)) > 1}

    @property
    def rows(self) -> int:
        """The number of parts into which devices cut the rows of the batch."""
        return self.data * self.fsdp * self.expert

    def __str__(self):
        told = " × ".join(f"{role} {n}" for role, n in self.sizes.items()) or "one device"
        told += f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        told += ", remat" if self.remat else ""
        told += ", products kept" if self.products else ""
        return told + (", offload" if self.offload else "")


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A layout that cannot be, or does not fit: `kind` in a few words, `reason` with numbers."""

    roles: Roles
    kind: str
    reason: str


def every(devices: int) -> Iterator[Roles]:
    """All factorisations of the devices into roles, in one microbatch."""
    for sizes in _factorisations(devices, len(ORDER)):
        yield Roles(**dict(zip(ORDER, sizes, strict=True)))


def _factorisations(n, parts):
    if parts == 1:
        yield (n,)
        return
    for first in divisors(n):
        for rest in _factorisations(n // first, parts - 1):
            yield (first, *rest)


def divisors(n: int) -> list[int]:
    """The divisors of a positive number, in order."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def variants(roles: Roles, batch: int, chips: Chips, dense: bool = True) -> Iterator[Roles]:
    """The `roles` with every number of microbatches worth trying, with and without remat.

    These are powers of two that divide a device's rows; with stages, as many as stages or more,
    and the rows themselves. Without stages, products are kept beside remat, in a `dense` model, and
    offload is tried, on chips whose way to the host is known.
    """
    ways = [{}, {"remat": True}]
    if roles.stage == 1:
        ways += [{"remat": True, "products": True}] if dense else []
        ways += [{"remat": True, "offload": True}] if chips.chip.host_bandwidth else []
    rows, least = batch // roles.rows, roles.stage
    numbers = {m for m in (2**i for i in range(12)) if rows % m == 0} | {*[rows][: least - 1]}
    for m in sorted(m for m in numbers if m >= least):
        for way in ways:
            yield dataclasses.replace(roles, microbatches=m, **way)


def refusal(
    roles: Roles, config: Config, chips: Chips, batch: int, sequence: int
) -> Refusal | None:
    """The first reason why a layout cannot be; None if it can."""
    checks = (_of_host, _of_products, _of_heads, _of_layers, _of_rows, _of_tokens, _of_slices)
    for check in checks:
        if told := check(roles, config, chips, batch, sequence):
            return Refusal(roles, *told)
    return None


def refusal_of_rows(roles: Roles, chips: Chips, rows: int) -> tuple[str, str] | None:
    """The reason why rows or slices cannot be divided so: (in a few words, with numbers)."""
    return _of_rows(roles, None, None, rows, None) or _of_slices(roles, None, chips)


def _uneven(what, size, role, n):
    fitting = ", ".join(map(str, divisors(size)))
    return f"{what} do not divide over {role}", f"{what}={size} over {n} devices; {fitting} divide"


def _of_host(roles, *_):
    if roles.offload and (roles.stage > 1 or not roles.remat):
        told = "what enters layers waits there to be computed from again; stages keep it in slots"
        return "offload without remat, or with stages", told
    return None


def _of_products(roles, c, *_):
    if roles.products and (roles.stage > 1 or c.experts or not roles.remat or roles.offload):
        told = "no formula here has what stages or experts keep of them, or what waits on the host"
        return "products kept with stages, experts or offload, or without remat", told
    return None


def _of_heads(roles, c, *_):
    if roles.tensor > 1:
        sizes = {"kv_heads": c.kv_heads, "heads": c.heads, "vocab": c.vocab, "mlp": c.mlp}
        for name, size in sizes.items():
            if size % roles.tensor:
                return _uneven(name, size, "tensor", roles.tensor)
    if roles.expert > 1 and not c.experts:
        return "the model has no experts", "an axis of experts needs a mixture"
    if roles.expert > 1 and c.experts % roles.expert:
        return _uneven("experts", c.experts, "expert", roles.expert)
    return None


def _of_layers(roles, c, *_):
    if c.layers % roles.stage:
        return _uneven("layers", c.layers, "stage", roles.stage)
    return None


def _of_rows(roles, _, __, batch, ___):
    if batch % roles.rows:
        return _uneven("rows", batch, "data, fsdp and expert", roles.rows)
    if (rows := batch // roles.rows) < roles.stage:
        told = f"{rows} rows on a device, of {batch}, and {roles.stage} stages"
        return "fewer rows than stages", told
    return None


def _of_tokens(roles, _, __, ___, sequence):
    chunks = 2 * roles.context if roles.context > 1 else 1  # zigzag
    if sequence % chunks:
        return _uneven("half-chunks of the sequence", sequence, "context", chunks)
    if sequence // roles.context % roles.tensor:
        return _uneven("tokens", sequence // roles.context, "tensor", roles.tensor)
    return None


def _of_slices(roles, _, chips, *__):
    try:
        chips.mesh(**(roles.sizes or {"data": 1}))
    except ValueError as error:
        return "slices cut an axis unevenly", str(error).removeprefix("topology: ")
    return None
