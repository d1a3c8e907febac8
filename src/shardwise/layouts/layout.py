"""A layout: the role of each mesh axis, and how the roles are realised; a value."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from shardwise import context, experts
from shardwise import mesh as meshes

ROLES = ("data", "fsdp", "expert", "context", "tensor", "stage")
_VALUES = {
    "by": ("hand", "compiler"),
    "zero": (1, 2, 3),
    "uneven": ("error", "replicate"),
    "attention": tuple(context.FORMS),
    "dispatch": tuple(experts.FORMS),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """The role of each axis of `mesh`. A role takes one mesh axis, or a tuple of them as one.

    The mesh's axes may be Auto, as `mesh.make` makes them, or Explicit, JAX's own default: arrays
    that come out have the types of the mesh that was given, also within the caller's own jit.

    Roles:
      data: rows are cut, parameters are whole; gradients are summed.
      fsdp: rows are cut, and so is each parameter of `min_size` elements or more, which is gathered
        where it is used (Rajbhandari et al., 2020).
      tensor: matrices are cut along logical axes in `cut` that they carry (`rules.LogicalRules`)
        or by `over`, and so are their products, always by the compiler (Shoeybi et al., 2019).
      expert: rows are cut, and the logical axis "experts": tokens travel (`shardwise.experts`). It
        may be an axis of `data` or `fsdp` too; along one of its own, other parameters are whole.
      context: the sequence is cut, axis 1 of each array of the batch that has two or more; tokens
        see each other in `marks.attend` (Liu et al., 2023).
      stage: the layers are cut at `marks.stage_boundary`, and run by `schedule`, all stages in one
        program (`shardwise.pipeline`).

    Further settings:
      by: "hand", where data, fsdp, expert and context are collectives written out, in one
        shard_map; or "compiler", which inserts those of all roles but stage, from where arrays and
        activations are pinned.
      zero: ZeRO's number, 1, 2 or 3; below 3 parameters are gathered once a step, or with
        `by="compiler"` stay whole.
      min_size: arrays of fewer elements stay whole along `fsdp`.
      uneven: what becomes of an array of which no axis divides along `fsdp`: "replicate" leaves it
        whole, which `predict` tells; "error" refuses it.
      stacked: a predicate on paths, strings such as "blocks/q/kernel" (`tree.leaves`), true for
        arrays whose leading axis is one of layers: `fsdp` never cuts that axis, and by hand gathers
        one layer at a time. By default those with one axis more than they carry logical axes.
      cut: the logical axes that `tensor` cuts.
      over: a rule for the tensor axis instead, which trees without logical axes need, such as
        `rules.PathRules`, one PartitionSpec, or a function of (params, mesh) to a tree of specs.
      sequence: whether activations between the products are cut along the sequence over the tensor
        axis, which is Megatron's sequence parallelism (Korthikanti et al., 2023).
      attention: how `context` runs by hand: "ring"; "striped" or "zigzag", a ring in that order of
        the sequence, into which the step itself brings the batch, given in its own; "all_gather";
        "ulysses"; or a function of the axis to a meaning of `marks.attend`.
      kernel: what computes attention where a device sees whole sequences, so without `context` or
        with "ulysses": a meaning of `marks.attend`, such as `context.splash()` on TPUs.
      dispatch: how tokens reach experts by hand: "all_to_all", "gather" or "ragged", or a function
        of the axis and `sequence=` to a meaning of `marks.experts`.
      schedule: the order of the stages' tasks: a key of `schedules.SCHEDULES`, a
        `schedules.Schedule`, or a list of tasks for each device.
      microbatches, dtype, reduce_dtype: as in `fsdp.value_and_grad`.
      remat: a policy of `jax.checkpoint_policies` for the layers that the loss marks by
        `marks.layer`; None, the default, leaves them as they are. What enters a layer, its first
        argument, has the name "layer_input" there. Without stages a policy may offload, from
        "device" to "pinned_host": `layouts.offload` does so to that name, recomputing all else.
      exact: the number of blocks that a batch's rows are cut into, a power of two and a multiple of
        the number of devices; 0 for none. Losses, gradients, parameters and optimizer state then
        are the same bits on every mesh, under every role and setting, on one kind of chip and
        release of XLA. Arrays lie between steps as roles say; a step gathers them whole, and cannot
        stand within the caller's jit.

    Raises:
      ValueError: an axis without a role, with two (but `expert` and `data` or `fsdp`), or that the
        mesh lacks; no such value of a setting; `sequence` without `tensor`; `reduce_dtype` with
        `exact`, or where no rows or sequence are cut by hand; `kernel` with `context`, but for
        "ulysses" by hand, or with `stage` and rows that the compiler cuts; `by="compiler"` with
        "striped" or "zigzag" over `context`, or with `stage` beside more than one other role (of
        two devices or more), but for `data` with `expert` and `data` with `context`.
    """

    mesh: Mesh
    data: str | tuple[str, ...] = ()
    fsdp: str | tuple[str, ...] = ()
    tensor: str | tuple[str, ...] = ()
    expert: str | tuple[str, ...] = ()
    context: str | tuple[str, ...] = ()
    stage: str | tuple[str, ...] = ()
    by: str = "hand"
    zero: int = 3
    min_size: int = 0
    uneven: str = "replicate"
    stacked: Callable[[str], bool] | None = None
    cut: tuple[str, ...] = ("heads", "kv_heads", "mlp", "vocab")
    over: Any = None
    sequence: bool = False
    attention: str | Callable[[str], Callable] = "ring"
    kernel: Callable | None = None
    dispatch: str | Callable[..., Callable] = "all_to_all"
    schedule: Any = "1f1b"
    microbatches: int = 1
    dtype: Any = None
    reduce_dtype: Any = None
    remat: Any = None
    exact: int = 0

    def __post_init__(self):
        for role in ROLES:
            axes = getattr(self, role)
            object.__setattr__(self, role, (axes,) if isinstance(axes, str) else tuple(axes))
        object.__setattr__(self, "cut", tuple(self.cut))
        self._check_axes()
        for wrong, why in self._mistakes():
            if wrong:
                raise ValueError(f"layouts.Layout: {why}")

    @functools.cached_property
    def auto(self) -> Mesh:
        """The mesh with Auto axes, over which arrays lie; `mesh` may have Explicit ones."""
        return meshes.auto(self.mesh)

    @property
    def rows(self) -> tuple[str, ...]:
        """The mesh axes over which rows are cut."""
        own = [name for name in self.expert if name not in (*self.data, *self.fsdp)]
        return (*self.data, *own, *self.fsdp)

    @property
    def by_hand(self) -> bool:
        """Whether `by` is "hand", and data, fsdp, expert or context has a mesh axis."""
        return self.by == "hand" and bool(self.divided)

    @property
    def divided(self) -> tuple[str, ...]:
        """The mesh axes over which batches are cut, along the sequence and along rows."""
        return (*self.context, *self.rows)

    @property
    def manual(self) -> tuple[str, ...]:
        """The mesh axes that a shard_map has by hand; the others are the compiler's."""
        by_hand = tuple(name for name in self.mesh.axis_names if name not in self.tensor)
        return by_hand if self.by_hand else self.stage

    def parts(self, axes: Sequence[str]) -> int:
        """The number of parts into which mesh axes cut together."""
        return meshes.parts(self.mesh, axes)

    def size(self, role: str) -> int:
        """The number of parts into which a role cuts."""
        return self.parts(getattr(self, role))

    def roles(self) -> dict[str, tuple[str, ...]]:
        """A dict from each role that has mesh axes to these."""
        return {role: getattr(self, role) for role in ROLES if getattr(self, role)}

    def __str__(self):
        how = f"whole in a step of {self.exact} exact blocks" if self.exact else f"by {self.by}"
        gathered = "gathered where it is used" if self.zero == 3 else f"ZeRO {self.zero}"
        between = "; between products, the sequence" if self.sequence else ""
        does = {
            "data": "rows are cut; parameters are whole, gradients are summed",
            "fsdp": f"rows are cut, and each parameter, {gathered}",
            "tensor": f"{', '.join(self.cut)} are cut{between}",
            "expert": f"rows are cut, and experts; tokens travel by {self.dispatch}",
            "context": f"the sequence is cut; attention by {self.attention}",
            "stage": f"layers are cut into stages, run by {self.schedule}",
        }
        lines = [f"Layout over {dict(self.mesh.shape)}, {how}:"]
        for role, axes in self.roles().items():
            lines.append(f"  {' × '.join(axes):12} ({self.size(role)})  {role}: {does[role]}")
        return "\n".join(lines)

    def _check_axes(self):
        owner: dict[str, str] = {}
        for role, axes in self.roles().items():
            meshes.check_axes(f"layouts.Layout, {role}=", self.mesh, axes)
            for name in axes:
                if name in owner and {role, owner[name]} - {"data", "fsdp"} != {"expert"}:
                    raise ValueError(
                        f"layouts.Layout: the axis {name!r} is given to {owner[name]} and to "
                        f"{role}; it can do one of them. Make the mesh with an axis more."
                    )
                owner[name] = role
        for name, size in self.mesh.shape.items():
            if name not in owner and size > 1:
                raise ValueError(
                    f"layouts.Layout: the mesh axis {name!r} of size {size} has no role, so that "
                    f"all work would be done {size} times; give it one of {', '.join(ROLES)}."
                )

    def _mistakes(self) -> Iterator[tuple[Any, str]]:
        """(whether it is made, what is wrong and what would do) of each."""
        for name, values in _VALUES.items():
            given, told = getattr(self, name), ", ".join(map(repr, values))
            wrong = given not in values and not callable(given)
            yield wrong, f"{name}={given!r}; expected one of {told}."
        yield self.microbatches < 1, f"microbatches={self.microbatches}; expected 1 or more."
        yield (
            self.exact < 0 or self.exact & (self.exact - 1) or self.exact % self.mesh.size,
            f"exact={self.exact} over {self.mesh.size} devices; expected a number of blocks of "
            f"rows, a power of two and a multiple of the number of devices.",
        )
        yield (
            self.exact and self.reduce_dtype is not None,
            "reduce_dtype= with exact=, whose blocks add up in float32 or wider; leave one out.",
        )
        yield (
            self.sequence and not self.tensor,
            "sequence=True cuts activations over the tensor axis between its products; name one, "
            "tensor=..., or cut the sequence itself, context=...",
        )
        yield len(self.expert) > 1, f"expert={self.expert}; experts lie along one axis."
        yield len(self.stage) > 1, f"stage={self.stage}; stages lie along one axis."
        by_compiler = self.by == "compiler"
        yield (
            by_compiler and self.context and self.attention in ("striped", "zigzag"),
            f"attention={self.attention!r} is an order of the sequence for rings by hand; by the "
            f"compiler, which sees whole sequences, leave it out.",
        )
        beside = [role for role in self.roles() if role != "stage" and self.size(role) > 1]
        if not {"tensor", "fsdp"} & {*beside}:
            beside = [role for role in beside if role != "data"]
        yield (
            by_compiler and self.stage and len(beside) > 1,
            f"by='compiler' with stages beside {', '.join(beside)}: XLA's partitioner ends the "
            f"process on such programs. Leave it out: tensor is the compiler's all the same.",
        )
        yield (
            self.kernel and self.context and (self.attention != "ulysses" or not self.by_hand),
            f"kernel= computes attention to whole sequences, and context={self.context} cuts them; "
            f"by hand, attention='ulysses' gives a device all tokens of some heads.",
        )
        yield (
            self.kernel and self.stage and self.rows and not self.by_hand,
            "kernel= in stages takes rows that are cut by hand; the compiler cannot cut it. Leave "
            "by='compiler' out.",
        )
        yield (
            self.reduce_dtype is not None and not self.by_hand,
            "reduce_dtype= is that of reductions by hand; the compiler reduces in the dtype that "
            "it computes in.",
        )


def check_given(who: str, layout: Any, tx: Any = None, is_needed: bool = False) -> None:
    """Raise a TypeError if `layout` is no `Layout`, or `tx`, if given or needed, no optimizer of
    optax's.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"{who}: {layout!r:.80} is no Layout; it comes first.")
    if (tx is not None or is_needed) and not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"{who}: {tx!r:.80} is no optimizer as optax has them, with init and update. (Of a "
            f"train.Optimizer give what its transformation() returns.)"
        )
