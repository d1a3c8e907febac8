"""The book's one Sphinx extension, and the command lines that `make` calls.

`extension` wires the build, with `pairs`, `cache`, `execute`, `record`, `times` and `failures`;
`site`, `accessible` and `lifted` make the pages; `address` keeps the repository's address.
"""


def setup(app):
    from . import extension  # here, because the command lines do without Sphinx

    return extension.setup(app)
