"""What the site does to the pages beside MkDocs: formulas become MathML, files of the repository
that pages link to become pages of code, and the pages that lie at the root join the others.

The pages themselves stay as they are, so that they also read well where the repository is looked
at. A link to a file that is not there is left alone, and the strict build refuses it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from formulas import mathml

ROOT = Path(__file__).parents[1]
AT_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^([ ]*)(```+)(\w*)[^\n]*\n(.*?)^\1\2[ ]*$\n?", re.DOTALL | re.MULTILINE)
KINDS = {".py": "python", ".toml": "toml", ".yml": "yaml", ".ipynb": "json", ".txt": "text"}
# code is not what a search for words is about, and its page needs no list of contents
CODE = (
    "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# {path}\n\n``````{kind}\n{text}\n``````\n"
)


def _outside_fences(text: str, change: Any) -> str:
    """A page with `change` made to all that is no fenced block, and formulas as MathML."""
    made, start = [], 0
    for block in FENCE.finditer(text):
        made.append(change(text[start : block.start()]))
        start = block.end()
        if block[3] == "math":
            made.append(f'<div class="formula">{mathml(block[4])}</div>\n')
        else:
            made.append(block[0])
    return "".join([*made, change(text[start:])])


def _repository_path(page: str, target: str) -> str:
    """Where a link of a page leads, from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def _source_of(page: str) -> str:
    """The file of the repository that a page of the site is made of."""
    at_root = {made: name for name, made in AT_ROOT.items()}
    return at_root.get(page, f"docs/{page}")


def _code_page(path: str) -> str | None:
    """The page of a file of the repository that is no page itself; None where it is no such."""
    place = ROOT / path
    page = path.startswith("docs/") and place.suffix != ".py"
    if page or path.startswith("..") or not place.is_file() or place.suffix not in KINDS:
        return None
    return f"code/{path}.md"


def _link(page: str, match: re.Match[str]) -> str:
    if "://" in match[2]:
        return match[0]
    path = _repository_path(_source_of(page), match[2])
    made = _code_page(path) or AT_ROOT.get(path)
    if made is None and path.startswith("docs/"):
        made = path.removeprefix("docs/")
    if made is None:
        return match[0]
    target = posixpath.relpath(made, posixpath.dirname(page) or ".")
    return f"{match[1]}{target}{match[3]}"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the root, and a page for each file of the repository that is linked."""
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for name, made in AT_ROOT.items():
        texts[made] = (ROOT / name).read_text()
        files.append(File.generated(config, made, content=texts[made]))
    linked = {
        _repository_path(_source_of(page), match[2])
        for page, text in texts.items()
        for match in LINK.finditer(text)
    }
    for path in sorted(linked):
        made = _code_page(path)
        if made is not None:
            place = ROOT / path
            text = CODE.format(path=path, kind=KINDS[place.suffix], text=place.read_text())
            files.append(File.generated(config, made, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to where the site has them, and write formulas."""
    uri = page.file.src_uri
    if uri.startswith("code/"):
        return markdown
    return _outside_fences(markdown, lambda text: LINK.sub(lambda m: _link(uri, m), text))
