"""The child process: reads a request, lays the mesh, compiles, writes what the compiler said.

A script, which imports JAX alone, and its private modules: no public function compiles a lowered
program that was made elsewhere.
"""

import json
import sys
from pathlib import Path

import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.experimental import mesh_utils, topologies

_TUPLED = 2000  # arguments; with more, JAX hands them to a TPU as one tuple
_SIZES = ("argument", "output", "alias", "temp", "generated_code")


def main(folder: Path) -> None:
    """Compile `folder`/module.mlir as `folder`/request.json asks; write result.json, hlo.txt."""
    request = json.loads((folder / "request.json").read_text())
    grid, places = (_gpus if "target" in request else _tpus)(request)
    result = {"coordinates": places}
    try:
        executable = _compile((folder / "module.mlir").read_text(), grid, request["options"])
    except RuntimeError as error:  # JAX's own error is one
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        result["refusal"] = str(error)
    else:
        stats = executable.get_compiled_memory_stats()
        result["sizes"] = [getattr(stats, f"{name}_size_in_bytes") for name in _SIZES]
        if "target" not in request:  # of GPUs JAX 0.7.2 gives no text; the dump has it
            text = "\n\n".join(module.to_string() for module in executable.hlo_modules())
            (folder / "hlo.txt").write_text(text)
    (folder / "result.json").write_text(json.dumps(result))


def _tpus(request) -> tuple[np.ndarray, list[list[int]]]:
    """The devices of the topology as the mesh has them; their places, as in `Compiled`."""
    given = dict(platform="tpu", topology_name=request["name"], **request["topology"])
    devices, shapes = topologies.get_topology_desc(**given).devices, [request["inside"]]
    make = mesh_utils.create_device_mesh
    if max(request["across"]) > 1:
        make, shapes = mesh_utils.create_hybrid_device_mesh, [*shapes, request["across"]]
    # Whole axes of the torus where that is possible, and parts of them where not.
    grid = make(*shapes, devices=devices, allow_split_physical_axes=True)
    numbers = ("core_on_chip", "slice_index")
    return grid, [[*d.coords, *(getattr(d, name, 0) for name in numbers)] for d in grid.flat]


def _gpus(request) -> tuple[np.ndarray, list[list[int]]]:
    """GPUs in their order, node by node: what no function of JAX's own gives without a GPU."""
    plugin = xla_client.load_pjrt_plugin_dynamically("cuda", request["library"])
    xla_client.initialize_pjrt_plugin("cuda")
    shape, node = request["name"].partition(":")[2], request["node"]
    asked = {"topology": f"1x{shape}", "target_config": request["target"]}
    topology = xla_client.make_c_api_device_topology(plugin, **asked)
    sizes = zip(request["across"], request["inside"], strict=True)
    found = np.array(topology._make_compile_only_devices())
    grid = found.reshape([part * size for part, size in sizes])
    return grid, [[d.id % node, d.id // node] for d in grid.flat]


def _compile(text, grid, options):
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        main = ir.SymbolTable(module.operation)["main"]
        asked = compiler.get_compile_options(
            1, grid.size, device_assignment=grid.reshape(1, -1), env_options_overrides=options
        )
        on_tpu = grid.flat[0].platform == "tpu"
        asked.parameter_is_tupled_arguments = on_tpu and len(main.arguments) > _TUPLED
        build = asked.executable_build_options
        build.use_shardy_partitioner = "sdy." in text
        # Where the program does not say how an array is laid out, the compiler may.
        build.allow_spmd_sharding_propagation_to_parameters = _free(main, "arg_attrs")
        build.allow_spmd_sharding_propagation_to_output = _free(main, "res_attrs")
        devices = xla_client.DeviceList(tuple(grid.flat))
        return compiler.backend_compile_and_load(grid.flat[0].client, module, devices, asked, [])


def _free(main, which) -> list[bool]:
    """A bool for each argument or result: whether its sharding is left open."""
    kind = main.type.inputs if which == "arg_attrs" else main.type.results
    if which not in main.attributes:
        return [True] * len(kind)
    each = [ir.DictAttr(attributes) for attributes in ir.ArrayAttr(main.attributes[which])]
    return [not {"sdy.sharding", "mhlo.sharding"} & {name.name for name in a} for a in each]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
