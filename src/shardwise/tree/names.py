"""Names of logical axes that a model's parameters carry."""

from typing import Any

from jax.sharding import PartitionSpec

LAYERS = "layers"  # the leading axis of a stack
# Our own first; then those of nnx.with_partitioning, by the name of this Flax and of earlier ones.
_METADATA = ("logical_axes", "out_sharding", "sharding_names", "sharding")


def axis_names(box: Any) -> tuple[str | None, ...] | None:
    """The names that an NNX variable's metadata or a box of Linen's gives an array's axes.

    A name for each axis, or for each but the leading one of a stack; None where there are none, or
    where they are no names but mesh axes in tuples.
    """
    if box is None:
        return None
    if hasattr(box, "get_metadata"):
        metadata = box.get_metadata()
        found = next((metadata[key] for key in _METADATA if metadata.get(key) is not None), None)
    else:
        found = getattr(box, "names", None)
    if not isinstance(found, tuple | list | PartitionSpec):
        return None
    names = tuple(found)
    return names if all(name is None or isinstance(name, str) for name in names) else None
