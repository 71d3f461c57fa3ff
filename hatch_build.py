"""The front page of the package index: README.md, whose links are relative, with absolute ones.

The repository's address is REPOSITORY_URL, which the release workflow sets. Without it, as in an
install from a checkout, README.md is taken as it is.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def absolute(text: str, repository: str, version: str) -> str:
    """Markdown whose relative links and images lead to the version's tag in the repository."""

    def link(found: re.Match) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}[{found[2]}]({repository}/{kind}/v{version}/{found[3]})"

    return LINK.sub(link, text)


class CustomMetadataHook(MetadataHookInterface):
    """Fills in the fields that pyproject.toml calls dynamic."""

    def update(self, metadata: dict) -> None:
        """Is called by hatchling before a build."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("REPOSITORY_URL", "").rstrip("/")
        if repository:
            text = absolute(text, repository, metadata["version"])
            changes = f"{repository}/blob/v{metadata['version']}/CHANGELOG.md"
            metadata["urls"] = {"Repository": repository, "Changes": changes}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
