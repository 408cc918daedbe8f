"""The backward pass: when the gradients of each bucket are ready, and which piece completes it."""

from __future__ import annotations

from collections import defaultdict

from tfcommx.terms import Piece, Plan, PlanError, Profile


def buckets_ready(plan: Plan, profile: Profile) -> list[float]:
    """Return when the last gradient of each bucket is ready, from the start of the backward pass.

    **Raises:** PlanError if the plan and the profile have different variables.
    """
    known = {row.name: row for row in profile.variables}
    entries: defaultdict[str, int] = defaultdict(int)
    found = []
    for bucket in plan.buckets:
        paths = [Piece.of(name).path for name in bucket.variables]
        for path, size in zip(paths, bucket.sizes, strict=True):
            entries[path] += size
            if path not in known:
                raise PlanError(
                    f"A profile of the plan's model is required. The profile of "
                    f"{profile.model!r} lacks {path!r}; it has {list(known)[:3]}, ..."
                )
        found.append(max((known[path].ready_s for path in paths), default=0.0))
    for name, row in known.items():
        if entries[name] != row.size:
            raise PlanError(
                f"A profile of the plan's model is required. {name!r} has {row.size} entries in "
                f"the profile of {profile.model!r} and {entries[name]} in the plan."
            )
    return found


def backward_pieces(plan: Plan, profile: Profile) -> list[tuple[str, float, list[int]]]:
    """Cut the backward pass into pieces: (variable, seconds, numbers of the buckets it completes).

    **Raises:** as `buckets_ready`.
    """
    complete: defaultdict[float, list[int]] = defaultdict(list)
    for number, seconds in enumerate(buckets_ready(plan, profile)):
        complete[seconds].append(number)
    names: dict[float, str] = {}
    for row in profile.variables:
        names[row.ready_s] = row.name
    found, before = [], 0.0
    for seconds in sorted(names):
        found.append((names[seconds], seconds - before, complete.pop(seconds, [])))
        before = seconds
    if profile.backward_s > before:
        found.append(("rest of the backward pass", profile.backward_s - before, []))
    return found
