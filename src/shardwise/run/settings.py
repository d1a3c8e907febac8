"""All settings of a run, in frozen dataclasses; flags of the command are made from them by tyro."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from shardwise import layouts, mesh
from shardwise.layouts.catalogue import ORDER
from shardwise.model import Config

F32 = jnp.dtype("float32")


@dataclasses.dataclass(frozen=True)
class Roles:
    """How many devices each role of a layout has, and how roles are realised.

    The sizes multiply to the number of devices; one may be -1, for the devices that remain. The
    rest is as in `layouts.Layout`.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    stage: int = 1
    by: Literal["hand", "compiler"] = "hand"
    zero: Literal[1, 2, 3] = 3
    min_size: int = 0
    uneven: Literal["error", "replicate"] = "error"
    sequence: bool = False  # Megatron's sequence parallelism, beside tensor
    attention: str = "ring"  # over context; one of shardwise.context.FORMS
    dispatch: str = "all_to_all"  # to experts; one of shardwise.experts.FORMS
    schedule: str = "1f1b"  # of the stages
    microbatches: int = 1
    dtype: Literal["float32", "bfloat16"] | None = None  # in which weights are gathered and used
    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    remat: str | None = None  # a policy of jax.checkpoint_policies

    def layout(self) -> layouts.Layout:
        """The layout over the devices there are, an axis of its own name for each role above 1.

        Raises:
          ValueError: sizes that do not fit the devices, no such policy, what `Layout` raises.
        """
        count = len(mesh.devices())
        sizes = {role: getattr(self, role) for role in ORDER}
        free = [role for role, size in sizes.items() if size == -1]
        known = int(np.prod([size for size in sizes.values() if size != -1]))
        told = " × ".join(f"{role} {size}" for role, size in sizes.items() if size != 1) or "1"
        if min(sizes.values()) < -1 or 0 in sizes.values() or len(free) > 1 or count % known:
            raise ValueError(
                f"run: the layout {told} does not fit {count} devices: sizes are positive, one at "
                f"most is -1, and the others multiply to a divisor of {count}.{_more(count)}"
            )
        if not free and known != count:
            raise ValueError(
                f"run: the layout {told} takes {known} of {count} devices; give one role -1, such "
                f"as --layout.fsdp -1, for those that remain, or say --devices {known}."
                f"{_more(count)}"
            )
        sizes = {role: count // known if size == -1 else size for role, size in sizes.items()}
        taken = {role: size for role, size in sizes.items() if size > 1} or {"data": 1}
        names = [f.name for f in dataclasses.fields(self) if f.name not in ORDER]
        options = {name: getattr(self, name) for name in names}
        options["remat"] = _policy(self.remat)
        for name in ("dtype", "reduce_dtype"):
            options[name] = options[name] and jnp.dtype(options[name])
        return layouts.Layout(mesh.make(**taken), **{role: role for role in taken}, **options)


def _more(count):
    """What a program of one's own forgets, which the command does."""
    return " Simulate more by mesh.simulate(8), before anything runs." if count == 1 else ""


def _policy(name):
    if name is not None and not hasattr(jax.checkpoint_policies, name):
        known = [n for n in dir(jax.checkpoint_policies) if not n.startswith("_")]
        raise ValueError(f"run: remat={name!r}; expected one of {', '.join(known)}.")
    return name and getattr(jax.checkpoint_policies, name)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer and its schedule, each a function of optax (or optax.contrib) by name.

    A setting that the function does not take is not given to it.
    """

    name: str = "adamw"
    schedule: str = "warmup_constant_schedule"
    peak: float = 3e-3  # learning rate after the warm-up
    warmup: int = 20  # steps
    decay: int = 1000  # the step at which a schedule that decays has arrived, warm-up included
    end: float = 0.0  # the learning rate there
    weight_decay: float = 0.1
    clip: float | None = 1.0  # of the gradients' global norm

    def rate(self) -> Any:
        """The learning rate by step, counted from 0.

        Raises:
          ValueError: optax has no such schedule, or it needs more than what stands here.
        """
        given = dict(
            init_value=0.0,
            value=self.peak,
            peak_value=self.peak,
            warmup_steps=self.warmup,
            transition_steps=self.decay,
            decay_steps=self.decay,
            end_value=self.end,
        )
        if self.schedule in ("linear_schedule", "cosine_decay_schedule"):
            given["init_value"] = self.peak
        return _called("schedule", self.schedule, **given)

    def transformation(self) -> optax.GradientTransformation:
        """Clipping, then the optimizer.

        Raises:
          ValueError: as `rate`, for either name.
        """
        given = dict(learning_rate=self.rate(), weight_decay=self.weight_decay)
        tx = _called("name", self.name, **given)
        return tx if self.clip is None else optax.chain(optax.clip_by_global_norm(self.clip), tx)


def _called(setting, name, **given):
    function = getattr(optax, name, None) or getattr(optax.contrib, name, None)
    if not callable(function):
        raise ValueError(
            f"run: optimizer.{setting}={name!r}; optax has no such function, nor optax.contrib."
        )
    takes = inspect.signature(function).parameters
    lacks = [n for n, p in takes.items() if p.default is p.empty and n not in given]
    if lacks:
        raise ValueError(
            f"run: optax.{name} needs {', '.join(lacks)}, which the settings do not have; make it "
            f"in a file of yours, and hand it to run.train(..., tx=...)."
        )
    return function(**{n: value for n, value in given.items() if n in takes})


@dataclasses.dataclass(frozen=True)
class Data:
    """What is read: by default the source of Python's standard library, as bytes."""

    text: str | None = None  # a folder, a file or a glob of text files, read as bytes
    tokens: Path | None = None  # a one-dimensional array in a .npy file, of whole numbers
    packed: bool = False  # documents follow one another without padding


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Losses on rows that training never sees, of the parameters and of their mean."""

    every: int = 100  # steps; 0: never
    batches: int = 4
    sample: int = 120  # tokens written from the parameters at each evaluation; 0: none


@dataclasses.dataclass(frozen=True)
class Processes:
    """Who runs this, with others: by default found in the environment, as JAX finds it.

    SLURM, Kubernetes and TPU VMs say it themselves; else give all three.
    """

    address: str | None = None  # host:port of process 0
    count: int | None = None
    index: int | None = None
    heartbeat: int = 20  # seconds after which a process that is silent is taken for dead
    hang: float = 25.0  # seconds without progress, beyond three steps' time, that end a process


@dataclasses.dataclass(frozen=True)
class Settings:
    """A whole run. Every field is a flag, and stands in the run folder."""

    run: Path = Path("runs/first")  # the run folder
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
    layout: Roles = Roles()
    model: Config = dataclasses.field(default_factory=lambda: Config(dtype=F32, param_dtype=F32))
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    evaluation: Evaluation = Evaluation()
    processes: Processes = Processes()

    def __post_init__(self):
        object.__setattr__(self, "run", Path(self.run))
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
    """The settings of which `flat` made these; what they lack has its default."""
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


def differing(saved: dict[str, Any], settings: Settings) -> dict[str, tuple[Any, Any]]:
    """{name: (saved, now)} of the settings that differ, of those that were saved."""
    now = flat(settings)
    return {n: (saved.get(n), x) for n, x in now.items() if n in saved and saved[n] != x}


def check_resumable(saved: dict[str, Any], settings: Settings) -> list[str]:
    """The names of settings that differ and may.

    Raises:
      ValueError: others differ, each with what it was and is.
    """
    found = differing(saved, settings)
    held = {n: pair for n, pair in found.items() if not {n, n.partition(".")[0]} & set(FREE)}
    if held:
        told = "; ".join(
            f"{n} was {json.dumps(a)} and is {json.dumps(b)}" for n, (a, b) in held.items()
        )
        raise ValueError(
            f"run: {settings.run} cannot go on with other settings: {told}. What may differ: "
            f"{', '.join(FREE)}. Leave these as they were, or start another run."
        )
    return [name for name in found if name not in ("run", "resume")]
