"""Cells that need the compilers of chips that are not here: where one is missing, they say so."""

import contextlib
import subprocess
import sys
from collections.abc import Mapping
from importlib import util

from shardwise.topology import gpu

LINUX = "on Linux on x86-64"
MISSING = {
    "# For chips": f"Google's TPU compiler, libtpu, {LINUX} (pip install 'shardwise[tpu]').",
    "# For GPUs": f"XLA's compiler for GPUs, {LINUX} (python -m shardwise.topology).",
}


def found() -> dict[str, bool]:
    """{the first line of a cell: whether the compiler that it needs is here}."""
    here = {"# For chips": bool(util.find_spec("libtpu")), "# For GPUs": False}
    with contextlib.suppress(ImportError):
        here["# For GPUs"] = bool(gpu.find())
    return here


def left_out(lines: list[str], here: Mapping[str, bool]) -> list[str]:
    """A cell's lines, or one that says why it does not run."""
    mark = lines[0].rstrip() if lines else ""
    if here.get(mark) is not False:
        return lines
    return [f"print({'Not run here: this needs ' + MISSING[mark]!r})\n"]


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
