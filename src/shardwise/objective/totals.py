"""The meaning of `marks.total` in a part of a batch: a sum over all devices, or an error."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Totals:
    """A meaning of `marks.total` where a batch is `microbatches` parts one after the other, and
    `together` adds up those that are on devices at the same time, `along` those of one row.
    """

    microbatches: int = 1
    together: Callable[[Any], Any] | None = None
    along: Callable[[Any], Any] | None = None

    def __call__(self, x: Any, axes: tuple[str, ...]) -> Any:
        """The total of `x`; raises ValueError where no part ever sees the whole batch."""
        if "rows" not in axes:
            return x if self.along is None else self.along(x)
        if self.microbatches > 1:
            raise ValueError(
                f"marks.total: the loss needs a sum over the rows of the whole batch, which is "
                f"taken in {self.microbatches} microbatches, one after the other: none sees the "
                f"others. Use one microbatch, or sums over each row (for experts: over='rows'), "
                f"or balance experts by a bias, from the loads that aux adds up."
            )
        return x if self.together is None else self.together(x)
