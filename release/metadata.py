"""What the wheel says of its origin, from release/identity.toml: addresses, and a README whose links hold elsewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURES = (".svg", ".png")


class PublishedMetadata(MetadataHookInterface):
    """Hatchling's hook for the fields that pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in `urls` and `readme`."""
        root = Path(self.root)
        stated = tomllib.loads((root / "release" / "identity.toml").read_text(encoding="utf-8"))
        tag = f"v{metadata['version']}"
        metadata["urls"] = {
            "Documentation": stated["documentation"],
            "Source": stated["repository"],
            "Issues": f"{stated['repository']}/issues",
            "Changelog": f"{stated['repository']}/blob/{tag}/CHANGELOG.md",
        }
        readme = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(readme, stated["repository"], tag)}


def absolute(text: str, repository: str, tag: str) -> str:
    """Return a page of the repository with links that hold outside of it, to the files of a tag."""

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match[2].endswith(PICTURES) else "blob"
        return f"{match[1]}{repository}/{kind}/{tag}/{match[2]}"

    return re.sub(r'(\]\(|src=")(?![a-z]+:|#)([^)"\s]+)', link, text)
