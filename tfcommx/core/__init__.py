"""The data types of tfcommx: topology, links, schemes, plans, buckets, profiles and timelines.

All are frozen and checked when they are made, because a bad setting must be refused before any
collective starts.
"""

from tfcommx.core.bucket import LARGEST, Bucket, NoOptions, Piece, RouteOptions, Sparse
from tfcommx.core.checks import (
    check_name,
    check_number,
    check_whole,
    is_member,
    load_member,
    require_equal,
    told_apart,
)
from tfcommx.core.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    LaunchError,
    PlanError,
    RankLostError,
    TfcommxError,
    log,
)
from tfcommx.core.files import json_text, local_path, reading, replacing, write_text
from tfcommx.core.links import NOMINAL, Calibration, EngineSettings, Link, Links, Traffic
from tfcommx.core.plan import OPERATIONS, Plan, first_difference
from tfcommx.core.profile import Layer, LayerTable, Profile, VariableProfile
from tfcommx.core.scheme import AUTO, MPI_LAUNCH, NO_COMPRESSION, Scheme
from tfcommx.core.timeline import RESOURCES, MeasuredStep, Span, Timeline
from tfcommx.core.topology import GROUPS, Topology
from tfcommx.core.wire_formats import (
    DENSE_CODES,
    DENSE_DTYPES,
    DENSE_WIRES,
    ENTRY_BYTES,
    NARROW,
    NOISY,
    PLAIN,
    SPARSE_WIRES,
    VALUE_DTYPES,
    WIRES,
)
