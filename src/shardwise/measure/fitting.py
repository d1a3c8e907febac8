"""The fit of a program into a device's memory, and what fills it."""

import re
from dataclasses import dataclass
from typing import Any

from .memory import DeviceBytes, bytes_per_device

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REFUSALS = (
    r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
    r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
    r"Allocation \(size=([\d.]+)()\) would exceed memory \(size=([\d.]+)()\)",
)


@dataclass(frozen=True)
class Fit:
    """`needed` and `allowed` bytes on a device; true if the program fits.

    `memory` tells what is needed for what, None for a program that was refused; `buffers` are the
    largest arrays, where they are known, each with `bytes`, `kind`, `array`, `name` and `source`.
    """

    needed: int
    allowed: int
    memory: DeviceBytes | None = None
    buffers: tuple[Any, ...] = ()

    def __bool__(self) -> bool:
        return self.needed <= self.allowed

    @property
    def spare(self) -> int:
        """Bytes that are left, or are missing, as a negative number."""
        return self.allowed - self.needed

    def __repr__(self) -> str:
        says = "fits" if self else "does not fit"
        lines = [f"{says}: {_gib(self.needed)} of {_gib(self.allowed)} GiB"]
        if self.memory is not None:
            parts = ", ".join(f"{k} {_gib(n)}" for k, n in self.memory._asdict().items())
            lines.append(f"  {parts}")
        lines += [f"  {_gib(b.bytes)}  {b.kind} {b.array}  {b.source}" for b in self.buffers[:5]]
        return "\n".join(lines)


def fits(program: Any, allowed: int | None = None) -> Fit:
    """The `Fit` of a compiled program, or of the error with which a compiler refused one.

    A program needs its arguments and outputs, less what is aliased, and its temporaries: so much
    at most, since temporaries may lie where a donated argument was. `needed` is what the compiler
    itself counted, where it says so, as what `topology.compile` returns does. What the device
    allows is known for that, for what it raises, and for TPU's errors; for another
    `jax.stages.Compiled` say `allowed`, in bytes. (An old TPU compiler, libtpu 0.0.23,
    does not look at arguments and outputs: it returns what does not fit, and this tells.)

    Raises:
      TypeError: neither a compiled program nor an error.
      ValueError: `allowed` is not known, or the error tells no numbers.
    """
    if isinstance(program, Exception):
        return _refused(program, allowed)
    memory = bytes_per_device(program)
    allowed = allowed or getattr(program, "usable_hbm", None)
    if allowed is None:
        raise ValueError(
            "measure.fits: how much the device allows is not known for a program compiled here; "
            "say measure.fits(compiled, allowed=16 * 2**30), or compile by topology.compile."
        )
    needed = getattr(program, "hbm_bytes", None) or memory.total
    return Fit(needed, allowed, memory, getattr(program, "buffers", ()))


def refused(text: str) -> tuple[int, int] | None:
    """(needed, allowed) bytes in a TPU compiler's words; None if they tell no numbers."""
    for pattern in _REFUSALS:
        if found := re.search(pattern, text):
            needed, unit, allowed, its_unit = found.groups()
            return int(float(needed) * _UNITS[unit]), int(float(allowed) * _UNITS[its_unit])
    return None


def _refused(error, allowed):
    told = refused(str(error))
    if hasattr(error, "needed"):
        told = error.needed, error.allowed
    if told is None:
        raise ValueError(
            f"measure.fits: this {type(error).__name__} tells no numbers of memory: "
            f"{str(error)[:200]!r}; expected a compiler's refusal, such as 'Used 18.75G of 15.75G "
            f"hbm'."
        )
    return Fit(told[0], allowed or told[1], buffers=getattr(error, "buffers", ()))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
