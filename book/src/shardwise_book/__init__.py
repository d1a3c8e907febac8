"""The book's package: what its chapters import beside the library, and what builds its site.

Chapters import `figures` and `puzzles`. The rest is the one Sphinx extension and the command lines
that `make` calls, of use in a clone alone, with what requirements.txt installs: `extension` wires
the build, with `pairs`, `cache`, `execute`, `times` and `failures`; `site` and `reference` make
the pages; `address` keeps the repository's address.
"""


def setup(app):
    from . import extension  # here, because the command lines do without Sphinx

    return extension.setup(app)
