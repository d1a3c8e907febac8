"""A proposed layout as what realises it: settings of `layouts.Layout`, its code, and flags."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from shardwise.context.kernels import LANES
from shardwise.model import Config
from shardwise.plan.roles import Roles
from shardwise.topology import Chips
from shardwise.train import Optimizer

_CODE = {
    "tiles": "context.tiled",
    "splash": "context.splash()",
    "offload": "layouts.offload",
    "nothing_saveable": "jax.checkpoint_policies.nothing_saveable",
    "dots_with_no_batch_dims_saveable": "jax.checkpoint_policies.dots_with_no_batch_dims_saveable",
    "bfloat16": "jnp.bfloat16",
}


def kernel(sequence: int, chips: Chips) -> str:
    """What does attention to whole sequences: Pallas' kernel where there is one, or our tiles."""
    return "tiles" if chips.chip.node or sequence % LANES else "splash"


def settings(roles: Roles, config: Config, kernel: str = "tiles") -> dict[str, Any]:
    """The layout's settings besides its axes, with the values that `shardwise train` has for them.

    `kernel` counts where devices see whole sequences.
    """
    again = "dots_with_no_batch_dims_saveable" if roles.products else "nothing_saveable"
    again = "offload" if roles.offload else again
    narrow = jnp.dtype(config.dtype) != jnp.dtype(config.param_dtype)
    found = {
        "sequence": roles.tensor > 1,
        "attention": "zigzag" if roles.context > 1 else None,
        "kernel": None if roles.context > 1 else kernel,
        "microbatches": roles.microbatches if roles.microbatches > 1 else None,
        "dtype": jnp.dtype(config.dtype).name if narrow else None,
        "remat": again if roles.remat else None,
    }
    return {name: value for name, value in found.items() if value}


def code(roles: Roles, config: Config, kernel: str = "tiles") -> str:
    """The layout as a Python expression of `context`, `jax`, `jnp`, `layouts` and `mesh`."""
    sizes = roles.sizes or {"data": 1}
    said = {role: f'"{role}"' for role in sizes}
    for name, value in settings(roles, config, kernel).items():
        said[name] = _CODE.get(value, f'"{value}"') if isinstance(value, str) else str(value)
    axes = ", ".join(f"{role}={size}" for role, size in sizes.items())
    return f"layouts.Layout(mesh.make({axes}), {', '.join(f'{n}={x}' for n, x in said.items())})"


def flags(
    roles: Roles,
    config: Config,
    optimizer: Optimizer,
    batch: int,
    sequence: int,
    kernel: str = "tiles",
) -> str:
    """The flags of `shardwise train` that train the decoder in this layout, with no mean kept."""
    given = {"batch": batch, "sequence": sequence, "ema": None}
    given |= {f"layout.{role}": n for role, n in ({"fsdp": 1} | roles.sizes).items()}
    said = settings(roles, config, kernel)
    given |= {f"layout.{name}": value for name, value in said.items()}
    groups = {"model": (config, Config()), "optimizer": (optimizer, Optimizer())}
    for name, (chosen, usual) in groups.items():
        every = dataclasses.asdict(chosen).items()
        given |= {f"{name}.{key}": x for key, x in every if x != getattr(usual, key)}
    return " ".join(_flag(name.replace("_", "-"), value) for name, value in given.items())


def _flag(name, value):
    if isinstance(value, bool):
        group, _, last = name.rpartition(".")
        return f"--{group}.{last}" if value else f"--{group}.no-{last}"
    return f"--{name} {jnp.dtype(value).name if name.endswith('dtype') else value}"
