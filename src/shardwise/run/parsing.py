"""Settings by the flags of a command line."""

import dataclasses
import sys
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import tyro

from shardwise.run.folder import Folder
from shardwise.run.settings import Settings
from shardwise.run.stored import flat, from_flat


def flags(
    default: Settings | None = None, argv: Sequence[str] | None = None, prog: str | None = None
) -> Settings:
    """The settings: `default` with what the command line says, by the flags of `shardwise train`.

    Of a run that goes on (`--resume`), its saved settings stand where `default` would.
    """
    argv, default = list(sys.argv[1:] if argv is None else argv), default or Settings()
    if "--resume" in argv:
        saved = Folder(_run_of(argv, default)).settings()
        default = _again(from_flat(flat(default) | saved)) if saved else default
    return tyro.cli(
        Settings,
        prog=prog,
        args=argv,
        default=default,
        registry=_registry(),
    )


def _again(settings):
    """The settings of a run without its processes' addresses and trace, which differ each time."""
    alone = dict(address=None, count=None, index=None)
    processes = dataclasses.replace(settings.processes, **alone)
    return dataclasses.replace(settings, processes=processes, profile=None)


def _run_of(argv, default):
    for at, word in enumerate(argv):
        if word == "--run" and at + 1 < len(argv):
            return argv[at + 1]
        if word.startswith("--run="):
            return word.partition("=")[2]
    return default.run


def _registry():
    """A tyro registry with the rule by which a dtype is read."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def dtype(info):
        if info.type is not np.dtype:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="{float32,bfloat16,float16}",
            instance_from_str=lambda words: jnp.dtype(words[0]),
            is_instance=lambda x: isinstance(x, np.dtype),
            str_from_instance=lambda x: [jnp.dtype(x).name],
        )

    return registry
