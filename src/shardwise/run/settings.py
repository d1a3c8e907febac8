"""All settings of a run, in frozen dataclasses: as flags of a command line, and as JSON."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import traverse_util

from shardwise import context, layouts, mesh
from shardwise.layouts.catalogue import ORDER
from shardwise.model import Config
from shardwise.run.folder import Folder, on_disk
from shardwise.train import Optimizer

F32 = jnp.dtype("float32")
_REGISTRY = tyro.constructors.ConstructorRegistry()
# Others of JAX's policies are functions that make one, of names.
_PLAIN = """checkpoint_dots checkpoint_dots_with_no_batch_dims dots_saveable
dots_with_no_batch_dims_saveable everything_saveable nothing_saveable""".split()
_POLICIES = {name: getattr(jax.checkpoint_policies, name) for name in _PLAIN}
_POLICIES |= {"offload": layouts.offload, None: None}
_KERNELS = {"tiles": context.tiled, "splash": context.splash(), "cudnn": context.cudnn()}
# What may differ when a run goes on. The rest decides which numbers come next.
_FREE = ("run", "steps", "save_every", "keep", "resume", "devices", "profile", "bad", "limit")
_FREE += ("layout", "evaluation", "processes", "model.stages", "model.remat", "hash_every")
_FREE += ("model.loss_chunks",)
# What may not differ in an exact run: it changes the program of a block.
_EXACT = ("layout.dtype", "layout.kernel", "layout.remat")
_EXACT += ("model.remat", "model.stages", "model.loss_chunks")


@dataclasses.dataclass(frozen=True)
class Roles:
    """The layout of a run: how many devices each role of a `layouts.Layout` has, and its settings.

    One of `data`, `fsdp`, `tensor`, `expert`, `context` and `stage` may be -1, for the devices that
    remain: by default `fsdp`, so that `Roles(data=-1, fsdp=1)` gives them to another. A setting has
    the meaning of the layout's of that name, which says more; here all are numbers or names.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    stage: int = 1
    by: Literal["hand", "compiler"] = "hand"  #: Who writes the collectives, "hand" or "compiler".
    zero: Literal[1, 2, 3] = 3  #: ZeRO's stage, 1, 2 or 3.
    min_size: int = 0  #: Arrays of fewer elements stay whole along fsdp.
    #: Whether arrays that fsdp cannot cut stay whole, "replicate", or are an "error".
    uneven: Literal["error", "replicate"] = "replicate"
    sequence: bool = False  #: Megatron's sequence parallelism, beside tensor.
    #: Attention over context: "ring", "striped", "zigzag", "all_gather" or "ulysses".
    attention: str = "ring"
    #: Attention of whole sequences, by all "scores" at once, in "tiles", or by a kernel for TPUs
    #: ("splash") or GPUs ("cudnn").
    kernel: Literal["scores", "tiles", "splash", "cudnn"] = "scores"
    dispatch: str = "all_to_all"  #: How tokens reach experts: "all_to_all", "gather" or "ragged".
    #: The schedule of the stages: "gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "kimi_k2",
    #: "zb_h1", "zb_h2", "zb_v" or "dualpipe_v".
    schedule: str = "1f1b"
    microbatches: int = 1  #: The number of microbatches of a step.
    #: Dtype in which weights are used, "float32" or "bfloat16"; None is their own.
    dtype: Literal["float32", "bfloat16"] | None = None
    #: Dtype of gradients' sums, "float32" or "bfloat16"; None is that in which weights are used.
    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    #: A policy of jax.checkpoint_policies: "nothing_saveable", "everything_saveable",
    #: "dots_saveable" or "dots_with_no_batch_dims_saveable"; or "offload", of what enters layers to
    #: the host. With None only the loss itself says what is recomputed.
    remat: str | None = None
    #: Blocks of rows, a power of two, for the same bits on 1, 2, 4 ... up to so many devices; 0 for
    #: none.
    exact: int = 0

    def layout(self) -> layouts.Layout:
        """The layout over the devices there are, with an axis of its own for each role above 1; a
        ValueError if the sizes do not fit them, or the layout refuses a setting.
        """
        options = dict(vars(self))
        sizes = {role: options.pop(role) for role in ORDER}
        asked = {role: size for role, size in sizes.items() if size != 1} or {"data": 1}
        try:
            fitted = mesh.resolve("run: layout", asked, len(mesh.devices()), exactly=True)
        except ValueError as error:
            raise ValueError(
                f"{error} One may be -1, as --layout.fsdp -1, for the devices that remain; or say "
                f"--devices, or mesh.simulate(8) before anything runs, for more of them."
            ) from None
        if self.remat not in _POLICIES:
            known = ", ".join(map(str, _POLICIES))
            raise ValueError(f"run: remat={self.remat!r}; expected one of {known}.")
        taken = {role: size for role, size in fitted.items() if size > 1} or {"data": 1}
        options |= {role: role for role in taken}
        options |= {"remat": _POLICIES[self.remat], "kernel": _KERNELS.get(self.kernel)}
        for name in ("dtype", "reduce_dtype"):
            options[name] = options[name] and jnp.dtype(options[name])
        return layouts.Layout(mesh.make(**taken), **options)


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of `shardwise train`: by default the source of Python's standard library, as bytes.

    A document is a file of text, or all of `tokens`; to give both is a ValueError.
    """

    text: str | None = None  #: A folder, a file or a glob of text files, read as bytes.
    tokens: str | None = None  #: A .npy file with a one-dimensional array of token numbers.
    packed: bool = False  #: Documents follow one another without padding.

    def __post_init__(self):
        if self.tokens is not None:  # one file has one name: a run that goes on compares it
            object.__setattr__(self, "tokens", str(Path(self.tokens)))


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Losses on rows that training never sees, of the parameters and of their mean."""

    every: int = 100  #: Steps between evaluations, or 0 for none.
    batches: int = 4  #: Batches of an evaluation.
    sample: int = 120  #: Tokens that `shardwise train` writes each time, by whole parameters, or 0.


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run. SLURM, Kubernetes and a TPU VM say the first three fields; elsewhere
    give all of them, or none for one process.
    """

    address: str | None = None  #: Host and port of process 0, as `10.0.0.1:8476`.
    count: int | None = None  #: The number of processes.
    index: int | None = None  #: The number of this process, from 0.
    heartbeat: int = 20  #: Seconds after which a process that is silent is taken for dead.
    hang: float = 25.0  #: Seconds without progress, or five steps if longer, that end a process.


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a whole run. Every field is a flag; the run folder has those that were used.

    Groups of settings are `layout`, a `Roles`; `model`, a `model.Config`; `optimizer`, a
    `train.Optimizer`; `data`, a `Data`; `evaluation`; and `processes`.

    Raises:
      ValueError: a value that is not allowed, or a run folder that is an address.
    """

    run: Path = Path("runs/first")  #: The run folder, on a disk that all processes see.
    steps: int = 300  #: The last step; the first is 1.
    seed: int = 0  #: The seed of parameters, dropout and the order of rows.
    batch: int = 32  #: Rows of a step, of all devices together.
    sequence: int = 128  #: Tokens of a row.
    #: Steps between checkpoints, 1 or more. The last step is saved too, and that of a stop.
    save_every: int = 100
    hash_every: int = 0  #: Steps between hashes of all arrays, for `shardwise diff`, or 0 for none.
    keep: int = 2  #: The number of newest checkpoints that stay.
    resume: bool = False  #: Go on from the newest whole checkpoint, if there is one.
    ema: float | None = 0.99  #: Decay of the mean of the parameters. With None there is no mean.
    bad: Literal["stop", "skip"] = "stop"  #: What happens at a bad step, see `BadStep`.
    limit: float = float("inf")  #: Norm of the gradients above which a step is bad too.
    #: Devices of all processes together, simulated where there are fewer real ones. By default all
    #: accelerators, or without any eight simulated devices.
    devices: int | None = None
    profile: str | None = None  #: First and last step of a trace, as "10:13". None traces nothing.
    layout: Roles = dataclasses.field(default_factory=Roles)
    model: Config = dataclasses.field(default_factory=lambda: Config(dtype=F32, param_dtype=F32))
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    data: Data = Data()
    evaluation: Evaluation = Evaluation()
    processes: Processes = Processes()

    def __post_init__(self):
        object.__setattr__(self, "run", on_disk(self.run))
        whole = ("steps", "batch", "sequence", "save_every", "keep", "devices")
        for name, low in (dict.fromkeys(whole, 1) | {"seed": 0, "hash_every": 0}).items():
            if getattr(self, name) is not None and getattr(self, name) < low:
                raise ValueError(f"run: {name}={getattr(self, name)}; expected {low} or more.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"run: ema={self.ema}; expected a decay between 0 and 1, or None.")
        self.profiled()
        if self.data.packed and self.layout.kernel == "cudnn":
            raise ValueError(
                "run: data.packed puts several documents into a row, and layout.kernel=cudnn takes "
                "rows of one; take --layout.kernel tiles, or leave --data.packed out."
            )
        if not self.limit > 0:
            raise ValueError(f"run: limit={self.limit}; expected a norm above 0.")

    def profiled(self) -> range:
        """The range of the steps to trace, empty for None; a ValueError if `profile` is no pair."""
        if self.profile is None:
            return range(0)
        first, _, last = self.profile.partition(":")
        if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
            raise ValueError(
                f"run: profile={self.profile!r}; expected the first and the last step, as 10:13."
            )
        return range(int(first), int(last) + 1)


def flags(
    default: Settings | None = None, argv: Sequence[str] | None = None, prog: str | None = None
) -> Settings:
    """The `Settings` of a command line, by the flags of `shardwise train`; the rest is `default`'s.

    A field is `--name`, one of a group `--group.name`; a bool has `--no-name`, `--group.no-name`
    too, and None is a word: `["--steps", "1000", "--layout.fsdp", "4", "--ema", "None"]`. `argv`
    are these words, by default this process's, `prog` the program's name in its help. With
    `--resume`, what is not given is as the run folder has it, rather than `default`'s, but for
    `profile` and the processes' address, count and index. What is given holds (`train` may refuse).

    Raises:
      SystemExit: a flag that is unknown or cannot be read (status 2), or `--help` (0).
      ValueError: settings that are not allowed, or saved ones that cannot be read.
    """
    argv, default = list(sys.argv[1:] if argv is None else argv), default or Settings()
    if "--resume" in argv:
        saved = Folder(option(argv, "--run") or default.run).settings() or {}
        once = ("profile", *(f"processes.{name}" for name in ("address", "count", "index")))
        default = from_flat({n: x for n, x in saved.items() if n not in once}, default)
    return tyro.cli(Settings, prog=prog, args=argv, default=default, registry=_REGISTRY)


def option(argv: Sequence[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value`, the last one, as parsers take it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(name, dest="found", nargs="?")
    return parser.parse_known_args(argv)[0].found


@_REGISTRY.primitive_rule
def _dtype(info):
    """The rule by which a dtype is read."""
    if info.type is not np.dtype:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{float32,bfloat16,float16}",
        instance_from_str=lambda words: jnp.dtype(words[0]),
        is_instance=lambda x: isinstance(x, np.dtype),
        str_from_instance=lambda x: [jnp.dtype(x).name],
    )


def flat(settings: Settings) -> dict[str, Any]:
    """{"layout.fsdp": value, ...}: every setting, as JSON has it."""
    values = traverse_util.flatten_dict(dataclasses.asdict(settings), sep=".")
    return {name: _plain(value) for name, value in values.items()}


def from_flat(values: dict[str, Any], default: Settings | None = None) -> Settings:
    """The settings of which `flat` made these values; `default` has what they lack."""
    try:
        return _parsed(traverse_util.unflatten_dict(values, sep="."), default or Settings())
    except TypeError as error:
        raise ValueError(
            f"run: saved settings are not of their types ({error}): {values}. Mend settings.json "
            f"in the run folder."
        ) from None


def _plain(value):
    if isinstance(value, np.dtype | type):
        return jnp.dtype(value).name
    finite = not isinstance(value, float) or np.isfinite(value)
    return value if finite and not isinstance(value, Path) else str(value)


def _parsed(value, default):
    if dataclasses.is_dataclass(default):
        given = {n: _parsed(value[n], x) for n, x in vars(default).items() if n in value}
        return dataclasses.replace(default, **given)
    if isinstance(default, np.dtype | type):
        return jnp.dtype(value)
    return float(value) if isinstance(default, float) and isinstance(value, str) else value


def check_resumable(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raise ValueError if a setting that was saved differs and decides numbers; as of `flat`."""
    fixed = ("layout.exact", *(_EXACT if now.get("layout.exact") else ()))
    held = (n for n in now if n in fixed or not {n, n.partition(".")[0]} & set(_FREE))
    saved = flat(Settings()) | saved  # a field that is newer than the folder had its default
    differ = (n for n in held if n in saved and saved[n] != now[n])
    if told := [f"{n} was {json.dumps(saved[n])} and is {json.dumps(now[n])}" for n in differ]:
        raise ValueError(
            f"run: {folder} cannot go on with other settings: {'; '.join(told)}. What may differ: "
            f"{', '.join(_FREE)}, but not {', '.join(fixed)}. Leave these as they were, or start "
            f"another run."
        )
