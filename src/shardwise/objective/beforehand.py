"""The judgement of a loss before its first step: on few rows, in the memory at hand, and once."""

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from shardwise import mesh as meshes
from shardwise.objective import oracle
from shardwise.objective.reasons import Indivisible
from shardwise.objective.tracing import draws_by_place
from shardwise.objective.trials import Trials, length_of, unit_of

MOST = 8  # rows of a part that cost no more than four
MOST_WORK = 10**9  # parameters times tokens, beyond which tokens are fewer
SHORTEST = 16  # tokens of a part
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # {loss: cases that were judged}


class TooLarge(Exception):
    """The error of a program that does not fit into memory, even on few rows and tokens."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """The division of a batch: the `ways` to divide it, the `rows` of a part, and the mesh."""

    ways: tuple[str, ...]
    rows: int
    mesh: Mesh


def judge(
    loss: Callable,
    division: Parts,
    params: Any,
    batch: Any,
    args: tuple = (),
    key: Any = None,
    has_aux: bool = False,
    aux: Any = "sum",
) -> str | None:
    """The reason why nothing was judged; None where the loss divides. All processes take part.

    Judging costs as little as numbers can: four rows in a part, which tell of a mistake as eight
    do, of a large model fewer tokens, and what a part really has only where these do not pass.
    Where memory does not do, there are fewer rows and then fewer tokens. A loss is judged once for
    the same shapes. Simulated devices have one memory: there it runs on one of them, and on others
    as one program by the compiler, on arrays as they are cut.

    Raises:
      Indivisible: as `objective.check`.
    """
    case = _case(division, params, batch, args, key, has_aux, aux)
    known = _cases(loss)
    if case in known:
        return None
    given, mesh, context = (params, batch, args, key), division.mesh, contextlib.nullcontext()
    if _one_memory(mesh):
        given, mesh = jax.device_put(given, mesh.devices.flat[0]), None
        context = meshes.outside()
    try:
        with context:
            by_place = draws_by_place(loss, *given, has_aux)
            finite = _of_few_rows(loss, division, given, (has_aux, aux), by_place, mesh)
    except Indivisible:
        raise
    except TooLarge:
        return "a program of few rows and tokens does not fit into memory either"
    except Exception as error:  # one of the loss's own the step raises itself
        return f"on few rows of the whole batch it raises {type(error).__name__}: {error}"
    if not finite:
        return "its numbers are not finite, or 0"
    known.add(case)
    return None


def _of_few_rows(loss, division, given, outputs, by_place, mesh):
    """Whether the loss is finite and not 0; where few rows do not pass, a part's own are tried."""
    *fewer, last = _sizes(division, given[0], given[1])
    for size in fewer:
        try:
            if _judged(loss, division.ways, size, given, outputs, by_place, mesh):
                return True
        except TooLarge:
            raise
        except Exception:
            continue  # a group of rows may be larger, or a sequence of one length alone
    return _judged(loss, division.ways, last, given, outputs, by_place, mesh)


def _sizes(division, params, batch):
    """[(rows of a part, tokens or None for all)] to try in turn; the last are the part's own."""
    unit = unit_of(batch)
    most = max(1, unit if division.ways == ("sequence",) else unit // 2)
    first = min(division.rows if oracle.LEAST <= division.rows <= MOST else oracle.LEAST, most)
    found, length = [(first, None)], length_of(batch) or 0
    work = 2 * first * sum(np.size(x) for x in jax.tree.leaves(params))
    if work * length > MOST_WORK and length > 2 * SHORTEST:
        short = max(SHORTEST, MOST_WORK // work)
        if 2 * short < length:
            found.insert(0, (first, 2 * short if "sequence" in division.ways else short))
    if division.rows > first and first < most:
        found.append((min(division.rows, most), None))
    return found


def _judged(loss, ways, size, given, outputs, by_place, mesh):
    rows, length = size
    finite = False
    for part in oracle.plan(ways, rows, given[1]):
        part = part if length is None else part._replace(length=length)
        trials, part = _fitting(loss, outputs, part, given, mesh)
        finite |= oracle.judge(trials, part, by_place)
    return finite


def _fitting(loss, outputs, part, given, mesh) -> tuple[Trials, oracle.Part]:
    """The program that fits into memory, and its part, which may have fewer rows and tokens."""
    for smaller in _smaller(part, given[1]):
        try:
            trials = oracle.compiled(loss, *outputs, smaller, None, *given, mesh)
        except Exception as error:
            if smaller is part:
                raise
            raise TooLarge from error  # it takes no fewer rows or tokens
        if trials.memory <= room(mesh):
            return trials, smaller
    raise TooLarge


def _smaller(part, batch) -> Iterator[oracle.Part]:
    yield part
    while part.rows > 2:
        part = part._replace(rows=max(2, part.rows // 4 * 2))
        yield part
    length = part.length or length_of(batch) or 0
    while length // 2 >= SHORTEST:
        length = length // 4 * 2
        yield part._replace(length=length)


def room(mesh: Mesh | None) -> int:
    """The bytes that a device has for a program: the least of all processes."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    else:  # half of the machine, which simulated devices share
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        free //= 1 if mesh is None else len(mesh.local_devices)
    if jax.process_count() > 1:
        free = int(np.min(multihost_utils.process_allgather(np.float64(free))))
    return free


def _one_memory(mesh):
    return jax.process_count() == 1 and (mesh.size == 1 or mesh.devices.flat[0].platform == "cpu")


def _cases(loss):
    try:
        return _known.setdefault(loss, set())
    except TypeError:  # it has no hash, or no weak references
        return set()


def _case(division, params, batch, args, key, has_aux, aux):
    leaves, structure = jax.tree.flatten((params, batch, args, key))
    shapes = tuple((jnp.shape(x), str(getattr(x, "dtype", x))) for x in leaves)
    return shapes, str(structure), division.ways, division.rows, has_aux, repr(aux)
