"""Programs compiled for chips that are not here, by the compiler that is used where they are."""

import dataclasses
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

from shardwise.measure.memory import bytes_per_device, refused
from shardwise.topology import child, gpu
from shardwise.topology.slices import PLATFORMS, ChipMesh

_ROUNDING = 2**30 / 100  # of the totals that a refusal names
_SHOWN = 16  # of the largest arrays
_SIZES = ("argument", "output", "alias", "temp", "generated_code")
_ALLOCATION = re.compile(r"allocation \d+: size \d+,?(.*)")
_VALUE = re.compile(
    r" value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\): (\(?[a-z]\w*\[[^\]]*\])"
)


class Buffer(NamedTuple):
    """An array in HBM: its `bytes`, with padding; its `kind`, "argument", "output" or "temporary";
    the `array`, as "f32[8,128]", and the `name` of the instruction that makes it, as in HLO; and
    `source`, the operation that JAX named, or the argument's path; "" if the compiler made it.
    """

    bytes: int
    kind: str
    array: str
    name: str
    source: str

    def __str__(self) -> str:
        return f"{self.bytes / 2**30:.2f} GiB  {self.kind} {self.array}  {self.source or self.name}"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program as the compiler made it: a value, which `measure` reads and which cannot run.

    Fields:
      text: optimized HLO, in the order in which it is executed.
      sizes: the bytes on a device of arguments, outputs, aliases, temporaries and code.
      buffers: the largest arrays, 16 at most, each a `Buffer`.
      report: the compiler's text on memory, or "".
      coordinates: a tuple for each device, in the order of the mesh: of a TPU (x, y, z, core,
        slice), its places along the torus first; of a GPU (its number in its node, the node).
    """

    mesh: ChipMesh
    text: str = dataclasses.field(repr=False)
    sizes: tuple[int, ...] = dataclasses.field(repr=False)  # of _SIZES
    buffers: tuple[Buffer, ...] = dataclasses.field(repr=False)
    report: str = dataclasses.field(repr=False)
    coordinates: tuple[tuple[int, ...], ...] = dataclasses.field(repr=False)

    @property
    def usable_hbm(self) -> int:
        return self.mesh.chips.usable_hbm

    @property
    def hbm_bytes(self) -> int | None:
        """The bytes that the compiler counts against `usable_hbm`; None if it reports none."""
        return total(self.report)

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> SimpleNamespace:
        """The `sizes` as attributes, by JAX's names: `argument_size_in_bytes`, and so `output_`,
        `alias_`, `temp_` and `generated_code_`.
        """
        pairs = zip(_SIZES, self.sizes, strict=True)
        return SimpleNamespace(**{f"{kind}_size_in_bytes": size for kind, size in pairs})


class DoesNotFit(ValueError):
    """The error of a program that does not fit: `needed` and `allowed` bytes, largest `buffers`."""

    def __init__(self, mesh: ChipMesh, needed: int, allowed: int, buffers: tuple[Buffer, ...]):
        self.needed, self.allowed, self.buffers = needed, allowed, buffers
        who = "JAX takes" if mesh.chips.chip.node else "the compiler allows"
        told = (
            f"topology.compile: on {mesh.chips} this program needs {needed / 2**30:.2f} GiB of "
            f"HBM on a device, and {who} {allowed / 2**30:.2f}. The largest arrays:"
        )
        super().__init__("\n  ".join([told, *map(str, buffers[:5])]))


def compile(
    lowered: jax.stages.Lowered, mesh: ChipMesh, options: Mapping[str, Any] | None = None
) -> Compiled:
    """The program that the chips' compiler makes of a lowered one, which `mesh.lower` returns.

    It is a value that `measure` reads and that cannot run. For TPUs the compiler is Google's. For
    GPUs it is XLA's: having no GPU on which to try kernels, it takes default tiles for products and
    a slower sort, and knows no cuDNN; more than `usable_hbm` is refused here. `options` is a dict
    of the compiler's own. It runs in a child process. Its result is kept in $SHARDWISE_CACHE, or
    shardwise/ in the user's cache, by a hash of the program (with its operations' names, without
    files and lines), the chips, options and versions.

    Raises:
      DoesNotFit: the program needs more memory than a device has.
      ValueError: the program was lowered for another mesh.
      ImportError: the compiler is not installed (for TPUs `pip install 'shardwise[tpu]'`, for GPUs
        `python -m shardwise.topology`), or does not exist here, as on all but Linux on x86_64.
      RuntimeError: the compiler fails in another way.
    """
    module = program_text(lowered)
    _check(lowered, module, mesh)
    request = _request(mesh, options or {})

    def made():
        result = child.run(request, module)
        # The assignment is large, and only its largest entries are asked for.
        result["buffers"] = _largest(result.pop("assignment"), result["text"])
        return result

    return _value(mesh, child.cached([request, child.versions(mesh.chips.chip)], module, made))


def program_text(lowered: jax.stages.Lowered) -> str:
    """The text of the program, with the names of operations, but not who wrote and who called."""
    if not isinstance(lowered, jax.stages.Lowered):
        raise TypeError(
            f"topology.compile takes a lowered program, and got {type(lowered).__name__}; pass "
            f"mesh.lower(jitted, *abstract_arguments)."
        )
    text = lowered.as_text(debug_info=True)
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, flags=re.M))

    def named(alias):
        if found := re.fullmatch(r'("(?:[^"\\]|\\.)*")(?:\((#loc\d*)\))?', places[alias]):
            within = named(found[2]) if found[2] else None
            return f"{found[1]}({within})" if within else found[1]
        return None

    body = "\n".join(line for line in text.splitlines() if not line.startswith("#loc"))
    return re.sub(r"#loc\d*", lambda found: named(found[0]) or "unknown", body)


def _value(mesh, result):
    buffers = tuple(Buffer(*buffer) for buffer in result["buffers"])
    usable = mesh.chips.usable_hbm
    if said := result.get("refusal"):
        if not (told := refused(said)):
            raise RuntimeError(f"topology.compile: the compiler refuses for another reason: {said}")
        needed, allowed = told
        exact = total(result["report"]) or needed
        if abs(exact - needed) < _ROUNDING or "Allocation" in said:  # of one array alone
            needed = exact
        raise DoesNotFit(mesh, needed, min(allowed, usable), buffers)
    sizes, places = tuple(result["sizes"]), tuple(map(tuple, result["coordinates"]))
    compiled = Compiled(mesh, result["text"], sizes, buffers, result["report"], places)
    needed = bytes_per_device(compiled).total
    if mesh.chips.chip.node and needed > usable:
        raise DoesNotFit(mesh, needed, usable, buffers)
    return compiled


def _request(mesh, options):
    chips, across = mesh.chips, mesh.across_slices()
    inside = [size // part for (_, size), part in zip(mesh.axes, across, strict=True)]
    where = {"inside": inside, "across": list(across), "options": dict(options)}
    if chips.chip.node:
        target = gpu.description(chips.chip)
        # Without a GPU no kernels are tried; 0.7.2 has to be told.
        where["options"] = {"xla_gpu_autotune_level": 0} | where["options"]
        return {"name": str(chips), "node": chips.shape[0], "target": target} | where
    topology = {"num_slices": chips.slices} if chips.slices > 1 else {}
    if chips.kind == "v4":
        topology["chip_config_name"] = "megacore"  # else a chip is two devices
    name = str(dataclasses.replace(chips, slices=1))
    return {"name": name, "topology": topology, **where}


def _check(lowered, module, mesh):
    said = re.search(r"mhlo.num_partitions = (\d+)", module)
    meshes = re.findall(r"sdy\.mesh @\S+ = <\[([^\]]+)\]", module)
    pairs = (re.findall(r'"([^"]+)"=(\d+)', axes) for axes in meshes)
    named = [tuple((name, int(size)) for name, size in each) for each in pairs]
    has = PLATFORMS.get(lowered, "another platform"), int(said[1]) if said else 1
    if has != (mesh.platform, mesh.chips.devices) or (named and mesh.axes not in named):
        raise ValueError(
            f"topology.compile: the program was lowered for {has[0]}, {has[1]} devices, the mesh "
            f"{dict(*named[:1])}, and not for {mesh.chips}, {mesh.platform}, "
            f"{mesh.chips.devices} devices, the mesh {mesh.shape}; pass what mesh.lower of this "
            f"mesh returns, with shardings of mesh.abstract, for one argument at least."
        )


def _largest(assignment: str, text: str) -> tuple[Buffer, ...]:
    """The largest arrays of a buffer assignment, those at one place counted once; largest first."""
    found, kind = {}, None
    for line in assignment.splitlines():
        if allocation := _ALLOCATION.match(line):
            kind, place = _kind(allocation[1]), line
        elif found and line.strip() and not line.startswith(" value:"):
            break
        elif kind and (value := _VALUE.match(line)):
            at = place, int(value[3])
            array = "tuple" if value[4].startswith("(") else value[4]
            buffer = int(value[2]), kind, array, value[1].split("{")[0]
            found[at] = max(found.get(at, buffer), buffer, key=lambda buffer: buffer[0])
    chosen = sorted(found.values(), key=lambda buffer: -buffer[0])[:_SHOWN]
    return tuple(Buffer(*buffer, _source(text, buffer[-1])) for buffer in chosen)


def _kind(attributes):
    """The kind of an allocation; None for what lies in no HBM, or in no program's."""
    if re.search(r"thread-local|color [1-9]", attributes):
        return None
    if "parameter" in attributes:
        return "argument"
    return "output" if "maybe-live-out" in attributes else "temporary"


def _source(text, name):
    line = re.search(rf"^\s*(?:ROOT )?%?{re.escape(name)} = .*$", text, re.MULTILINE)
    source = line and re.search(r'op_name="([^"]*)"', line[0])
    return source[1].replace("\\'", "'") if source else ""


def total(report: str) -> int | None:
    """The bytes of HBM in all, from a report; None for libtpu 0.0.23's, which have VMEM in it."""
    said = re.search(r"Memory Space: default.*\nTotal bytes: (\d+)", report)
    return int(said[1]) if said else None
