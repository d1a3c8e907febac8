"""Cells that need the compilers of chips that are not here: where one is missing, they say so."""

import subprocess
import sys
from collections.abc import Mapping
from importlib import util

from shardwise.topology import gpu

MISSING = {
    "# For chips": (
        "Not run here: this needs Google's TPU compiler, libtpu, on Linux on x86-64 "
        "(pip install 'shardwise[tpu]')."
    ),
    "# For GPUs": (
        "Not run here: this needs XLA's compiler for GPUs, on Linux on x86-64 "
        "(python -m shardwise.topology)."
    ),
}


def found() -> dict[str, bool]:
    """{the first line of a cell: whether the compiler that it needs is here}."""
    try:
        gpu.find()
    except ImportError:
        return {"# For chips": bool(util.find_spec("libtpu")), "# For GPUs": False}
    return {"# For chips": bool(util.find_spec("libtpu")), "# For GPUs": True}


def left_out(lines: list[str], here: Mapping[str, bool]) -> list[str]:
    """A cell's lines, or one that says why it does not run."""
    mark = lines[0].rstrip() if lines else ""
    return [f"print({MISSING[mark]!r})\n"] if here.get(mark) is False else lines


def prepare() -> None:
    """Install what is missing where this is Colab; cells that need what cannot be had say so."""
    if "google.colab" in sys.modules:
        import jax

        pip = [sys.executable, "-m", "pip", "install", "--quiet", f"jax[tpu]=={jax.__version__}"]
        subprocess.run(pip)
        if not found()["# For GPUs"]:
            subprocess.run([sys.executable, "-m", "shardwise.topology", "--quiet"])
    from IPython import get_ipython  # as every kernel has it, and a package of figures need not

    here, shell = found(), get_ipython()
    if shell is not None and not all(here.values()):
        shell.input_transformers_cleanup.append(lambda lines: left_out(lines, here))
