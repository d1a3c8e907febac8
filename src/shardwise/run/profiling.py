"""The times of devices in the steps of a trace: compute, collectives, and waiting in them.

Traces are those of `jax.profiler`; XProf opens the same folder, Perfetto the `.trace.json.gz` in
it. On CPU a device is a thread, and a collective's waiting is its rendezvous; threads that share a
core both look busy, so times there tell of order and of waiting, and nothing of speed. On a GPU
operations are kernels, of which several may run side by side; waiting is not told there.
"""

import bisect
import collections
import importlib.util
import itertools
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError

from shardwise.run.folder import Folder

STEP = "jit_train_step"
_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-", "send", "recv", "nccl")
_GPU = "/device:GPU"  # as their planes are called
_RUN = "GpuExecutable::ExecuteThunks"  # the host's event of one run, within which kernels start


class Op(NamedTuple):
    """One operation on a device, in ns. `run` numbers the runs of `program` as the trace does,
    `compiled` the times that it was compiled.
    """

    device: int
    name: str
    program: str
    compiled: int
    run: int
    start: float
    stop: float
    collective: bool
    waiting: float


class Times(NamedTuple):
    """The seconds of a device in one run, of which several operations may share some."""

    compute: float
    collectives: float
    waiting: float
    idle: float  # when none of its operations runs


def read(folder: str | Path) -> list[Op]:
    """The operations of the newest trace in a folder, without those that hold others (loops); of
    GPUs it has to begin when they are idle, since runs are counted from its beginning.

    Raises:
      FileNotFoundError: no trace there.
      ValueError: a file that is no trace, or not whole.
    """
    from jax.profiler import ProfileData

    files = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(
            f"run: no trace in {folder}; make one by `shardwise train --profile 10:13`."
        )
    with warnings.catch_warnings():  # jaxlib's own types, of some releases
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            trace = files[-1].read_bytes()
            Empty.FromString(trace)  # an error where it is cut off, at which JAX 0.7 would die
            planes = list(ProfileData.from_serialized_xspace(trace).planes)
        except (RuntimeError, DecodeError) as error:
            raise ValueError(
                f"run: {files[-1]} is no whole trace ({error}); record it again."
            ) from error
        lines, runs = [(plane.name, line) for plane in planes for line in plane.lines], {}
        if any(plane.startswith(_GPU) for plane, _ in lines):
            for _, line in lines:
                runs |= _launches(line)
        return [op for plane, line in lines for op in _ops(plane, line, runs)]


def _launches(line: Any) -> dict[Any, int]:
    """{a kernel's correlation: the number of its run}, which all GPUs start in the same order."""
    runs, launches = [], []
    for event in line.events:
        if _RUN in event.name:
            runs.append((event.start_ns, event.start_ns + event.duration_ns))
        elif (correlation := dict(event.stats).get("correlation_id")) is not None:
            launches.append((event.start_ns, correlation))
    runs.sort()
    starts = [start for start, _ in runs]
    places = ((bisect.bisect(starts, at) - 1, at, name) for at, name in launches)
    return {name: run for run, at, name in places if run >= 0 and at < runs[run][1]}


def _ops(plane: str, line: Any, runs: dict[Any, int]) -> list[Op]:
    """The operations of one line of a trace, of which those that hold others are left out."""
    waits, told, kernels = [], [], plane.startswith(_GPU)
    for event in line.events:  # of a million on a host's line few are operations
        if event.name == "Rendezvous":
            waits.append((event.start_ns, event.duration_ns))
            continue
        stats = dict(event.stats)
        if kernels and stats.get("correlation_id") in runs:
            stats["run_id"] = runs[stats["correlation_id"]]
        if {"hlo_op", "run_id"} <= stats.keys():
            told.append((event, stats))
    waits.sort()
    ops = [_op(plane, event, stats, waits) for event, stats in told]
    ops.sort(key=lambda op: (op.start, -op.stop))
    if kernels:  # which hold none, and may lie within another's time
        return ops
    pairs = itertools.zip_longest(ops, ops[1:])
    return [op for op, after in pairs if after is None or after.start >= op.stop]


