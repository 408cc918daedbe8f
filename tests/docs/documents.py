"""The documents that tests read: README and all pages in docs/."""

from __future__ import annotations

import re

from launching import ROOT

DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
TUTORIAL = "docs/tutorial/four-machines.md"


def python_blocks(name: str) -> list[tuple[str, str]]:
    """Return (the comment right above it or "", code) of each Python block of a document."""
    return re.findall(r"(?:<!-- ([^>]*) -->\n)?```python\n(.*?)```", DOCUMENTS[name], re.S)
