"""Small tables, as text and as a page shows them: the first column to the left, numbers right."""

import html
from collections.abc import Sequence

Row = Sequence[str]


def plain(columns: Row, rows: Sequence[Row]) -> str:
    """The table as text: columns as wide as what they hold, two spaces between them."""
    table = [columns, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    )


def page(columns: Row, rows: Sequence[Row]) -> str:
    """The table as HTML."""
    head = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in columns)
    cell = '<td style="text-align:right">{}</td>'.format
    body = ""
    for row in rows:
        first, *cells = map(html.escape, row)
        body += f'<tr><th scope="row">{first}</th>{"".join(map(cell, cells))}</tr>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def number(value: int | float) -> str:
    """A number with commas; with one decimal where it is no int."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