def _op(plane: str, event: Any, stats: dict[str, Any], waits: list[tuple[float, float]]) -> Op:
    start, stop = event.start_ns, event.start_ns + event.duration_ns
    first, last = (bisect.bisect_left(waits, (at, 0.0)) for at in (start, stop))
    return Op(
        device=int(stats.get("device_ordinal", plane.rpartition(":")[2])),
        name=event.name,
        program=str(stats.get("hlo_module")),
        compiled=int(stats.get("program_id", 0)),
        run=int(stats["run_id"]),
        start=start,
        stop=stop,
        collective=last > first or event.name.startswith(_COLLECTIVES),
        waiting=min(sum(length for _, length in waits[first:last]), stop - start),
    )


def compilations(ops: Iterable[Op]) -> dict[str, int]:
    """{program: number of its versions that ran}: one, where shapes and settings stay the same."""
    found = {(op.program, op.compiled) for op in ops}
    return dict(collections.Counter(program for program, _ in found))


def runs(ops: Iterable[Op]) -> list[list[Op]]:
    """The operations of each step, in order; in another trace than a run's, those of each run of
    the program that took most time. A ValueError where there are none.
    """
    total: dict[str, float] = collections.defaultdict(float)
    found: dict[tuple[str, int], list[Op]] = collections.defaultdict(list)
    for op in ops:
        total[op.program] += op.stop - op.start
        found[op.program, op.run].append(op)
    if not total:
        raise ValueError("run: the trace has no operation of a device; trace steps that run.")
    main = STEP if STEP in total else max(total, key=lambda name: total[name])
    steps = (each for (program, _), each in found.items() if program == main)
    return sorted(steps, key=lambda run: min(op.start for op in run))


def gaps(ops: Iterable[Op]) -> list[float]:
    """The seconds from the end of each step, on all devices, to the next start."""
    return [
        (min(op.start for op in after) - max(op.stop for op in run)) / 1e9
        for run, after in itertools.pairwise(runs(ops))
    ]


def times(ops: Iterable[Op]) -> dict[tuple[int, int], Times]:
    """{(step, device): Times}; steps count from 0."""
    return {
        (number, device): _times([op for op in run if op.device == device])
        for number, run in enumerate(runs(ops))
        for device in sorted({op.device for op in run})
    }


def _times(ops):
    compute, together = (_covered(o for o in ops if o.collective == kind) for kind in (False, True))
    waiting = min(sum(op.waiting for op in ops), together)
    idle = max(op.stop for op in ops) - min(op.start for op in ops) - _covered(ops)
    return Times(*(x / 1e9 for x in (compute, together, waiting, idle)))


def _covered(ops: Iterable[Op]) -> float:
    """The time in which at least one of the operations runs; a device may run several at once."""
    total, until = 0.0, float("-inf")
    for op in sorted(ops, key=lambda op: op.start):
        total += max(op.stop - max(op.start, until), 0.0)
        until = max(until, op.stop)
    return total


def table(found: dict[tuple[int, int], Times]) -> str:
    """The times as a table of text, in ms."""
    lines = ["step  device   compute  collectives  of it waiting     idle   (ms)"]
    for place, each in found.items():
        values = (*place, *(1e3 * x for x in each))
        lines.append("{:4}  {:6}  {:8.2f}  {:11.2f}  {:13.2f}  {:7.2f}".format(*values))
    return "\n".join(lines)


def draw(ops: Iterable[Op], file: Path) -> Path | None:
    """A picture of the first step, a lane a device; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    chosen = runs(ops)[0]
    zero, devices = min(op.start for op in chosen), sorted({op.device for op in chosen})
    figure = Figure(figsize=(9, 0.4 * len(devices) + 1.2), layout="constrained")
    axes = figure.subplots()
    for kind, colour in {"compute": "#3a7bc8", "collective": "#fe996b"}.items():
        for device in devices:
            mine = [o for o in chosen if o.device == device and o.collective == (kind != "compute")]
            bars = [((o.start - zero) / 1e6, (o.stop - o.start) / 1e6) for o in mine]
            label = kind if device == devices[0] else None
            axes.broken_barh(bars, (device - 0.4, 0.8), facecolors=colour, label=label)
    axes.set(xlabel="ms", ylabel="device", yticks=devices)
    axes.legend(loc="upper right")
    figure.savefig(file, dpi=150)
    return file


def show(run: tyro.conf.Positional[Path]) -> None:
    """Show what each device did in the steps of a run's newest trace.

    Args:
      run: the run folder.
    """
    folder = Folder(run).path
    ops = read(folder / "profile")
    print(table(times(ops)))
    drawn = draw(ops, folder / "profile.png")
    print(f"Look: {drawn}" if drawn else "No picture: matplotlib is not installed.")
