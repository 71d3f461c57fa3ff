"""The pages of the notebooks: text, code, and the outputs that are stored in them."""

import base64
import json
from pathlib import Path


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """The Markdown of a notebook, and the pictures in it by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![Output of the code above]({name})")
            else:
                shown = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures
