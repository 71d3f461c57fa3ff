"""Every page: links, paths and names exist, and calls and commands have existing arguments."""

import ast
import importlib.util
import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer

import keras_vit
from keras_vit import explain, preprocessing
from keras_vit_cli.main import app

pytestmark = pytest.mark.backend_free

ROOT = Path(__file__).parent.parent
FOLDERS = (".", "docs", "docs/browser", "benchmarks", "savedmodels")
PAGES = [page for folder in FOLDERS for page in (ROOT / folder).glob("*.md")]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
NAMES = {"keras_vit": keras_vit, "explain": explain, "preprocessing": preprocessing}
MADE = ("docs/browser/model.tflite", "benchmarks/results")  # by commands of the page
COMMANDS = typer.main.get_command(app).commands


def blocks(text, *languages):
    return re.findall(rf"^ *```(?:{'|'.join(languages)})\n(.*?)^ *```$", text, re.M | re.S)


def wrong_links(page, text):
    """Local links to a file or a heading that does not exist."""
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if link.startswith(("https://", "http://")):
            continue
        if not target.exists():
            yield link
        elif anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            if anchor not in anchors:
                yield link


def paths(text):
    """Our files and folders that the page names, and tests as "file::test"."""
    places = "keras_vit|keras_vit_cli|training|tests|benchmarks|docs"
    for path in re.findall(rf"(?<![\w/.:-])(?:{places})/[\w./:-]*\w", text):
        if "NAME" not in path and "TARGET" not in path and not path.startswith(MADE):
            yield path


def wrong_paths(text):
    for path in paths(text):
        file, _, test = path.partition("::")
        if not (ROOT / file).exists() or (
            test and f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
        ):
            yield path


def names(text):
    """Dotted names of our packages, and modules that `python -m` runs."""
    dotted = re.findall(r"\b(?:keras_vit|keras_vit_cli|benchmarks)(?:\.[a-zA-Z_]\w*)+", text)
    return [*dotted, *re.findall(r"-m ((?:training|benchmarks|keras_vit_cli)[\w.]*\w)", text)]


def wrong_names(text):
    for name in names(text):
        found, *parts = name.split(".")
        module = importlib.import_module(found)
        for part in parts:
            found = f"{found}.{part}"
            if not hasattr(module, part) and importlib.util.find_spec(found) is None:
                yield name
                break
            module = getattr(module, part, None) or importlib.import_module(found)


def calls(text):
    """Calls of our functions in the page's Python: the dotted name and the keywords."""
    for block in blocks(text, "python"):
        try:
            tree = ast.parse(inspect.cleandoc(block))
        except SyntaxError:  # a quotation that starts inside a function
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if re.fullmatch(r"[\w.]+", name) and name.split(".")[0] in NAMES:
                    yield name, [k.arg for k in node.keywords if k.arg]


def wrong_calls(text):
    for name, keywords in calls(text):
        first, *rest = name.split(".")
        found = NAMES[first]
        for part in rest:
            found = getattr(found, part, None)
        if found is None:
            yield name
            continue
        parameters = inspect.signature(found).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        yield from (f"{name}({k}=)" for k in keywords if k not in parameters and not anything)


def commands(text):
    """Lines of the page's shell blocks, and pieces between backticks, that call `keras-vit`."""
    pieces = re.findall(r"`(keras-vit \w[^`\n]+)`", text)
    for block in blocks(text, "sh", "bash"):
        pieces += re.findall(r"^keras-vit \w.*$", block.replace("\\\n", " "), re.M)
    for piece in pieces:
        yield re.split(r"\s+(?:#|->|\||&&)\s", piece)[0]


def wrong_commands(text):
    for line in commands(text):
        name, *words = shlex.split(line)[1:]
        known = COMMANDS.get(name)
        options = {o for p in known.params for o in p.opts} if known else ()
        given = [word.partition("=")[0] for word in words if word.startswith("--")]
        if known is None or set(given) - set(options):
            yield line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_names_only_what_exists(page):
    text = TEXTS[page]
    wrong = [*wrong_links(page, text), *wrong_paths(text), *wrong_names(text)]
    assert [*wrong, *wrong_calls(text), *wrong_commands(text)] == []


def test_pages_have_what_is_checked():
    assert sum(len(list(paths(text))) for text in TEXTS.values()) > 100
    assert sum(len(names(text)) for text in TEXTS.values()) > 100
    assert sum(len(list(calls(text))) for text in TEXTS.values()) > 60
    assert sum(len(list(commands(text))) for text in TEXTS.values()) > 50


def test_page_with_a_mistake_is_found():
    page = ROOT / "README.md"
    for link in ("docs/none.md", "docs/vit.md#none", "#none"):
        assert list(wrong_links(page, f"[a]({link}) [b](docs/vit.md#the-model)")) == [link]
    text = "`tests/reference.py::none`, `tests/reference.py::forward`, keras_vit/none.py"
    assert list(wrong_paths(text)) == ["tests/reference.py::none", "keras_vit/none.py"]
    text = "`keras_vit.train.scope`, keras_vit.train.none, python -m training.none"
    assert list(wrong_names(text)) == ["keras_vit.train.none", "training.none"]
    block = "```python\nkeras_vit.{}\n```\n"
    text = block.format("export_onnx(m, dtype=1)") + block.format("export_onnx(m, quantise=1)")
    assert list(wrong_calls(text)) == ["keras_vit.export_onnx(quantise=)"]
    text = block.format("explain.plot_none(m)")
    assert list(wrong_calls(text)) == ["keras_vit.explain.plot_none"]
    text = "`keras-vit export x --to onnx` `keras-vit export x --at onnx`\n"
    text += "```sh\nkeras-vit none x  # --to\nkeras-vit info x\n```\n"
    assert list(wrong_commands(text)) == ["keras-vit export x --at onnx", "keras-vit none x"]
