"""Which entries travel: the table of selection rules. A new rule is one file here and one row.

Each module has, in this order:
    select(gradient, k, seed) -> Sparse: k entries of float [n], indices int32 [k] ascending, values
    float32 [k] select_with_residual(gradient, residual, k, seed, velocity=None, momentum=0.0) ->
    Sparse: the same of gradient + residual;
        what is not chosen stays in the residual, a float32 [n] variable. With a velocity, another
        one, momentum is corrected for (`native.select_with_residual`)
Laws: the indices are unique and in range; k of them, always; sent + kept = gradient + residual,
entry by entry; NaN and Inf are chosen before all else, and never enter a residual or a velocity.
The result depends on the inputs and the seed alone.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from tfcommx.terms import check_name

RULES = ("all", "dgc", "exact", "mstopk", "random", "threshold")


def rule(name: str) -> ModuleType:
    """Return the rule's module; refuse an unknown name with the nearest one."""
    return importlib.import_module(f"{__name__}.{check_name('selection rule', name, RULES)}")
