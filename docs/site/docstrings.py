"""Docstrings for mkdocstrings: an example as Keras writes it would be a quotation in Markdown."""

import re

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)  # up to an empty line


def fenced(text: str) -> str:
    """A docstring with its examples in fenced blocks."""
    text = text.replace("][", r"]\[")  # would be a link
    text = re.sub(r"^( *)Example:$\n\n(?=\1>>> )", r"\1**Example**\n\n", text, flags=re.MULTILINE)
    return EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


class Examples(griffe.Extension):
    """Fences the examples of every object."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Is called for each object of the source."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
