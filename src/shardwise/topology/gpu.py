"""XLA's compiler for GPUs where none is: JAX's plugin, and what it is told of a GPU.

Among JAX's own packages it would be a sign that there are GPUs: it lies in a folder of its own.
"""

import importlib.metadata
import platform
import shlex
import sys
from pathlib import Path

import jax
import jaxlib

from shardwise.topology.chip import Chip

_PACKAGES = ("jax-cuda12-pjrt", "jax-cuda13-pjrt")
_ASSEMBLER = "nvidia-cuda-nvcc-cu12"  # what XLA takes of CUDA to compile, where there is none
# What all GPUs since A100 share, as XLA describes them.
_ALIKE = dict(
    threads_per_block_limit=1024,
    threads_per_warp=32,
    threads_per_core_limit=2048,
    block_dim_limit_x=2**31 - 1,
    block_dim_limit_y=65_535,
    block_dim_limit_z=65_535,
    registers_per_core_limit=65_536,
    registers_per_block_limit=65_536,
    shared_memory_per_block=49_152,
)
_VERSIONS = "dnn_version_info { major: 9 minor: 8 }\nruntime_version { major: 12 minor: 8 }"


def folder() -> Path:
    """The folder in this Python's environment where the compiler lies, for this JAX."""
    return Path(sys.prefix, "share", "shardwise", f"gpu-{jax.__version__}")


def command() -> list[str]:
    """The command of pip that installs it, as words; `python -m shardwise.topology` runs it."""
    packages = f"{_PACKAGES[0]}=={jaxlib.__version__}", _ASSEMBLER
    return [sys.executable, *"-m pip install --no-deps --target".split(), str(folder()), *packages]


def find() -> tuple[Path, str]:
    """(library, package and version) for this jaxlib: in `folder()`, JAX's, or an ImportError."""
    for found in (*importlib.metadata.distributions(path=[str(folder())]), *_installed()):
        name, version = found.metadata["Name"].replace("_", "-"), found.version
        module = name.replace("jax-", "jax_plugins/xla_").removesuffix("-pjrt")
        path = Path(str(found.locate_file(f"{module}/xla_cuda_plugin.so")))
        if name in _PACKAGES and version == jaxlib.__version__ and path.exists():
            return path, f"{name} {version}"
    how = f"beside this JAX: {shlex.quote(sys.executable)} -m shardwise.topology"
    raise absent("XLA's compiler for GPUs", _PACKAGES[0], f"no GPU and no CUDA. Install it {how}")


def absent(compiler: str, package: str, how: str) -> ImportError:
    """The error of a compiler that is not here: how it is had, or that it does not exist here."""
    here = f"{sys.platform} on {platform.machine()}"
    if here != "linux on x86_64":
        how = f"which does not exist for {here}, but on Linux on x86_64, on Colab for instance."
    return ImportError(f"topology.compile needs {compiler}, the package {package}, {how}")


def _installed():
    return [found for name in _PACKAGES for found in importlib.metadata.distributions(name=name)]


def description(chip: Chip) -> str:
    """What XLA is told of a GPU, in the text form of its `GpuTargetConfigProto`."""
    told = dict(chip.target)
    name, major = told.pop("name"), told.pop("major")
    told |= _ALIKE | {"shared_memory_per_block_optin": told["shared_memory_per_core"] - 1024}
    lines = "\n".join(f"  {field}: {value}" for field, value in told.items())
    return (
        f"gpu_device_info {{\n{lines}\n  cuda_compute_capability {{ major: {major} }}\n}}\n"
        f'platform_name: "CUDA"\n{_VERSIONS}\ndevice_description_str: "{name}"\n'
    )
