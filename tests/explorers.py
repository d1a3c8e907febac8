"""`Explorer`: an interactive figure, and what Python says that it shows.

Each file of a figure's tests has one, or more; test_explorers.py opens them all in a browser, and
holds them to what every interactive figure must do.
"""

import dataclasses
import html
from collections.abc import Callable, Sequence

from shardwise_book.figures.interactive import Interactive

SHOWN = """(root) => [...root.querySelectorAll("[role=status], svg, table")]
  .sort((a, b) => b.matches("[role=status]") - a.matches("[role=status]"))
  .map((e) => e.innerHTML)"""


def shown(figure):
    """The words, pictures and tables that a figure in the browser shows, as its HTML."""
    return [html.unescape(text) for text in figure.evaluate(SHOWN)]


def values(figure):
    """What its controls say."""
    return figure.locator("select, input").evaluate_all("all => all.map((e) => Number(e.value))")


@dataclasses.dataclass(frozen=True)
class Explorer:
    """A figure as a chapter shows it, and the account that Python gives of it.

    `expected(data, values)` is the HTML of the words, of each picture and of a table, with its
    controls set to `values`; or what `read` makes of the HTML that a browser shows. `controls` has
    the label of each in the order of Tab, and how many options the keyboard finds, with those
    before it at their last. `named` is a figure of a caller's NAMEs, of which the words say `told`.
    """

    figure: Callable[[], Interactive]
    start: Sequence[int]
    controls: dict[str, int]
    states: Callable[[dict], list[Sequence[int]]]
    expected: Callable[[dict, Sequence[int]], list]
    bytes: int
    ids: int
    read: Callable[[list[str]], list] = list
    named: Callable[[], Interactive] | None = None
    told: Callable[[str], bool] = bool
    same: Callable = shown  # of what a browser shows, what must be so before the script runs
    steps: bool = False  # has the buttons Back, Play and Next

    def agrees(self, figure, data):
        """Asserts that the browser shows what Python says of these controls; returns them."""
        at = values(figure)
        assert self.read(shown(figure)) == self.account(data, at), at
        return at

    def account(self, data, at):
        """What Python says, as a browser writes it."""
        said = self.expected(data, at)
        return [html.unescape(one) if isinstance(one, str) else one for one in said]
