"""What would shorten a step: predictions with one thing changed at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfcommx.planner.predict import Prediction, Setting
from tfcommx.terms import Link, Profile, Scheme


def what_helps(scheme: Scheme, setting: Setting) -> dict[str, Prediction]:
    """Predict the step as it is, then with faster links, fewer slots, half the density, ...

    Returns:
        What was changed -> the step; the first is "as it is".
    """
    topology, links = setting.topology, setting.links
    changed = {"as it is": (scheme, setting)}

    def change(what: str, **fields: Any) -> None:
        changed[what] = (scheme, setting._replace(**fields))

    if topology.nodes > 1:
        faster = _twice_the_rate(links.between)
        change("twice the rate between nodes", links=links._replace(between=faster))
        sooner = dataclasses.replace(links.between, alpha_s=links.between.alpha_s / 2)
        change("half the latency between nodes", links=links._replace(between=sooner))
    if topology.slots > 1:
        faster = _twice_the_rate(links.inside)
        change("twice the rate inside nodes", links=links._replace(inside=faster))
        fewer = dataclasses.replace(topology, slots=topology.slots // 2, uneven=())
        change("half the slots a node", topology=fewer)
    if scheme.selection != "all":
        thinner = dataclasses.replace(scheme, density=scheme.density / 2)
        changed["half the density"] = (thinner, setting)
    change("twice the batch", profile=_twice_the_batch(setting.profile))
    return {what: under.predict(how) for what, (how, under) in changed.items()}


def _twice_the_rate(link: Link) -> Link:
    return dataclasses.replace(link, beta_s_per_byte=link.beta_s_per_byte / 2)


def _twice_the_batch(profile: Profile) -> Profile:
    """Double the compute times; an update takes what it took."""
    rows = tuple(
        dataclasses.replace(row, ready_s=2 * row.ready_s, forward_s=2 * row.forward_s)
        for row in profile.variables
    )
    return dataclasses.replace(
        profile,
        variables=rows,
        forward_s=2 * profile.forward_s,
        backward_s=2 * profile.backward_s,
        batch=2 * profile.batch,
    )
