"""Along which axes of what a step makes the rows of the batch are."""

from typing import Any

COLLECTIVE = {"psum", "pmax", "pmin"}  # which are reductions where vmap has named the axis
REDUCING = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin"}
REDUCING |= COLLECTIVE
RUNNING = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
DECOMPOSING = {"svd", "qr", "eigh", "lu", "cholesky", "householder_product", "schur", "geqrf"}
WINDOWED = {"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"}
SCATTERING = {"scatter-add", "scatter_add"}


def along(eqn: Any, given: list) -> frozenset[int]:
    """The axes of rows that a step adds up, goes along, or orders."""
    name, params = eqn.primitive.name, eqn.params
    if name in REDUCING:
        return given[0].axes & frozenset(params["axes"])
    if name == "reduce":
        return frozenset().union(*(v.axes for v in given)) & frozenset(params["dimensions"])
    if name in WINDOWED:
        wide = {k for k, size in enumerate(params["window_dimensions"]) if size > 1}
        return given[0].axes & wide
    if name == "fft":
        rank = len(eqn.invars[0].aval.shape)
        return given[0].axes & frozenset(range(rank - len(params["fft_lengths"]), rank))
    if name == "conv_general_dilated":
        return _convolved(params, given)
    if name == "approx_top_k":
        return given[0].axes & {params["reduction_dimension"] % len(eqn.invars[0].aval.shape)}
    if name in RUNNING:
        return given[0].axes & {params["axis"]}
    if name == "rev":
        return given[0].axes & frozenset(params["dimensions"])
    if name in DECOMPOSING:
        rank = len(eqn.invars[0].aval.shape)
        return given[0].axes & {rank - 2, rank - 1}
    if name == "sort":
        keys = frozenset().union(*(v.axes for v in given[: params["num_keys"]]))
        return keys & {params["dimension"]}
    if name == "top_k":
        return given[0].axes & {_chosen_along(eqn)}
    if name == "dot_general":
        contracted = params["dimension_numbers"][0]
        pairs = zip(given, contracted, strict=True)
        return frozenset().union(*(v.axes & frozenset(own) for v, own in pairs))
    if name in SCATTERING:
        return given[1].axes | given[2].axes
    return frozenset()


def _convolved(params, given):
    """Axes along which one image's places lie; where it is several in one, which is not known."""
    groups = params["feature_group_count"], params["batch_group_count"]
    if groups != (1, 1) or given[1].axes:
        return frozenset()
    return given[0].axes & frozenset(params["dimension_numbers"].lhs_spec[2:])


def over_places(eqn: Any) -> bool:
    """Whether a collective is along axes of its array alone, and of no mesh."""
    return all(isinstance(axis, int) for axis in eqn.params["axes"])


def chooses(eqn: Any) -> bool:
    """Whether top_k takes fewer than there are."""
    return eqn.params["k"] < eqn.invars[0].aval.shape[_chosen_along(eqn)]


def _chosen_along(eqn):
    rank = len(eqn.invars[0].aval.shape)
    return eqn.params.get("axis", rank - 1) % rank


def kept(eqn: Any, given: list, longer: list[int], i: int) -> frozenset[int]:
    """The axes of rows of output `i`, of which the axes `longer` grow with the rows.

    One that grows, where rows go in, is theirs. Of several each may be, or be of some number of
    rows, as in a one-hot code: these are followed where a step says what becomes of each.
    """
    if not longer or not any(v.of_rows for v in given):
        return frozenset()
    if len(longer) == 1:
        return frozenset(longer) if any(v.axes for v in given) or _fills(eqn) else frozenset()
    return frozenset(_followed(eqn, given, i)) & frozenset(longer)


def _fills(eqn):
    """Whether it writes a row into an array of all."""
    return eqn.primitive.name in ("dynamic_update_slice", "scatter")


def _followed(eqn, given, i):
    name, params = eqn.primitive.name, eqn.params
    if name == "broadcast_in_dim":
        return {params["broadcast_dimensions"][k] for k in given[0].axes}
    if name == "transpose":
        return {params["permutation"].index(k) for k in given[0].axes}
    if name in REDUCING:
        left = [k for k in range(len(eqn.invars[0].aval.shape)) if k not in params["axes"]]
        return {left.index(k) for k in given[0].axes if k in left}
    if name == "dot_general":
        return _of_product(eqn, given)
    if name in ("reshape", "squeeze", "expand_dims"):
        return _of_reshape(eqn, given[0].axes)
    shape = eqn.outvars[i].aval.shape
    alike = all(_broadcasts(v.aval.shape, shape) for v in eqn.invars)
    return frozenset().union(*(v.axes for v in given)) if alike else ()


def _broadcasts(shape, whole):
    pairs = zip(shape, whole, strict=False)
    return not shape or (len(shape) == len(whole) and all(a in (1, b) for a, b in pairs))


def _of_product(eqn, given):
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    found, place = set(), len(left_batch)
    for v, value, gone, batch in zip(
        eqn.invars, given, (left, right), (left_batch, right_batch), strict=True
    ):
        found |= {list(batch).index(k) for k in value.axes if k in batch}
        free = [k for k in range(len(v.aval.shape)) if k not in (*gone, *batch)]
        found |= {place + free.index(k) for k in value.axes if k in free}
        place += len(free)
    return found


def _of_reshape(eqn, axes):
    """Each axis that no other is merged with, by the sizes before it."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return {n for k in axes for n in range(len(after)) if _starts(before, k) == _starts(after, n)}


def _starts(shape, k):
    """What stands before axis `k`, and its size."""
    product = 1
    for size in shape[:k]:
        product *= size
    return product, shape[k]
