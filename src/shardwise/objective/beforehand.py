"""The judgement of a loss before its first step: on few rows, in the memory at hand, and once."""

import contextlib
import os
import weakref
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardwise import mesh as meshes
from shardwise.objective import oracle
from shardwise.objective.parts import length_of, unit_of
from shardwise.objective.reasons import Indivisible
from shardwise.objective.trials import Case, Part, Trials
from shardwise.processes.system import of_all

MOST = 8  # rows of a part that cost no more than four
MOST_WORK = 10**9  # parameters times tokens, beyond which tokens are fewer
SHORTEST = 16  # tokens of a part
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # {loss: cases that were judged}


def judge(case: Case, ways: tuple[str, ...], rows: int) -> str | None:
    """The reason why nothing was judged; None where the loss divides. All processes take part.

    The batch is divided in these `ways`, into parts of so many `rows`. Judging costs as little as
    numbers can: four rows in a part, which tell of a mistake as eight do, of a large model fewer
    tokens, and what a part really has only where these do not pass, or fewer where memory does not
    do. A loss is judged once for the same shapes and way, however many rows parts have, if as many
    of them tell. Simulated devices have one memory: there it runs on one of them, and on others as
    one program by the compiler, on arrays as they are cut. Else it raises `Indivisible`.
    """
    try:
        known = _known.setdefault(case.loss, set())
    except TypeError:  # it has no hash, or no weak references
        known = set()
    leaves, structure = jax.tree.flatten((case.params, case.batch, case.args, case.key))
    shapes = tuple((jnp.shape(x), str(getattr(x, "dtype", x))) for x in leaves)
    shapes, sizes = (shapes, str(structure), case.has_aux, repr(case.aux)), _sizes(case, ways, rows)
    if any(known >= {(way, size, shapes) for way in ways} for size in sizes):
        return None
    context, mesh, first = contextlib.nullcontext(), case.mesh, case.mesh.devices.flat[0]
    if jax.process_count() == 1 and (mesh.size == 1 or first.platform == "cpu"):
        arrays = dict(params=case.params, batch=case.batch, args=case.args, key=case.key)
        case = case._replace(**jax.device_put(arrays, first), mesh=None)
        context = meshes.outside()
    try:
        with context:
            passed = _of_few_rows(case, ways, sizes)
    except Indivisible:
        raise
    except MemoryError:
        return "a program of few rows and tokens does not fit into memory either"
    except Exception as error:  # one of the loss's own the step raises itself
        return f"on few rows of the whole batch it raises {type(error).__name__}: {error}"
    if passed is None:
        return "its numbers are not finite, or 0"
    known.update((way, passed, shapes) for way in ways)
    return None


def _of_few_rows(case, ways, sizes):
    """The first of these sizes at which the loss passes; None where it is 0, or not finite."""
    by_place = case.draws_by_place()
    for size in sizes:
        parts = oracle.plan(ways, case.batch, *size)
        try:
            if any([oracle.judge(_fitting(case, part), by_place) for part in parts]):
                return size
        except MemoryError:
            raise
        except Exception:
            if size is sizes[-1]:
                raise  # else a group of rows may be larger, or a sequence of one length alone
    return None


def _sizes(case, ways, rows):
    """[(rows of a part, tokens or None for all)] to try in turn; the last are the part's own."""
    unit, length = unit_of(case.batch), length_of(case.batch)
    most = max(1, unit if ways == ("sequence",) else unit // 2)
    first = min(rows if oracle.LEAST <= rows <= MOST else oracle.LEAST, most)
    found = [(first, None)]
    work = 2 * first * max(1, sum(map(np.size, jax.tree.leaves(case.params))))  # for each token
    short = max(SHORTEST, MOST_WORK // work)
    if 2 * short < length:
        found.insert(0, (first, 2 * short if "sequence" in ways else short))
    if rows > first and first < most:
        found.append((min(rows, most), None))
    return found


def _fitting(case, part) -> Trials:
    """The first program that fits into memory, of fewer rows and then tokens, or MemoryError."""
    for smaller in _smaller(part, case.batch):
        try:
            trials = oracle.compiled(case, smaller)
        except Exception as error:
            if smaller is part:
                raise
            raise MemoryError from error  # it takes no fewer rows or tokens
        if trials.memory <= room(case.mesh):
            return trials
    raise MemoryError


def _smaller(part, batch) -> Iterator[Part]:
    yield part
    while part.rows > 2:
        part = part._replace(rows=max(2, part.rows // 4 * 2))
        yield part
    length = part.length or length_of(batch)
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
    return min(of_all(free))
