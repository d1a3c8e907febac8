"""Scripts and styles of interactive figures, as files of the site.

A notebook's figure brings all it needs with it; of a page with several, each would be there again.
"""

import hashlib
import re
from importlib.resources import files
from pathlib import Path

FOLDER = "_static/figures"
STYLE = re.compile(r"<style>\s*(\.shardwise-.*?)</style>", re.DOTALL)


def lift(html: str, output: Path, address: str) -> str:
    """The page's HTML, which reads from files in `output` what the book's figures share.

    `address` leads from the page to FOLDER in `output`.
    """
    if "shardwise-" not in html:
        return html
    folder = output / FOLDER
    scripts = []
    for name, text in _scripts().items():
        inline, lifted = f"({text})(root", f'(shardwise["{name}"])(root'
        if inline in html:
            html = html.replace(inline, lifted)
            told = f'(globalThis.shardwise ??= {{}})["{name}"] = {text};\n'
            _write(folder / name, told)
            scripts.append(f'<script src="{address}/{name}"></script>')
    seen = set()

    def style(match):
        name = f"{hashlib.sha256(match[1].encode()).hexdigest()[:12]}.css"
        _write(folder / name, match[1])
        link = "" if name in seen else f'<link rel="stylesheet" href="{address}/{name}"/>'
        seen.add(name)
        return link

    return "".join(scripts) + STYLE.sub(style, html)


def _scripts():
    """The text of each script of the package's figures, as figures write it into a page."""
    from . import figures  # JAX comes with it, which a book without figures can do without
    from .figures.interactive import code

    found = [path.name for path in files(figures).iterdir() if path.name.endswith(".js")]
    return {name: code(name) for name in sorted(found)}


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
