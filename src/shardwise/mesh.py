"""Meshes with named axes, over devices that are simulated or real."""

import contextlib
import functools
import glob
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata, util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

__all__ = ["devices", "make", "simulate"]

_devices = None
_TPU = ("/dev/accel*", "/dev/vfio/[0-9]*")  # the files by which a machine's TPU is reached


def simulate(n: int = 8, *, real: bool = False) -> None:
    """Make `n` devices available to `devices` and `make`, on CPU for want of accelerators.

    Of `n` accelerators or more the first `n` are taken. Where there are fewer (a Colab runtime with
    one GPU), `n` simulated CPU devices are, and CPU becomes the default device. With `real=True`
    all accelerators are taken, whatever `n` is, and `n` CPU devices only where there is none.
    Called again with the same or a smaller `n`, it selects again. Of several processes
    (`jax.distributed`) each asks for `n`, and all their devices are taken. For several CPU devices
    JAX's persistent compilation cache is switched off: collectives of a program that was read from
    it may hang (seen on JAX 0.10.1 and 0.12.0, and over gloo).

    Raises:
      ValueError: `n` is below 1.
      RuntimeError: the backend is already up with fewer than `n` CPU devices.
    """
    global _devices
    if n < 1:
        raise ValueError(f"mesh.simulate({n}): ask for at least one device.")
    look_for_no_tpu()
    with contextlib.suppress(RuntimeError):  # the backend is up: what it has decides below
        jax.config.update("jax_num_cpu_devices", n)
    platform, default = jax.default_backend(), None
    if platform != "cpu" and real:
        n = jax.local_device_count()
    elif platform != "cpu" and jax.local_device_count() < n:
        platform, default = "cpu", jax.local_devices(backend="cpu")[0]
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
        # Read back, a program's collectives are no longer in one order on all devices.
        jax.config.update("jax_enable_compilation_cache", False)


def devices() -> list[jax.Device]:
    """The devices of which `make` makes meshes: those of `simulate`, else all `jax.devices()`."""
    if _devices is None:
        look_for_no_tpu()
        return jax.devices()
    return list(_devices)


def make(**axes: int) -> jax.sharding.Mesh:
    """A mesh by the sizes of its named axes: `make(data=-1, model=2)` on 8 devices is 4×2.

    Neighbours along the last axis are neighbours in `devices()`, and on TPUs in the torus, so the
    axis with the most traffic belongs last. One size may be -1, which takes the devices that
    remain; of more devices than the sizes need, the first are used. Axes are Auto: the compiler
    propagates shardings from inputs, outputs and constraints.

    Raises:
      ValueError: a size is neither positive nor -1, more than one is -1, the sizes do not fit the
        number of devices, or borders between slices of TPUs cut an axis unevenly.
    """
    available = devices()
    sizes = resolve("mesh.make", axes, len(available))
    grid = placed(available[: math.prod(sizes.values())], sizes)
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * grid.ndim)


def placed(devices: Sequence[Any], sizes: Mapping[str, int]) -> np.ndarray:
    """The devices as a mesh of these sizes has them: TPUs by JAX's `mesh_utils`, which gives each
    axis, the last first, whole sides of the torus where it can and parts where not, with slices
    outermost; all others in their order. (`jax.make_mesh` has parts on v5e alone, and no slices.)

    Raises:
      ValueError: borders between slices cut an axis unevenly.
    """
    shape = tuple(sizes.values())
    if devices[0].platform != "tpu":
        return np.array(devices).reshape(shape)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    across = across_groups("mesh.make", sizes, slices, "slices")
    inside = [size // part for size, part in zip(shape, across, strict=True)]
    if slices == 1:
        return mesh_utils.create_device_mesh(inside, devices, allow_split_physical_axes=True)
    return mesh_utils.create_hybrid_device_mesh(
        inside, across, devices, allow_split_physical_axes=True
    )


def across_groups(who: str, sizes: Mapping[str, int], number: int, what: str) -> tuple[int, ...]:
    """In how many parts borders of slices, or nodes, cut each axis; the first axes lie across.

    Raises:
      ValueError: an axis that the borders cut unevenly.
    """
    parts, rest = [], number
    for name, size in sizes.items():
        part = math.gcd(rest, size)
        if part not in (rest, size):
            raise ValueError(
                f"{who}: the axis {name!r} of size {size} lies along {rest} {what}, which cut it "
                f"unevenly; make it a multiple of {rest}, or a divisor with the rest in the next "
                f"axis."
            )
        parts.append(part)
        rest //= part
    return tuple(parts)


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a spec, as a tuple."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def entry_of(axes: tuple[str, ...]) -> Any:
    """Mesh axes as the entry of a spec: one by its name, several as a tuple, None for none."""
    return axes[0] if len(axes) == 1 else axes or None


def parts(mesh: Any, entry: Any) -> int:
    """The number of parts into which a spec's entry, a mesh axis or several, cuts an axis."""
    return math.prod(mesh.shape[axis] for axis in axes_of(entry))


def sizes(mesh: Any) -> str:
    """The sizes of a mesh as messages write them: data=4, model=2."""
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())


def check_axes(who: str, mesh: Any, axes: Iterable[str]) -> None:
    """Raise where the mesh lacks one of these axes."""
    if missing := [axis for axis in axes if axis not in mesh.shape]:
        raise ValueError(
            f"{who}: the mesh has no axis {missing[0]!r}; it has {sizes(mesh)}. Make the mesh with "
            f"that axis (its size may be 1), or name another."
        )


