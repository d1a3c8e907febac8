"""The child process: reads a request, lays the mesh, compiles, writes what the compiler said.

Run as a script, so that nothing but JAX is imported. It alone uses JAX's private modules: a lowered
program that was made elsewhere is compiled for a topology by no public function.
"""

import json
import sys
from pathlib import Path

import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.experimental import mesh_utils, topologies
from jax.sharding import AbstractMesh

_TUPLED = 2000  # arguments; with more, JAX hands them to a TPU as one tuple
_SIZES = ("argument", "output", "alias", "temp", "generated_code")


def main(folder: Path) -> None:
    """Compile `folder`/module.mlir as `folder`/request.json asks; write result.json, hlo.txt."""
    request = json.loads((folder / "request.json").read_text())
    grid = _part(_lay(request), request) if "part" in request else _lay(request)
    result = {"coordinates": [_place(device) for device in grid.flat]}
    try:
        executable = _compile((folder / "module.mlir").read_text(), grid, request["options"])
    except RuntimeError as error:  # JAX's own error is one
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        result["refusal"] = str(error)
    else:
        stats = executable.get_compiled_memory_stats()
        result["sizes"] = [getattr(stats, f"{name}_size_in_bytes") for name in _SIZES]
        if "part" in request:
            result["outputs"] = _outputs(executable, request["axes"])
        text = "\n\n".join(module.to_string() for module in executable.hlo_modules())
        (folder / "hlo.txt").write_text(text)
    (folder / "result.json").write_text(json.dumps(result))


def _lay(request) -> np.ndarray:
    """The devices of the topology as the mesh has them."""
    found = topologies.get_topology_desc(
        platform="tpu", topology_name=request["name"], **request["topology"]
    )
    inside, across = request["inside"], request["across"]
    if max(across) == 1:
        return _split(mesh_utils.create_device_mesh, inside, devices=found.devices)
    return _split(mesh_utils.create_hybrid_device_mesh, inside, across, devices=found.devices)


def _split(make, *args, **options):
    """A mesh of whole axes of the torus where that is possible, and of parts of them where not."""
    try:
        return make(*args, **options)
    except NotImplementedError:
        return make(*args, **options, allow_split_physical_axes=True)


def _part(grid, request) -> np.ndarray:
    """The devices of a topology as large as the part: libtpu compiles for all of one, or fails.

    The part's chips are a box of the torus, a side of which is a ring only if it is a whole one.
    """
    part, whole = grid, np.array([_place(device) for device in grid.flat])
    for axis, place in request["part"]:
        part = np.take(part, [place], axis=axis)
    places = np.array([_place(device) for device in part.flat])
    box = np.ptp(places, axis=0) + 1
    if len(np.unique(places, axis=0)) < np.prod(box) or box[-1] > 1:
        raise ValueError(f"PART it has the chips {places[:, :-2].tolist()}")
    *sides, _, _ = map(int, box)
    dimensions, ring_from = request["name"].count("x") + 1, request["ring_from"]
    asked = {"chips_per_host_bounds": [min(2, sides[0]), min(2, sides[1]), 1]}
    asked |= {key: x for key, x in request["topology"].items() if key != "num_slices"}
    full = [a == b for a, b in zip(box, np.ptp(whole, axis=0) + 1, strict=True)]
    rings = [size % ring_from == 0 for size in sides]
    if any(ring and not all_of_it for ring, all_of_it in zip(rings, full, strict=False)):
        asked["wrap"] = [r and f for r, f in zip(rings, full, strict=False)]
    kind = request["name"].partition(":")[0]
    name = f"{kind}:{'x'.join(map(str, sides[:dimensions]))}"
    found = topologies.get_topology_desc(platform="tpu", topology_name=name, **asked).devices
    at = {tuple(_place(device)): device for device in found}
    alike = [at[tuple(place)] for place in (places - places.min(axis=0)).tolist()]
    return np.array(alike, dtype=object).reshape(part.shape)


def _outputs(executable, axes) -> list[list]:
    """The PartitionSpec of each output, as a list of entries."""
    shape, names = [size for _, size in axes], [name for name, _ in axes]
    mesh = AbstractMesh(tuple(shape), tuple(names))
    told = executable.get_output_shardings()
    if told is None:  # one device
        return []
    return [list(parse_flatten_op_sharding(sharding, mesh)[0]) for sharding in told]


def _place(device) -> list[int]:
    """The place of a device: along each axis of the torus, its core, its slice."""
    core, number = getattr(device, "core_on_chip", 0), getattr(device, "slice_index", 0)
    return [*device.coords, core, number]


def _compile(text, grid, options):
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        main = next(op for op in module.body.operations if _name(op) == "main")
        asked = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=grid.size,
            device_assignment=grid.reshape(1, -1),
            env_options_overrides=dict(options),
        )
        asked.parameter_is_tupled_arguments = len(main.arguments) > _TUPLED
        build = asked.executable_build_options
        build.use_shardy_partitioner = "sdy." in text
        # Where the program does not say how an array is laid out, the compiler may.
        build.allow_spmd_sharding_propagation_to_parameters = _free(main, "arg_attrs")
        build.allow_spmd_sharding_propagation_to_output = _free(main, "res_attrs")
        devices = xla_client.DeviceList(tuple(grid.flat))
        client = grid.flat[0].client
        return compiler.backend_compile_and_load(client, module, devices, asked, [])


def _name(op) -> str:
    known = "sym_name" in op.attributes
    return ir.StringAttr(op.attributes["sym_name"]).value if known else ""


def _free(main, which) -> list[bool]:
    """A bool for each argument or result: whether its sharding is left open."""
    kind = main.type.inputs if which == "arg_attrs" else main.type.results
    if which not in main.attributes:
        return [True] * len(kind)
    each = [ir.DictAttr(attributes) for attributes in ir.ArrayAttr(main.attributes[which])]
    return [not {"sdy.sharding", "mhlo.sharding"} & {name.name for name in a} for a in each]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
