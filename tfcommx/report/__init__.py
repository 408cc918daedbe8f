"""Output for people: the progress of a run, its report, figures, and TensorBoard events.

`tfcommx report` is quick because TensorFlow is imported only when events are written.
"""

from tfcommx.report.dry_run import read_alone, show_dry_run, write_dry_run
from tfcommx.report.progress import ProgressDisplay
from tfcommx.report.summary import read, time_to_target, with_nan, write_summary
from tfcommx.report.tensorboard import TensorBoardEvents
from tfcommx.report.terminal import show

__all__ = [
    "ProgressDisplay",
    "TensorBoardEvents",
    "read",
    "read_alone",
    "show",
    "show_dry_run",
    "time_to_target",
    "with_nan",
    "write_dry_run",
    "write_summary",
]
