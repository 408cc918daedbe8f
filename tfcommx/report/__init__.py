"""What people look at: progress while a run goes, its report, figures, TensorBoard events.

No TensorFlow is imported until events are written, so `tfcommx report` is quick.
"""

from tfcommx.report.events import write_events
from tfcommx.report.figures import draw, draw_links
from tfcommx.report.progress import Progress
from tfcommx.report.summary import PARTS, ReportError, read
from tfcommx.report.terminal import show
from tfcommx.report.write import write

__all__ = [
    "PARTS",
    "Progress",
    "ReportError",
    "draw",
    "draw_links",
    "read",
    "show",
    "write",
    "write_events",
]
