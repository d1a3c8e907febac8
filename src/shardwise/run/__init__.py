"""A run: the training program, its settings, and what it promises.

The command `shardwise train` trains the decoder on text files. A program trains a model of its own:

    settings = run.Settings(run=Path("runs/mine"), steps=1000, layout=run.Roles(fsdp=4, context=2))
    result = run.train(settings, create=create, loss=loss, batches=rows, tx=tx)

The program takes flags by `run.flags`, and may be one of several processes, between `run.join` and
`run.leave`. A stopped run goes on from its newest whole checkpoint (`resume`), with the same bits
on the same devices and, if its layout is `exact`, on others; else there up to rounding.
"""

from shardwise.run.optimizers import averaged, guarded
from shardwise.run.settings import Processes, Roles, Settings, flags
from shardwise.run.signals import join, leave
from shardwise.run.state import stream
from shardwise.run.training import BadStep, train

__all__ = [
    "BadStep",
    "Processes",
    "Roles",
    "Settings",
    "averaged",
    "flags",
    "guarded",
    "join",
    "leave",
    "stream",
    "train",
]
