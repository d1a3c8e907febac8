"""Settings as the run folder has them; the names of those that may differ when a run goes on."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardwise.run.settings import Settings

# What may differ when a run goes on. The rest decides which numbers come next.
FREE = ("run", "steps", "save_every", "keep", "resume", "devices", "tensorboard", "profile", "bad")
FREE += ("limit", "layout", "evaluation", "processes", "model.stages", "model.remat")


def flat(settings: Any) -> dict[str, Any]:
    """{"layout.fsdp": value, ...}: every setting, as JSON has it."""
    found = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{name}": x for name, x in flat(value).items()}
        else:
            found[field.name] = _plain(value)
    return found


def from_flat(values: dict[str, Any], kind: Any = Settings) -> Any:
    """The settings of which `flat` made these values; what they lack has its default."""
    given = {}
    for field in dataclasses.fields(kind):
        default = getattr(kind(), field.name)
        if dataclasses.is_dataclass(default):
            within = {
                name.partition(".")[2]: value
                for name, value in values.items()
                if name.startswith(f"{field.name}.")
            }
            given[field.name] = from_flat(within, type(default))
        elif field.name in values:
            given[field.name] = _parsed(field.name, values[field.name], default)
    return kind(**given)


def _plain(value):
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    simple = value is None or isinstance(value, bool | int | float | str)
    return value if simple else str(jnp.dtype(value))


def _parsed(name, value, default):
    if name in ("run", "tokens") and value is not None:
        return Path(value)
    if name in ("dtype", "param_dtype") and not (default is None or isinstance(default, str)):
        return jnp.dtype(value)
    if isinstance(default, float) and isinstance(value, str):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def differing(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{name: (saved, now)} of the settings that differ, of those that were saved."""
    return {n: (saved.get(n), x) for n, x in now.items() if n in saved and saved[n] != x}


def check_resumable(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> list[str]:
    """The names of settings that differ from those that `folder` has, and may; both as in `flat`.

    Raises:
      ValueError: others differ, each with what it was and is.
    """
    found = differing(saved, now)
    held = {n: pair for n, pair in found.items() if not {n, n.partition(".")[0]} & set(FREE)}
    if held:
        told = "; ".join(
            f"{n} was {json.dumps(a)} and is {json.dumps(b)}" for n, (a, b) in held.items()
        )
        raise ValueError(
            f"run: {folder} cannot go on with other settings: {told}. What may differ: "
            f"{', '.join(FREE)}. Leave these as they were, or start another run."
        )
    return [name for name in found if name not in ("run", "resume")]
