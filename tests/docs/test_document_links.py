"""Links lead somewhere: on GitHub, where the documents are read as they are, and in the site."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import DOCUMENTS
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "documents"))
import reference

PAGES = {
    **DOCUMENTS,
    "scripts/examples/README.md": (ROOT / "scripts" / "examples" / "README.md").read_text(),
}


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", without_code(text), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        again = found.get(anchor, 0)
        found[anchor] = again + 1
        if again:
            found[f"{anchor}-{again}"] = 1
    return set(found)


@functools.cache
def text_in_site(file: Path) -> str:
    """Return a page's text: generated as in the build, or read from the file."""
    name = os.path.relpath(file, ROOT / "docs")
    return reference.PAGES[name]() if name in reference.PAGES else file.read_text()


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_resolve(page: str) -> None:
    prose = re.sub(r"`[^`\n]*`", "", without_code(PAGES[page]))
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / file).resolve() if file else ROOT / page
        assert target.exists(), f"{page}: {link} leads nowhere"
        if anchor:
            assert anchor in anchors(text_in_site(target)), f"{page}: {link} is no heading there"
        if page.startswith("docs/"):
            inside = target.is_relative_to(ROOT / "docs")
            assert inside, f"{page}: {link} leaves docs/, which the site cannot; name it in code"


def test_anchors_are_those_of_github() -> None:
    text = "# A `b` c!\n## 2. Shard the data\n## learning_rate.decay\n## x\n## x\n```\n# no\n```\n"
    assert anchors(text) == {"a-b-c", "2-shard-the-data", "learning_ratedecay", "x", "x-1"}


@pytest.mark.extended
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """`make docs`: pages that the navigation lacks and links that lead nowhere are errors."""
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "tutorial" / "four-machines.html").exists()
    for page, anchor in (
        ("api", "distributedoptimizer"),
        ("command-line", "tfcommx-train"),
        ("recipe", "learning_ratedecay-cosine"),
    ):
        html = (tmp_path / "reference" / f"{page}.html").read_text()
        assert f'id="{anchor}"' in html, f"{page} is not generated"
