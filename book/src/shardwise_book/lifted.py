"""Scripts and styles of interactive figures, as files of the site.

A notebook's figure brings all it needs with it; of a page with several, each would be there again.
"""

import hashlib
import re
from pathlib import Path

FOLDER = "_static/figures"
STYLE = re.compile(r"<style>\s*(\.shardwise-.*?)</style>", re.DOTALL)


def lift(html: str, output: Path, address: str) -> str:
    """The page's HTML, which reads from files in `output` what the book's figures share.

    `address` leads from the page to FOLDER in `output`.
    """
    if "shardwise-" not in html:
        return html
    from .figures.interactive import code  # JAX comes with it; most pages do without

    folder, linked = output / FOLDER, {}  # {file: the tag that reads it}
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(path.name for path in Path(__file__).parent.glob("figures/*.js")):
        text = code(name)
        inline, lifted = f"({text})(root", f'(shardwise["{name}"])(root'
        if inline in html:
            html = html.replace(inline, lifted)
            told = f'(globalThis.shardwise ??= {{}})["{name}"] = {text};\n'
            (folder / name).write_text(told, encoding="utf-8")
            linked[name] = f'<script src="{address}/{name}"></script>'
    scripts = "".join(linked.values())

    def style(match):
        name = f"{hashlib.sha256(match[1].encode()).hexdigest()[:12]}.css"
        (folder / name).write_text(match[1], encoding="utf-8")
        link = "" if name in linked else f'<link rel="stylesheet" href="{address}/{name}"/>'
        linked[name] = link
        return link

    return scripts + STYLE.sub(style, html)