def auto(mesh: Any) -> Any:
    """`mesh` with Auto axes over the same devices; `mesh` itself where all its axes are Auto."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if tuple(mesh.axis_types) == types:
        return mesh
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def typed(tree: Any, mesh: Any) -> Any:
    """`tree`, its arrays and shapes on the devices and axes of `mesh` given its axis types.

    No data moves, and what was given shares its memory: after donating one, use neither.
    """

    def one(x):
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or isinstance(x, jax.core.Tracer):
            return x
        if sharding.mesh == mesh or auto(sharding.mesh) != auto(mesh):
            return x
        to = NamedSharding(mesh, sharding.spec)
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(sharding=to)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):  # typed keys
            return jax.device_put(x, to)
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, to, parts)

    return jax.tree.map(one, tree)


def outside() -> contextlib.AbstractContextManager:
    """A context without the mesh that `jax.set_mesh` has set: for arrays on other devices."""
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


def check_around(who: str, mesh: Any) -> None:
    """Raise where `jax.set_mesh` has set another mesh than this one, or other axis types."""
    around = jax.sharding.get_abstract_mesh()
    if not around.empty and around != mesh.abstract_mesh:
        raise ValueError(
            f"{who}: jax.set_mesh has set another mesh, {dict(around.shape)} of axis types "
            f"{around.axis_types}; set {dict(mesh.shape)} as mesh.make makes it, for which this "
            f"function is, or none. Explicit axes are taken by a layouts.Layout over them."
        )


def within(mesh: Any) -> Any:
    """`mesh` as constraints take it inside a shard_map over it, whose axes have other types."""
    return jax.sharding.get_abstract_mesh() if jax.__version_info__ >= (0, 8) else mesh


def for_caller(run: Callable, mesh: Any, specs: Callable[[Any], Any]) -> Callable:
    """`run`, over Auto axes, for a caller whose `mesh` may have Explicit ones, as JAX makes them.

    Then what comes out has the caller's types, of which within a trace of the caller's its
    PartitionSpecs are part: `specs` gives them, of its shapes.
    """
    return run if auto(mesh) is mesh else _OnAuto(run, mesh, specs)


class _OnAuto:
    def __init__(self, run: Callable, mesh: Any, specs: Callable[[Any], Any]):
        self._run, self._mesh, self._specs = run, mesh, specs

    def __call__(self, *args: Any, **options: Any) -> Any:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, options))):
            return self._traced(args, options)
        return typed(self._plainly(self._run, args, options), self._mesh)

    def lower(self, *args: Any, **options: Any) -> Any:
        return self._plainly(self._run.lower, args, options)

    def trace(self, *args: Any, **options: Any) -> Any:
        return self._plainly(self._run.trace, args, options)

    def _plainly(self, function, args, options):
        plain = auto(self._mesh)
        args, options = typed((args, options), plain)
        is_set = jax.sharding.get_abstract_mesh() == self._mesh.abstract_mesh
        around = jax.sharding.use_abstract_mesh(plain.abstract_mesh) if is_set else None
        with around or contextlib.nullcontext():
            return function(*args, **options)

    def _traced(self, args, options):
        def run(args, options):
            return self._run(*args, **options)

        def plain(x):
            return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))

        with jax.sharding.use_abstract_mesh(auto(self._mesh).abstract_mesh):
            out = jax.eval_shape(run, *jax.tree.map(plain, (args, options)))
        around = jax.sharding.get_abstract_mesh()
        types = self._mesh.abstract_mesh if around.empty else around
        shard = functools.partial(NamedSharding, types)
        to = jax.tree.map(shard, self._specs(out), is_leaf=lambda x: isinstance(x, PartitionSpec))
        names = tuple(self._mesh.axis_names)
        with jax.sharding.use_abstract_mesh(types):
            return jax.sharding.auto_axes(run, axes=names, out_sharding=to)(args, options)


def look_for_no_tpu() -> None:
    """Take CPU for the only platform where libtpu is installed, nothing that it could drive, and no
    plugin for another accelerator: it prints errors when JAX looks for devices. JAX_PLATFORMS wins.
    """
    if jax.config.jax_platforms or not util.find_spec("libtpu"):
        return
    plugins = util.find_spec("jax_plugins") or metadata.entry_points(group="jax_plugins")
    if not plugins and not any(map(glob.glob, _TPU)):
        jax.config.update("jax_platforms", "cpu")


def resolve(who: str, axes: Mapping[str, int], count: int, exactly: bool = False) -> dict[str, int]:
    """{axis: size} on `count` devices, or `exactly` so many; a ValueError of `who`, as `make`'s."""
    asked = ", ".join(f"{name}={size}" for name, size in axes.items())
    free = [name for name, size in axes.items() if size == -1]
    bad = [name for name, size in axes.items() if size != -1 and size < 1]
    if not axes or bad or len(free) > 1:
        raise ValueError(
            f"{who}({asked}): give at least one axis, every size positive, and at most one -1."
        )
    known = math.prod(size for size in axes.values() if size != -1)
    if known > count or (free and count % known) or (exactly and not free and known < count):
        raise ValueError(
            f"{who}({asked}) does not fit {count} devices: the sizes given multiply to {known}, "
            f"which must {'divide' if free else 'be' if exactly else 'be at most'} {count}."
        )
    return {name: count // known if size == -1 else size for name, size in axes.items()}
