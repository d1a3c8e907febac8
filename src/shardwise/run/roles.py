"""The layout of a run, as settings say it: the number of devices of each role."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from shardwise import layouts, mesh
from shardwise.layouts.catalogue import ORDER

# Others of JAX's policies are functions that make one, of names.
_PLAIN = """checkpoint_dots checkpoint_dots_with_no_batch_dims dots_saveable
dots_with_no_batch_dims_saveable everything_saveable nothing_saveable""".split()
POLICIES = {name: getattr(jax.checkpoint_policies, name) for name in _PLAIN}
POLICIES["offload"] = layouts.offload


@dataclasses.dataclass(frozen=True)
class Roles:
    """The number of devices of each role of a layout, and how roles are realised.

    The sizes multiply to the number of devices; one may be -1, for the devices that remain. The
    rest is as in `layouts.Layout`.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    stage: int = 1
    by: Literal["hand", "compiler"] = "hand"
    zero: Literal[1, 2, 3] = 3
    min_size: int = 0
    uneven: Literal["error", "replicate"] = "replicate"
    sequence: bool = False  # Megatron's sequence parallelism, beside tensor
    attention: str = "ring"  # over context; one of shardwise.context.FORMS
    dispatch: str = "all_to_all"  # to experts; one of shardwise.experts.FORMS
    schedule: str = "1f1b"  # of the stages
    microbatches: int = 1
    dtype: Literal["float32", "bfloat16"] | None = None  # in which weights are gathered and used
    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    remat: str | None = None  # a policy of jax.checkpoint_policies, or "offload" to the host

    def layout(self) -> layouts.Layout:
        """The layout over the devices there are, with an axis of its own for each role above 1.

        Raises:
          ValueError: sizes that do not fit the devices, no such policy, what `Layout` raises.
        """
        count = len(mesh.devices())
        sizes = {role: getattr(self, role) for role in ORDER}
        free = [role for role, size in sizes.items() if size == -1]
        known = int(np.prod([size for size in sizes.values() if size != -1]))
        told = " × ".join(f"{role} {size}" for role, size in sizes.items() if size != 1) or "1"
        if min(sizes.values()) < -1 or 0 in sizes.values() or len(free) > 1 or count % known:
            raise ValueError(
                f"run: the layout {told} does not fit {count} devices: sizes are positive, one at "
                f"most is -1, and the others multiply to a divisor of {count}.{_more(count)}"
            )
        if not free and known != count:
            raise ValueError(
                f"run: the layout {told} takes {known} of {count} devices; give one role -1, such "
                f"as --layout.fsdp -1, for those that remain, or say --devices {known}."
                f"{_more(count)}"
            )
        sizes = {role: count // known if size == -1 else size for role, size in sizes.items()}
        taken = {role: size for role, size in sizes.items() if size > 1} or {"data": 1}
        names = [f.name for f in dataclasses.fields(self) if f.name not in ORDER]
        options = {name: getattr(self, name) for name in names}
        options["remat"] = _policy(self.remat)
        for name in ("dtype", "reduce_dtype"):
            options[name] = options[name] and jnp.dtype(options[name])
        return layouts.Layout(mesh.make(**taken), **{role: role for role in taken}, **options)


def _more(count):
    """A hint to simulate devices, which the command does and a program of one's own may forget."""
    return " Simulate more by mesh.simulate(8), before anything runs." if count == 1 else ""


def _policy(name):
    if name is not None and name not in POLICIES:
        raise ValueError(f"run: remat={name!r}; expected one of {', '.join(POLICIES)}.")
    return POLICIES[name] if name else None
