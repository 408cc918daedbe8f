"""Rule `exact`: the k largest magnitudes; of equal ones the lowest indices."""

from __future__ import annotations

from tfcommx.selection.native import NativeSelector

RULE = NativeSelector("exact")
