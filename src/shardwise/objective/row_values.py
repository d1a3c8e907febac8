"""What is known of a value in which rows of a batch may be, and of one step that makes another.

Sums over rows may be added, and multiplied by what has no rows. Whatever else is done to them is
done to the rows of one part alone, as what orders rows, chooses among them or compares them is.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from shardwise.objective import row_axes

ROW = "row"  # one row, within a loop over rows
SUM = "sum"  # a sum over rows, perhaps with rows beside it
PLACE = "place"  # the places of chosen rows
RANK = "rank"  # whole numbers that come of sorting rows: their places in an order
NEGLIGIBLE = 1e-5  # so small a least value of a sum is there to divide by it

SAME = {"add", "sub", "add_any", "neg", "convert_element_type", "copy", "copy_p", "real", "imag"}
SAME |= {"stop_gradient", "reduce_precision", "name", "optimization_barrier", "pvary", "pcast"}
SAME |= {"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "concatenate"}
SAME |= {"reduce_sum", "psum", "slice", "pad", "rev", "stack", "unstack", "split", "tile", "cumsum"}
PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}
ADDING = {"reduce_sum", "psum", "dot_general", "scatter-add", "scatter_add"}
BENDING = {"exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "tanh", "logistic"}
BENDING |= {"abs", "square", "integer_pow", "pow", "max", "min", "clamp", "sin", "cos", "erf"}
BENDING |= {"reduce_max", "reduce_min", "reduce_prod", "sort", "top_k", "atan2", "lgamma"}
BENDING |= {"cosh", "sinh", "tan", "acos", "acosh", "asin", "asinh", "atan", "atanh", "erfc"}
BENDING |= {"erf_inv", "digamma", "polygamma", "zeta", "igamma", "igammac", "bessel_i0e"}
BENDING |= {"bessel_i1e", "sign", "floor", "ceil", "round", "rem"}
BENDING |= {"cholesky", "eigh", "eig", "lu", "qr", "svd", "triangular_solve"}
EXTREMES = {"reduce_max", "reduce_min", "reduce_prod", "pmax", "pmin"}
GOING_OVER = EXTREMES | row_axes.RUNNING | row_axes.DECOMPOSING | row_axes.WINDOWED
GOING_OVER |= {"reduce", "fft", "conv_general_dilated", "approx_top_k"}
TAKING = {"gather", "dynamic_slice"}
USING = {"convert_element_type": 1, "select_n": 1}  # and how many inputs from the first on
COMPARING = {"gt", "ge", "lt", "le", "eq", "ne"}
COMBINING = {"add", "sub", "mul", "div", "max", "min", "dot_general"}
# Which inputs of a step are what it adds up or hands on; of all others, all.
HANDED = {"gather": (0,), "dynamic_slice": (0,), "scatter-add": (0, 2), "scatter_add": (0, 2)}


@dataclasses.dataclass(frozen=True)
class Value:
    """Its axes of rows, what else of rows it holds, and which step mixed rows on the way to it."""

    axes: frozenset[int] = frozenset()
    flags: frozenset[Any] = frozenset()
    mixed: str = ""

    def __or__(self, other: "Value") -> "Value":
        return Value(self.axes | other.axes, self.flags | other.flags, self.mixed or other.mixed)

    def has(self, flag: str) -> bool:
        """Whether it holds this of rows."""
        return flag in self.flags

    @property
    def of_rows(self) -> bool:
        """Whether it differs from row to row."""
        return bool(self.axes) or ROW in self.flags

    @property
    def orders(self) -> frozenset[int]:
        """The sortings, by number, in whose orders its rows are."""
        return frozenset(flag for flag in self.flags if isinstance(flag, int))


def after(eqn: Any, given: list[Value], longer: list[int] | None, i: int, number: int = 0) -> Value:
    """The value of output `i`, of which the axes `longer` grow with the rows; None is unknown.

    `number` is the equation's own, by which one sorting is told from another.
    """
    along = row_axes.along(eqn, given)
    kept = row_axes.kept(eqn, given, longer or [], i)
    flags = _flags(eqn, given, along, longer, i) | _orders(eqn, given, along, longer, number)
    return Value(kept, flags, _mixing(eqn, given, along, kept, i))


def _flags(eqn, given, along, longer, i):
    name, found = eqn.primitive.name, set()
    handed = [given[k] for k in HANDED.get(name, range(len(given))) if k < len(given)]
    if any(v.has(ROW) for v in given):
        found.add(ROW)
    if _is_sum(eqn, given, handed) or (along and longer == [] and name in ADDING):
        found.add(SUM)
    whole = not _floating(eqn.outvars[i])
    chosen = name in ("argmax", "argmin") or (name == "top_k" and i == 1)
    chosen |= name == "slice" and whole and _takes_sorted(eqn, given)
    ranked = name == "sort" and along and _floating(eqn.invars[0])
    if whole and (ranked or any(v.has(RANK) for v in given)):
        found.add(RANK)
    if whole and ((chosen and (along or name == "slice")) or any(v.has(PLACE) for v in given)):
        found.add(PLACE)
    return frozenset(found)


def _orders(eqn, given, along, longer, number):
    """In which orders the rows of an output are, as far as values have sorted them.

    Rows sorted by whole numbers may be groups; those taken in an order may be back in their own.
    """
    name, orders = eqn.primitive.name, [v.orders for v in given]
    if name == "sort":
        return frozenset({number}) if along and _floating(eqn.invars[0]) else frozenset()
    if name == "rev" and along:  # twice, they are in their own
        return frozenset() if orders[0] else frozenset({number})
    if not longer or name.startswith("scatter") or (name == "gather" and any(orders[1:])):
        return frozenset()
    return frozenset().union(*orders)


def _is_sum(eqn, given, handed):
    """Whether sums over rows that go in come out as such."""
    name, sums = eqn.primitive.name, [v.has(SUM) for v in handed]
    if name == "select_n":
        return any(sums[1:])
    if name in BENDING:
        return any(sums) and not _bends(eqn)
    return any(sums) and (name in SAME or name in PRODUCTS or name == "div" or name in HANDED)


def _mixing(eqn, given, along, kept, i):
    """What this step does to rows that a part of them cannot do; nothing where that is unknown."""
    name = eqn.primitive.name
    what = {"dot_general": "a product", "select_n": "a choice"}.get(name, name)
    if len(kept) > 1 and all(len(v.axes) < 2 for v in given):
        return f"{what} compares rows with rows"
    if name in TAKING and given[0].of_rows and any(v.has(PLACE) for v in given[1:]):
        return "rows are chosen by comparing them"
    if name in USING and any(v.has(RANK) for v in given[: USING[name]]) and _floating(*eqn.outvars):
        return f"{what} makes numbers of the places that rows have in an order"
    if name in COMPARING and _compares_sum(given):
        return f"{what} compares rows with a sum or mean over them"
    if not _floating(eqn.outvars[i]):  # whole numbers may be places of rows, in groups of them
        return ""
    if any(v.has(SUM) for v in given) and (told := _bent(eqn, given)):
        return f"a sum or mean over rows {told.format(what)}"
    if name in COMBINING and _compares_one(given):
        return f"{what} compares a row with others"
    if name in COMBINING and _disordered(given):
        return f"{what} combines rows with those in another order"
    if along and name in GOING_OVER:
        return f"{name} goes over the rows"
    if along and name == "top_k" and row_axes.chooses(eqn):
        return "top_k chooses among the rows"
    if _takes_sorted(eqn, given) and (name == "slice" or not kept):
        return "some of the sorted rows are taken"
    return ""


def _compares_one(given):
    """Whether one row, within a loop over rows, meets all of them."""
    one = any(v.has(ROW) and not v.axes for v in given)
    return one and any(v.axes and not v.has(ROW) for v in given)


def _compares_sum(given):
    """Whether rows meet a sum over them."""
    sums = [v.has(SUM) and not v.of_rows for v in given]
    return any(sums) and any(v.of_rows and not v.has(SUM) for v in given)


def _disordered(given):
    """Whether rows in one order meet rows in another, or in none."""
    orders = [v.orders for v in given if v.axes]
    return len(orders) > 1 and any(orders) and len(set(orders)) > 1


def _takes_sorted(eqn, given):
    """Whether it takes some of the rows that were sorted."""
    name = eqn.primitive.name
    if not given or not given[0].orders or any(v.orders for v in given[1:]):
        return False
    if name == "slice":
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        return any(before[k] != after[k] for k in given[0].axes)
    return name in TAKING


def _bent(eqn, given):
    """What happens to a sum over rows by which it is none any more."""
    name, sums = eqn.primitive.name, [v.has(SUM) for v in given]
    if name in PRODUCTS:
        rows = any(v.of_rows for v, is_sum in zip(given, sums, strict=True) if not is_sum)
        return "meets rows or another sum in {}" if sum(sums) > 1 or rows else ""
    if name == "div":
        return "meets rows or another sum in {}" if sums[1] or given[1].of_rows else ""
    return "goes into {}, which is not linear" if name in BENDING and _bends(eqn) else ""


def _bends(eqn):
    """Whether it does something to a sum but to choose a negligible least value of it."""
    if eqn.primitive.name == "integer_pow":
        return eqn.params["y"] != 1
    if eqn.primitive.name not in ("max", "min", "clamp") or not _floating(eqn.outvars[0]):
        return _floating(eqn.outvars[0])
    known = [v.val for v in eqn.invars if isinstance(v, Literal) and jnp.ndim(v.val) == 0]
    return not any(0 < abs(float(x)) <= NEGLIGIBLE for x in known)


def _floating(v):
    return jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.inexact)
