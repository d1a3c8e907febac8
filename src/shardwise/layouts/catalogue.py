"""The layouts by name, over which tests and comparisons loop."""

from collections.abc import Callable
from typing import Any

from shardwise import mesh
from shardwise.costs.arrays import ORDER
from shardwise.layouts.layout import Layout


def over(roles: tuple[str, ...], n: int, **settings: Any) -> Layout:
    """A layout of these roles on `n` devices, each role on an axis of its name.

    Every role but the first has two devices, and the first has what remains; the last axis, along
    which neighbours talk most, is that of `tensor`.

    Raises:
      ValueError: `n` is no multiple of what the other roles take.
    """
    asked = dict.fromkeys(sorted(roles, key=ORDER.index), 2) | {roles[0]: -1}
    grid = mesh.make(**mesh.resolve("layouts", asked, n))
    return Layout(grid, **{role: role for role in roles}, **settings)


def entry(*roles: str, **settings: Any) -> Callable[[int], Layout]:
    """An entry of `LAYOUTS`, a function of n: `over` these roles, with these settings."""
    return lambda n: over(roles, n, **settings)


LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "data": entry("data"),
    "zero1": entry("fsdp", zero=1),
    "zero2": entry("fsdp", zero=2, microbatches=2),
    "fsdp": entry("fsdp"),
    "fsdp by compiler": entry("fsdp", by="compiler"),
    "hybrid": entry("fsdp", "data"),
    "tensor": entry("tensor"),
    "tensor, sequence": entry("tensor", sequence=True),
    "ring": entry("context"),
    "striped": entry("context", attention="striped"),
    "zigzag": entry("context", attention="zigzag"),
    "all_gather": entry("context", attention="all_gather"),
    "ulysses": entry("context", "data", attention="ulysses"),
    "context by compiler": entry("context", by="compiler"),
    "expert": entry("expert"),
    "expert by gathering": entry("expert", dispatch="gather"),
    "expert by slices": entry("expert", dispatch="ragged"),
    "fsdp, expert": entry("fsdp", "expert"),
    "expert by compiler": entry("expert", by="compiler"),
    "fsdp, expert, context": entry("fsdp", "expert", "context"),
    "stage": entry("stage", microbatches=8),
    "fsdp, tensor": entry("fsdp", "tensor", sequence=True),
    "fsdp, tensor by compiler": entry("fsdp", "tensor", by="compiler"),
    "fsdp, context": entry("fsdp", "context", attention="zigzag"),
    "fsdp, context, tensor": entry("fsdp", "context", "tensor"),
    "stage, fsdp": entry("stage", "fsdp", microbatches=4, by="compiler"),
    "stage, fsdp by hand": entry("stage", "fsdp", microbatches=4),
    "stage, fsdp, context by hand": entry(
        "stage", "fsdp", "context", microbatches=4, attention="zigzag"
    ),
    "stage, fsdp, tensor by hand": entry(
        "stage", "fsdp", "tensor", microbatches=4, schedule="zb_h1"
    ),
    "stage, fsdp, expert by hand": entry("stage", "fsdp", "expert", microbatches=4),
}
