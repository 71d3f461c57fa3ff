"""The API reference: the public names, read from the source, and the pages for mkdocstrings."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {  # in the order of the navigation
    "keras_vit": "Models, weights, exports",
    "keras_vit.layers": "Layers",
    "keras_vit.preprocessing": "Preprocessing",
    "keras_vit.runtime": "Running models",
    "keras_vit.bulk": "Many images",
    "keras_vit.benchmark": "The fastest export",
    "keras_vit.explain": "Explanations",
    "keras_vit.train": "Training",
}
FACTORIES = """## Published sizes

Each of these functions returns a `ViT`. It takes `num_classes` (1000 if nothing is passed),
`weights` (a name that `keras-vit models` lists, or what else `from_pretrained` takes; the fields
then default to the checkpoint's), `name`, `dtype`, `trainable`, and every field of
[`ViTConfig`][keras_vit.ViTConfig] as a keyword argument. `help(keras_vit.vit_b16)` lists them."""


def public_names(module: str) -> list[str]:
    """`__all__` of a module, from its source: it has the lazily imported names too."""
    place = ROOT.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError(f"{file} must define __all__")


def reference() -> dict[str, str]:
    """The pages of the API reference: path and Markdown of each."""
    pages = {}
    for module, title in MODULES.items():
        names = [n for n in public_names(module) if f"{module}.{n}" not in MODULES]
        parts = [f"# {title}\n\n`{module}`"]
        if module == "keras_vit":
            listed = "\n".join(f"- [`{m}`]({m}.md): {t}" for m, t in MODULES.items() if m != module)
            parts += [f"The other modules:\n\n{listed}"]
        parts += [f"::: {module}.{name}" for name in names]
        if module == "keras_vit":
            parts.insert(2 + names.index("vit_b8"), FACTORIES)
        pages[f"reference/{module}.md"] = "\n\n".join(parts) + "\n"
    return pages
