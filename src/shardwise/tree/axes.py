"""The axes of a parameter that an array of its optimizer has."""

import math


def kept_axes(
    shape: tuple[int, ...], whole: tuple[int, ...], keys: tuple[str, ...] = ()
) -> tuple[int | None, ...] | None:
    """The axis of a parameter of shape `whole` that each axis of its array of `shape` is.

    The array has the parameter's shape; or lacks some of its axes, as a factored moment does
    (Adafactor, Shazeer and Stern 2018); or keeps them with size 1; or has one more in front, such
    as the steps that L-BFGS remembers: None for these. `keys` are the components of its path, which
    tell factored moments of a square matrix apart. None if it is none of these.
    """
    if shape == whole:
        return tuple(range(len(whole)))
    if shape and shape[1:] == whole:
        return (None, *range(len(whole)))
    if len(shape) == len(whole):
        fits = all(a in (1, b) for a, b in zip(shape, whole, strict=True))
        return tuple(None if a == 1 else i for i, a in enumerate(shape)) if fits else None
    if len(shape) == len(whole) - 1:
        return _factored(shape, whole, keys)
    return _chosen(shape, whole)


def _factored(shape, whole, keys):
    missing = [i for i in range(len(whole)) if whole[:i] + whole[i + 1 :] == shape]
    if not missing:
        return None
    # Optax factors the two largest axes, of equal ones the last: v_row lacks the largest,
    # v_col the other. That decides where two axes are equally long.
    by_size = sorted(range(len(whole)), key=lambda i: whole[i])
    lacks = by_size[-2 if "v_col" in keys and len(whole) > 1 else -1]
    gone = lacks if lacks in missing else missing[0]
    return tuple(i for i in range(len(whole)) if i != gone)


def _chosen(shape, whole):
    """The first axes of the parameter that have these sizes, in this order."""
    if math.prod(shape) == 1:
        return None
    axes, at = [], 0
    for size in shape:
        while at < len(whole) and whole[at] != size:
            at += 1
        if at == len(whole):
            return None
        axes, at = [*axes, at], at + 1
    return tuple(axes)
