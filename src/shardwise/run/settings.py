"""All settings of a run, in frozen dataclasses; flags of the command are made from them by tyro."""

import dataclasses
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from shardwise.model import Config
from shardwise.run.folder import on_disk
from shardwise.run.optimizers import Optimizer
from shardwise.run.roles import Roles

F32 = jnp.dtype("float32")


@dataclasses.dataclass(frozen=True)
class Data:
    """The data to read: by default the source of Python's standard library, as bytes."""

    text: str | None = None  # a folder, a file or a glob of text files, read as bytes
    tokens: Path | None = None  # a one-dimensional array in a .npy file, of whole numbers
    packed: bool = False  # documents follow one another without padding


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Losses on rows that training never sees, of the parameters and of their mean."""

    every: int = 100  # steps; 0: never
    batches: int = 4
    sample: int = (
        120  # tokens written at each evaluation, by parameters whole on each device; 0: none
    )


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run: by default found in the environment, as JAX finds them.

    SLURM, Kubernetes and TPU VMs tell them; else give address, count and index.
    """

    address: str | None = None  # host:port of process 0
    count: int | None = None
    index: int | None = None
    heartbeat: int = 20  # seconds after which a process that is silent is taken for dead
    hang: float = 25.0  # seconds without progress, beyond three steps' time, that end a process


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a whole run. Every field is a flag, and stands in the run folder."""

    run: Path = Path("runs/first")  # the run folder, on a disk that all processes see
    steps: int = 300
    seed: int = 0
    batch: int = 32  # rows of a step, of all devices together
    sequence: int = 128  # tokens of a row
    save_every: int = 100  # steps
    keep: int = 2  # newest checkpoints that stay
    resume: bool = False  # go on from the newest whole checkpoint, if there is one
    ema: float | None = 0.99  # decay of the mean of the parameters; None: no mean
    bad: Literal["stop", "skip"] = "stop"  # what a step does whose gradients are not finite
    limit: float = float("inf")  # norm of the gradients above which a step counts as bad
    devices: int = 8  # simulated, where there are fewer real ones; of all processes together
    tensorboard: bool = False  # events too, by the extra `tensorboard`
    profile: str | None = None  # first and last step of a trace, as 10:13
    layout: Roles = dataclasses.field(default_factory=Roles)
    model: Config = dataclasses.field(default_factory=lambda: Config(dtype=F32, param_dtype=F32))
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    data: Data = Data()
    evaluation: Evaluation = Evaluation()
    processes: Processes = Processes()

    def __post_init__(self):
        object.__setattr__(self, "run", on_disk(self.run))
        least = dict(steps=1, batch=1, sequence=1, save_every=1, keep=1, devices=1, seed=0)
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"run: {name}={getattr(self, name)}; expected {low} or more.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"run: ema={self.ema}; expected a decay between 0 and 1, or None.")
        self.profiled()
        if not self.limit > 0:
            raise ValueError(f"run: limit={self.limit}; expected a norm above 0.")

    def profiled(self) -> range:
        """The steps of which a trace is made.

        Raises:
          ValueError: `profile` is no range of steps.
        """
        if self.profile is None:
            return range(0)
        first, _, last = self.profile.partition(":")
        if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
            raise ValueError(
                f"run: profile={self.profile!r}; expected the first and the last step, as 10:13."
            )
        return range(int(first), int(last) + 1)
