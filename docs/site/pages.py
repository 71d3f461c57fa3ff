"""The pages of the site, under their paths in the repository, so that links stay as they are.

The guides, both front pages and the other Markdown files are taken as they are. Three kinds of
pages are made: the API reference (`api_reference.py`), the notebooks (`notebook_pages.py`), and a
page for each source file or folder that another page links to. No page needs another site than this
one.
"""

import ast
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from api_reference import MODULES, reference  # beside this file
from latex2mathml.converter import convert as mathml  # which browsers show without a script
from mkdocs.structure.files import File, Files, InclusionLevel
from notebook_pages import notebook_page

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MARKDOWN = (
    *("README.md", "README.zh-CN.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("benchmarks/README.md", "savedmodels/README.md", "docs/browser/README.md"),
)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(?=[)#])")
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"^ *<!-- not run: (.*) -->$", re.MULTILINE)  # before a block
EQUATION = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".sh": "sh", ".sbatch": "sh", ".yml": "yaml", ".toml": "toml"}
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"


def rewritten(text: str, page: str) -> str:
    """A page whose links to source files lead to the pages of these files."""

    def link(found: re.Match) -> str:
        target = ROOT / os.path.normpath(os.path.join(os.path.dirname(page), found[1]))
        if target.is_dir():
            return f"{found[1].rstrip('/')}/index.md"
        shown = target.suffix in (".md", ".png") or not target.exists()
        return found[1] if shown else f"{found[1]}.md"

    # GitHub nests by two or three spaces, Python-Markdown by four.
    pieces = FENCED.split(text)
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r"^  (?=- )", "    ", LINK.sub(link, pieces[i]), flags=re.MULTILINE)
    for i in range(1, len(pieces), 2):
        if pieces[i].startswith(" "):
            pieces[i] = "\n" + textwrap.indent(textwrap.dedent(pieces[i]), " " * 4) + "\n"
    text = NOT_RUN.sub(r"<small>Not run here: \1.</small>\n", "".join(pieces))
    return EQUATION.sub(lambda found: mathml(found[1], display="block"), text)


def linked(text: str, page: str) -> Iterator[str]:
    """Source files and folders that a page links to."""
    for link in LINK.findall("".join(FENCED.split(text)[::2])):
        path = os.path.normpath(os.path.join(os.path.dirname(page), link))
        if (ROOT / path).exists() and Path(path).suffix not in (".md", ".png", ".ipynb"):
            yield path


def source_page(path: str) -> tuple[str, str]:
    """The path and the Markdown of the page of a file, or of a folder."""
    place = ROOT / path
    if place.is_dir():
        files = sorted(p for p in place.rglob("*.*") if p.suffix in (".py", ".md", ".sh"))
        rows = [f"| `{p.relative_to(place)}` | {_purpose(p)} |" for p in files]
        body = "\n".join(["| file | what it is |", "|---|---|", *rows])
        return f"{path}/index.md", f"{HIDDEN}# `{path}`\n\n{body}\n"
    code = place.read_text(encoding="utf-8")
    return (
        f"{path}.md",
        f"{HIDDEN}# `{path}`\n\n````{LANGUAGES.get(place.suffix, 'text')}\n{code}````\n",
    )


def _purpose(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    elif file.suffix == ".sh":
        text = "".join(re.findall(r"^# (.*)$", text, re.MULTILINE)[:1])
    return text.lstrip("# ").partition("\n")[0].replace("|", "\\|")


def on_config(config):
    """Adds the reference to the navigation."""
    part = next(part for part in config.nav if "Reference" in part)
    part["Reference"] = [{MODULES[p[10:-3]]: p} for p in reference()]
    return config


def on_files(files: Files, config) -> Files:
    """All files of the site, under their paths in the repository."""
    site = Files([file for file in files if file.src_dir != config.docs_dir])
    guides = [p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "docs").glob("*.md"))]
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in (*MARKDOWN, *guides)}
    sources = dict(source_page(p) for page, text in texts.items() for p in linked(text, page))
    made = {**{p: rewritten(text, p) for p, text in texts.items()}, **reference()}
    for path, text in made.items():
        site.append(File.generated(config, path, content=text))
    shown = InclusionLevel.NOT_IN_NAV
    for path, text in sources.items():
        site.append(File.generated(config, path, content=text, inclusion=shown))
    for notebook in NOTEBOOKS:
        text, pictures = notebook_page(notebook)
        path = notebook.relative_to(ROOT).as_posix()
        page = rewritten(text, path)
        site.append(File.generated(config, f"{path}.md", content=page, inclusion=shown))
        for name, content in pictures.items():
            site.append(File.generated(config, f"notebooks/{name}", content=content))
    images = sorted((ROOT / "docs" / "images").glob("*.png"))
    for file in (*images, ROOT / "docs" / "site" / "style.css"):
        path = file.relative_to(ROOT).as_posix()
        site.append(File.generated(config, path, abs_src_path=str(file)))
    return site
