"""A cache on disk of what one run has measured, for the next run.

    folder/choice-1f0c9a52b7d3e846.json    {"key": what it depends on, "value": {...}}

Only rank 0 reads and writes them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from tfcommx.comm.launcher import cache_folder
from tfcommx.terms import PlanError, reading, write_text

log = logging.getLogger("tfcommx")


def read(kind: str, key: Any) -> dict[str, Any] | None:
    """Return what was kept under an equal key; None if nothing was, or the file is damaged.

    Args:
        kind: of measurement, a word.
        key: what it depends on; as JSON can write it.
    """
    try:
        path = _path(kind, key)
        if not path.exists():
            return None
        with reading("A measurement that was kept", path, "It is measured again."):
            found = json.loads(path.read_text())
            if found["key"] == json.loads(json.dumps(key)):
                return dict(found["value"])
    except (OSError, PlanError) as error:
        log.warning("What was measured before cannot be read, and is measured again: %s", error)
    return None


def write(kind: str, key: Any, value: dict[str, Any]) -> None:
    """Keep a measurement in place of the one before; if that fails, say so and continue."""
    try:
        write_text(_path(kind, key), json.dumps({"key": key, "value": value}, indent=1))
    except OSError as error:
        log.warning("What was measured is not kept: %s.", error)


def _path(kind: str, key: Any) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{kind}-{digest[:16]}.json"
