"""The numbers of stages, devices and microbatches that a schedule takes; errors name them."""

import itertools
import numbers


def require_counts(name: str, stages: int, devices: int, microbatches: int) -> None:
    counts = {"stages": stages, "devices": devices, "microbatches": microbatches}
    for what, count in counts.items():
        if not isinstance(count, numbers.Integral) or count < 1:
            raise ValueError(f"{name}: {what}={count!r}; it takes a whole number, 1 or more.")


def require_one_to_one(name: str, stages: int, devices: int) -> None:
    if stages != devices:
        raise ValueError(
            f"{name}: {stages} stages on {devices} devices; it takes one on each: "
            f"stages={devices}, or devices={stages}."
        )


def require_two_to_one(name: str, stages: int, devices: int) -> None:
    if stages != 2 * devices:
        raise ValueError(
            f"{name}: {stages} stages on {devices} devices; it takes two on each: "
            f"stages={2 * devices}."
        )


def require_microbatches(name: str, stages: int, microbatches: int) -> None:
    if microbatches < stages:
        raise ValueError(
            f"{name}: {microbatches} microbatches for {stages} stages; it takes {stages} or more."
        )


def microbatches_per_round(name: str, devices: int, microbatches: int) -> int:
    """The microbatches in a round: `devices`, or a few more for even rounds; all, if fewer."""

    def whole(count: int) -> bool:
        return count % max(1, count // devices) == 0

    if not whole(microbatches):
        below = next(count for count in range(microbatches, 0, -1) if whole(count))
        above = next(count for count in itertools.count(microbatches) if whole(count))
        raise ValueError(
            f"{name}: {microbatches} microbatches do not fall into even rounds of {devices} "
            f"or more; {below} or {above} would."
        )
    return microbatches // max(1, microbatches // devices)
