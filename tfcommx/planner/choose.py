"""Ranks the schemes that a cluster can carry out by the predicted time of a step.

    asked for               tried
    selection "all"         every dense route of the cluster x mergings; nothing is lost
    in 16 or fewer bits     these, and every dense route that writes them; rounding errors are kept
    by a compression        these, and every dense route with it; unsent parts are kept
    "mstopk" at a density   these, and every sparse route x mergings, with dense variables on the
                            dense route that is notably faster alone, or Horovod's
    `with_codes`            also sums of all entries in 8 and 4 bits

Predictions only propose: measured times decide.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Sequence

from tfcommx import routes
from tfcommx.core import NARROW, NO_COMPRESSION, PLAIN, PlanError, Scheme, Topology
from tfcommx.planner.check import check_scheme
from tfcommx.planner.predict import Prediction, Setting
from tfcommx.routes.route import DenseRoute
from tfcommx.routes.torus import PEER_ROUTES

_step_s = operator.attrgetter("step_s")
# Mergings tried for every route; `optimal` takes seconds for a large model: for the best ones only.
QUICK_MERGINGS = ("threshold", "mg_wfbp", "single")
ROUTES_FOR_OPTIMAL = 2
# Largest predicted step of a scheme, as a share of a preferred one's, such as plain Horovod's, with
# which it is chosen instead; not 1, because predictions are not exact
NOTABLY_FASTER = 0.97

# Format of selected entries if the scheme names none: about half the bytes of
# block16/float16. Rounding errors, some 1e-5 of the squares, stay in the residual. Prices depend on
# bytes alone, and these are always fewer; reading an entry takes a nanosecond more, as long as the
# saved bits do on a link of some 20 Gbit/s. elias/int4 is shorter, and loses some 1e-2: by request.
SHORT_WIRE = "elias/int8"
# Codes that train as dense gradients do, with and without momentum.
CODES = ("int8", "int4")


def candidates(
    setting: Setting, asked: Scheme | None = None, messages: bool = False, thorough: bool = True
) -> list[Prediction]:
    """Plan and simulate every scheme that is as good as the requested one; the fastest first.

    >>> from tfcommx.core import NOMINAL, Profile, VariableProfile
    >>> profile = Profile("tiny", (VariableProfile("w", (8, 8), ready_s=0.01),), 0.01, 0.02, 8)
    >>> found = candidates(Setting(profile, Topology(2, 1), NOMINAL))
    >>> {candidate.scheme.selection for candidate in found}
    {'all'}

    Args:
        asked: with selection "all" (None: so): nothing but the order of additions may change.
            With another one: gradients may be selected by it at the scheme's density, and travel
            in SHORT_WIRE unless the scheme names a format.
        messages: can the launch send messages between two ranks? An MPI launch can.
        thorough: also the merging `optimal`, of the best routes, which takes most of the time.

    Returns:
        At least one; equal predictions in the order of the table of routes, plain Horovod first.

    **Cost:** a plan and a simulated step for each; some seconds for a model of 500 variables.
    **Raises:** PlanError for a profile without times.
    """
    profile, topology = setting.profile, setting.topology
    if not profile.timed:
        raise PlanError(
            "A profile that says when gradients are ready is required. Received one of "
            f"{profile.model!r} with sizes only. Measure it."
        )
    asked = asked or Scheme()
    for_optimal = ROUTES_FOR_OPTIMAL if thorough else 0
    dense = ranked(setting, _dense(asked, topology, messages), for_optimal)
    if asked.selection == "all":
        return dense
    # The first is plain Horovod with its best merging, because `dense` is sorted
    plain_s = next(row.step_s for row in dense if row.scheme.route == Scheme().route)
    quickest = dense[0].scheme if dense[0].step_s <= NOTABLY_FASTER * plain_s else Scheme()
    # Small variables travel as the quickest dense scheme says
    form = dataclasses.replace(
        asked,
        wire=SHORT_WIRE if asked.wire == PLAIN else asked.wire,
        dense_route=quickest.route,
        dense_wire=quickest.wire,
        peer_route=quickest.peer_route,
    )
    sparse = ranked(setting, on_sparse_routes(form, topology, messages), for_optimal)
    return sorted([*dense, *sparse], key=_step_s)


def with_codes(found: Sequence[Prediction], setting: Setting) -> list[Prediction]:
    """Add sums of all entries in codes of CODES bits to other predictions; the fastest first."""
    forms = [Scheme(wire=wire) for wire in CODES]
    sums = ranked(
        setting, on_dense_routes(forms, setting.topology, messages=False), ROUTES_FOR_OPTIMAL
    )
    return sorted([*found, *sums], key=_step_s)


def ranked(setting: Setting, schemes: Sequence[Scheme], for_optimal: int) -> list[Prediction]:
    """Predict schemes with the quick mergings, the `for_optimal` best with the optimal one, too.

    The fastest is first.
    """
    predictions = [
        setting.predict(dataclasses.replace(scheme, merging=merging))
        for scheme in schemes
        for merging in QUICK_MERGINGS
    ]
    fastest_first = sorted(predictions, key=_step_s)
    # Schemes that differ in their merging alone become equal here, and are predicted once
    optimal = (
        dataclasses.replace(prediction.scheme, merging="optimal") for prediction in fastest_first
    )
    best = list(dict.fromkeys(optimal))[:for_optimal]
    return sorted([*predictions, *map(setting.predict, best)], key=_step_s)


def _dense(request: Scheme, topology: Topology, messages: bool) -> list[Scheme]:
    """Return the schemes that select nothing, plain Horovod's first, then the requested forms."""
    plain = Scheme(bucket_bytes=request.bucket_bytes, block_bytes=request.block_bytes)
    narrow = request.wire if request.selection == "all" else request.dense_wire
    forms = [plain]
    if narrow in NARROW:
        forms.append(dataclasses.replace(plain, wire=narrow))
    if request.compression != NO_COMPRESSION:
        forms.append(dataclasses.replace(plain, compression=request.compression))
    return on_dense_routes(forms, topology, messages)


def on_dense_routes(forms: Sequence[Scheme], topology: Topology, messages: bool) -> list[Scheme]:
    """Return each scheme on every dense route of the cluster that can carry it out."""
    tried = [
        dataclasses.replace(form, route=name, peer_route=peers)
        for form in forms
        for name in routes.DENSE
        for peers in (PEER_ROUTES if name == "torus" else ("allreduce",))
    ]
    return list(_possible(tried, topology, messages))


def on_sparse_routes(form: Scheme, topology: Topology, messages: bool) -> list[Scheme]:
    """Return a scheme on every sparse route of the cluster."""
    tried = [dataclasses.replace(form, route=name) for name in routes.SPARSE]
    return list(_possible(tried, topology, messages))


def _possible(schemes: Sequence[Scheme], topology: Topology, messages: bool) -> Iterator[Scheme]:
    """Skip schemes that the cluster or launch cannot carry out, or that equal another."""
    two_levels = topology.nodes > 1 and topology.slots > 1
    for scheme in schemes:
        route = routes.get(scheme.route)
        if route.levels == 2 and isinstance(route, DenseRoute) and not two_levels:
            continue  # The torus would have one level, which is a separate route
        with contextlib.suppress(PlanError):
            check_scheme(scheme, topology, messages)
            yield scheme
