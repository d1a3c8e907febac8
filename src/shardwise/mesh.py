"""Named meshes over the devices that the book runs on, simulated or real."""

import glob
import math
from importlib import metadata, util

import jax
from jax.sharding import AxisType

_devices = None
_TPU = ("/dev/accel*", "/dev/vfio/[0-9]*")  # the files by which a machine's TPU is reached


def simulate(n: int = 8) -> None:
    """Make `n` devices available in this process, on CPU where there are too few accelerators.

    First asks for `n` CPU devices, which must happen before JAX first touches a device. Then
    looks: with `n` or more accelerators, the first `n` of those are taken; with fewer (a Colab
    runtime with one GPU), the first `n` CPU devices are taken and CPU becomes the default device.
    Called again with the same or a smaller `n`, it selects again. Where several processes form
    one system (`jax.distributed`), every process asks for `n`, and all their devices are taken.
    Where only the TPU's compiler (libtpu) is installed, no TPU is looked for. JAX's persistent
    compilation cache is switched off for several CPU devices, whose collectives stand still when
    their program was read back.

    Tried on CPU, with one process and with two; written for, but not tried on, machines with
    one or more accelerators.

    Raises:
      ValueError: `n` is below 1.
      RuntimeError: the backend is already up with fewer than `n` CPU devices.
    """
    global _devices
    if n < 1:
        raise ValueError(f"mesh.simulate({n}): ask for at least one device.")
    look_for_no_tpu()
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:
        pass  # The backend is up already: what it has decides below.
    platform = jax.default_backend()
    default = None
    if platform != "cpu" and jax.local_device_count() < n:
        platform = "cpu"
        default = jax.local_devices(backend="cpu")[0]
    jax.config.update("jax_default_device", default)
    here = len(jax.local_devices(backend=platform))
    if here < n:
        raise RuntimeError(
            f"mesh.simulate({n}) came too late: JAX is already running with {here} CPU "
            f"device(s). Restart Python (or the notebook's kernel) and call it before anything "
            f"else touches a device."
        )
    found = jax.devices(platform)
    _devices = found if jax.process_count() > 1 else found[:n]
    if platform == "cpu" and len(_devices) > 1:
        # Read back from it, a program's collectives are no longer in one order on all devices, and
        # stand still within some steps: seen on JAX 0.10.1 and 0.12.0, and over gloo.
        jax.config.update("jax_enable_compilation_cache", False)


def devices() -> list[jax.Device]:
    """The devices that meshes are made of: those of `simulate`, else all of `jax.devices()`."""
    if _devices is None:
        look_for_no_tpu()
        return jax.devices()
    return list(_devices)


def make(**axes: int) -> jax.sharding.Mesh:
    """A mesh by axis name: `make(data=-1, model=2)` on 8 devices is 4×2.

    The axes stand in the order in which they are written: neighbours along the last one are
    neighbours in `devices()` (on TPU, in the topology that `jax.make_mesh` finds), so the axis
    with the most traffic belongs last. One size may be -1,
    which takes the devices that remain. If the sizes multiply to fewer devices than there are,
    the first of them are used. Axes are Auto everywhere in the book: the compiler propagates
    shardings from inputs, outputs and constraints.

    Raises:
      ValueError: a size is neither positive nor -1, more than one is -1, or they do not fit the
        number of devices.
    """
    available = devices()
    sizes = _resolve(axes, len(available))
    shape = tuple(sizes.values())
    return jax.make_mesh(
        shape,
        tuple(sizes),
        devices=available[: math.prod(shape)],
        axis_types=(AxisType.Auto,) * len(shape),
    )


def check_auto(who: str, mesh: jax.sharding.Mesh) -> None:
    """Raise where a mesh has other axes than Auto ones."""
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"{who}: the mesh has Explicit axes, as jax.make_mesh makes them since JAX 0.9, and "
            f"what runs here is for Auto ones: make it with mesh.make, or with "
            f"jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.shape)})."
        )


def look_for_no_tpu() -> None:
    """Take CPU for the only platform where libtpu is installed and nothing that it could drive.

    It would print errors whenever JAX first looks for devices. Where JAX_PLATFORMS is set, where a
    TPU is, or a plugin for another accelerator, all stays as it is.
    """
    if jax.config.jax_platforms or not util.find_spec("libtpu"):
        return
    plugins = util.find_spec("jax_plugins") or metadata.entry_points(group="jax_plugins")
    if not plugins and not any(map(glob.glob, _TPU)):
        jax.config.update("jax_platforms", "cpu")


def _resolve(axes, count):
    asked = ", ".join(f"{name}={size}" for name, size in axes.items())
    free = [name for name, size in axes.items() if size == -1]
    bad = [name for name, size in axes.items() if size != -1 and size < 1]
    if not axes or bad or len(free) > 1:
        raise ValueError(
            f"mesh.make({asked}): give at least one axis, every size positive, and at most one -1."
        )
    known = math.prod(size for size in axes.values() if size != -1)
    if known > count or (free and count % known):
        raise ValueError(
            f"mesh.make({asked}) does not fit {count} devices: the sizes given multiply to "
            f"{known}, which must {'divide' if free else 'be at most'} {count}."
        )
    return {name: count // known if size == -1 else size for name, size in axes.items()}
