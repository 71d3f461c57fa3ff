"""`keras-vit models`: the known checkpoints."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from keras_vit_cli import output
from keras_vit_cli.backend import load_library
from keras_vit_cli.options import AsJson, Debug, Verbose

if TYPE_CHECKING:
    from keras_vit.weights.fetch.known import Known


def models(
    text: Annotated[list[str] | None, typer.Argument(help="Words to search for.")] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """List the known checkpoints, or those that contain every word of TEXT.

    Example: keras-vit models b16 in21k
    """
    load_library()
    from keras_vit.weights.fetch import known

    words = " ".join(text or [])
    rows = known.search(words)
    if as_json:
        output.print_json([row._asdict() for row in rows])
        return
    if not rows:
        near = ", ".join(known.nearest(words)) or "see keras-vit models"
        raise ValueError(f"text must be in some row of the table: {near}. Received: text={words!r}")
    if output.out.is_terminal:
        output.out.print(_table(rows))
    else:
        output.print_rows(rows)


def _table(rows: list["Known"]) -> Table:
    """The rows for a terminal. Names are never cut, because users copy them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True, min_width=max(len(row.name) for row in rows))
    for title in ("size", "classes"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("trained on")
    if wide := output.out.width >= 110:
        table.add_column("format", no_wrap=True)
        table.add_column("license", no_wrap=True, overflow="ellipsis", max_width=16)
    for row in rows:
        cells = [row.name, str(row.image_size), str(row.num_classes or "-"), row.pretraining]
        table.add_row(*cells, *((row.format, row.license) if wide else ()))
    return table
