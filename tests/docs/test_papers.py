"""The code of the page for readers of papers runs as printed."""

from __future__ import annotations

import re

import pytest
from documents import DOCUMENTS, python_blocks

PAGE = "docs/reference/papers.md"
CODES = [code for _, code in python_blocks(PAGE)]
PAPERS = re.findall(r"^## (.*):", DOCUMENTS[PAGE], re.M)


@pytest.mark.parametrize("number", range(len(PAPERS)), ids=PAPERS)
def test_the_code_beside_a_paper_runs(number: int) -> None:
    assert len(CODES) == len(PAPERS) and "assert " in CODES[number]
    exec(compile(CODES[number], f"{PAGE}, {PAPERS[number]}", "exec"), {"__name__": "papers"})
