"""The published schedules, each under its name.

Each entry is a function of how many stages, devices and microbatches there are. It returns a
`Schedule`, or raises a ValueError that says which numbers would do.
"""

from collections.abc import Callable

from shardwise.schedules.split_backward import dualpipe_v, zb_h1, zb_h2, zb_v
from shardwise.schedules.table import Schedule
from shardwise.schedules.whole_backward import (
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    kimi_k2,
    one_f_one_b,
)

SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "kimi_k2": kimi_k2,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
}


def spread(name: str, devices: int, microbatches: int, per_device: int = 2) -> Schedule:
    """`SCHEDULES[name]` with as many stages on each device as it takes, `per_device` at most.

    For comparisons that loop over `SCHEDULES`: some take one stage on a device, some two.

    Raises:
      ValueError: it takes no such numbers, or there is no such schedule.
    """
    if name not in SCHEDULES:
        raise ValueError(f"spread: no schedule {name!r}; there are {', '.join(SCHEDULES)}.")
    refused = {}
    for stages in range(per_device * devices, 0, -devices):
        try:
            return _made(name, stages, devices, microbatches)
        except ValueError as error:
            refused[stages] = error
    for stages, error in refused.items():
        if _takes(name, stages, devices, microbatches=stages):
            raise error  # only the microbatches are wrong
    raise ValueError("\n".join(map(str, refused.values())))


def _made(name: str, stages: int, devices: int, microbatches: int) -> Schedule:
    """The schedule of that name, checked to have as many devices: a reader's own may not look."""
    made = SCHEDULES[name](stages, devices, microbatches)
    if made.devices != devices:
        raise ValueError(
            f"{name}: asked for {stages} stages on {devices} devices, and its table has "
            f"{made.devices}; raise a ValueError for numbers that it does not take."
        )
    return made


def _takes(name: str, stages: int, devices: int, microbatches: int) -> bool:
    try:
        _made(name, stages, devices, microbatches)
    except ValueError:
        return False
    return True
