"""The page about CommLib's paper: its code has the results that its text states."""

from __future__ import annotations

from typing import Any

import numpy as np
from documents import python_blocks


def test_the_code_has_the_results_that_the_page_states() -> None:
    ((_, code),) = python_blocks("docs/explanation/commlib.md")
    found: dict[str, Any] = {}
    exec(compile(code, "commlib.md", "exec"), found)
    vector = found["vector"].numpy()
    for chosen in (found["chosen"], found["searched"]):
        indices = chosen.indices.numpy()
        assert indices.shape == (100,) and (np.diff(indices) > 0).all()
        np.testing.assert_array_equal(chosen.values, vector[indices])
    assert found["bucket"].k == 25
    totals = [total.numpy() for total in found["totals"]]
    assert len(totals) == 8 and all(np.array_equal(total, totals[0]) for total in totals)
    kept = np.sum(found["residuals"], axis=0).reshape(100, 100)
    expected = np.sum([gradient.numpy() for gradient in found["gradients"]], axis=0)
    np.testing.assert_allclose(totals[0] + kept, expected, atol=1e-5)
    assert np.count_nonzero(totals[0]) <= 2 * 4 * 25
    np.testing.assert_allclose(np.mean(found["traffic"], axis=0), found["counted"])
    assert found["counted"].between == 25 * 8
