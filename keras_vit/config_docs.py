"""The documentation of a config's fields, moved to where `help()` looks for it.

Python drops the strings that follow the fields of a dataclass. They are read from the source, which
takes less than a millisecond; without a source, `help()` lists the fields alone.
"""

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


def documented(cls: T) -> T:
    """Appends the section "Attributes" to the docstring of a dataclass."""
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAttributes:\n{_section(cls)}"
    return cls


def with_fields(
    function: Callable, config: type, defaults: Mapping[str, Any], more: Mapping[str, str]
) -> None:
    """Gives a function that takes fields of a config as `**fields` their signature and their docs.

    Args:
        function: A function of documented parameters, with a docstring without a section "Args".
        config: The dataclass.
        defaults: The defaults that differ from the dataclass's.
        more: Docs of the parameters that are not fields: the function's own, and keywords that
            default to None.
    """
    own = inspect.signature(function)
    named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {p.name for p in named}
    keyword = inspect.Parameter.KEYWORD_ONLY
    fields = [
        inspect.Parameter(f.name, keyword, default=defaults.get(f.name, f.default))
        for f in dataclasses.fields(config)
        if f.name not in taken
    ]
    others = [inspect.Parameter(name, keyword, default=None) for name in more if name not in taken]
    function.__signature__ = own.replace(parameters=[*named, *fields, *others])  # type: ignore[attr-defined]
    lines = "\n".join(_entry(name, text) for name, text in more.items())
    head, _, example = inspect.cleandoc(function.__doc__ or "").partition("\n\nExample:")
    example = f"\n\nExample:{example}" * bool(example)
    section = _section(config, taken)
    function.__doc__ = f"{head}\n\nArgs:\n{lines}\n{section}{example}"


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The string after each field of a class, by the field's name; empty without a source."""
    return {name: " ".join(text.split()) for name, text in _strings(cls.__module__).items()}


def _strings(module: str) -> dict[str, str]:
    spec = getattr(sys.modules[module], "__spec__", None)
    get_source = getattr(getattr(spec, "loader", None), "get_source", None)
    source = get_source(module) if get_source else None
    if source is None:
        return {}
    body = ast.parse(source.partition("\n    def ")[0]).body  # fields precede methods
    lines = [line for node in body if isinstance(node, ast.ClassDef) for line in node.body]
    docs = {}
    for field, text in zip(lines, lines[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(d))
            ):
                docs[name] = d
    return docs


def _section(cls: type, without: set[str] | frozenset[str] = frozenset()) -> str:
    docs = field_docs(cls)
    names = [f.name for f in dataclasses.fields(cls) if f.name not in without]
    return "\n".join(_entry(name, docs.get(name, "")) for name in names)


@functools.cache
def _entry(name: str, text: str) -> str:
    return textwrap.fill(
        f"{name}: {text}".strip(), 92, initial_indent=" " * 4, subsequent_indent=" " * 8
    )
