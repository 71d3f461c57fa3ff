"""The measurements as one table."""

from rich import box
from rich.table import Table

COLUMNS = ("backend", "dtype", "mode", "contender", "img/s", "median", "x keras_vit", "of peak")


def table(groups, title):
    """A section for each backend, dtype and mode; a line for each contender and for the peak."""
    result = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate(COLUMNS):
        result.add_column(column, justify="left" if i < 4 else "right", no_wrap=True)
    for group in groups:
        lines = [_line(name, row, group) for name, row in group["contenders"].items()]
        if group.get("peak_flops_per_second"):
            top = group["peak_flops_per_second"] / group["flops_per_image"]
            lines.append(("(matrix product)", f"{top:.2f}", "", "", "100%"))
        where = (group["backend"], group["dtype"], group["mode"])
        for line in lines:
            result.add_row(*where, *line)
            where = ("", "", "")
        result.add_section()
    return result


def failures(groups):
    """One line for each failure: where, who and why."""
    return [
        f"{group['backend']} {group['dtype']} {group['mode']}: {name} failed: {row['message']}"
        for group in groups
        for name, row in group["contenders"].items()
        if row["status"] == "failed"
    ]


def _line(name, row, group):
    if row["status"] != "measured":
        return (name, row["status"], "", "", "")
    ours = [
        other["images_per_second"]
        for name, other in group["contenders"].items()
        if name.startswith("keras_vit") and other["status"] == "measured"
    ]
    speed = row["images_per_second"]
    return (
        name,
        f"{speed:.2f}",
        f"{row['images_per_second_median']:.2f}",
        f"{speed / max(ours):.2f}" if ours else "",
        f"{row['share_of_peak']:.0%}",
    )
