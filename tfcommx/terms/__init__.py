"""The nouns of tfcommx: who takes part, what a user asks for, what is done bucket by bucket.

All are frozen and checked when they are made, so that a bad setting is refused before any
collective starts.
"""

from tfcommx.terms.bucket import Bucket, NoOptions, RouteOptions
from tfcommx.terms.checks import (
    PlanError,
    check_name,
    check_whole,
    is_member,
    load_member,
    require_equal,
)
from tfcommx.terms.engine import Calibration, EngineSettings
from tfcommx.terms.files import local_path, reading, replacing, write_text
from tfcommx.terms.layers import Layer, LayerTable
from tfcommx.terms.links import NOMINAL, Link, Links, Traffic
from tfcommx.terms.measured_step import MeasuredStep
from tfcommx.terms.piece import LARGEST, Piece
from tfcommx.terms.plan import OPERATIONS, Plan, ReadOptions, first_difference
from tfcommx.terms.profile import Profile, VariableProfile
from tfcommx.terms.scheme import (
    AUTO,
    DGC_WARM_UP,
    MPI_LAUNCH,
    NARROW,
    NO_COMPRESSION,
    PLAIN,
    SPARSE_WIRES,
    VALUE_DTYPES,
    WIRES,
    Scheme,
)
from tfcommx.terms.sparse import Sparse
from tfcommx.terms.timeline import KINDS, RESOURCES, Span, Timeline
from tfcommx.terms.topology import GROUPS, Topology

__all__ = [
    "AUTO",
    "DGC_WARM_UP",
    "GROUPS",
    "KINDS",
    "LARGEST",
    "MPI_LAUNCH",
    "NARROW",
    "NOMINAL",
    "NO_COMPRESSION",
    "OPERATIONS",
    "PLAIN",
    "RESOURCES",
    "SPARSE_WIRES",
    "VALUE_DTYPES",
    "WIRES",
    "Bucket",
    "Calibration",
    "EngineSettings",
    "Layer",
    "LayerTable",
    "Link",
    "Links",
    "MeasuredStep",
    "NoOptions",
    "Piece",
    "Plan",
    "PlanError",
    "Profile",
    "ReadOptions",
    "RouteOptions",
    "Scheme",
    "Span",
    "Sparse",
    "Timeline",
    "Topology",
    "Traffic",
    "VariableProfile",
    "check_name",
    "check_whole",
    "first_difference",
    "is_member",
    "load_member",
    "local_path",
    "reading",
    "replacing",
    "require_equal",
    "write_text",
]
