"""The report of a dry run: dry_run.json, its table, and the throughput of one process."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from tfcommx.core import reading
from tfcommx.report.summary import ReportError, bytes_text, plural, size_text, time_text, write_json
from tfcommx.report.terminal import table_of, terminal_console

FILE = "dry_run.json"


def write_dry_run(report: dict[str, Any], folder: Path) -> None:
    """Write the report of a dry run into a folder, created if needed. **Ranks:** rank 0 only."""
    write_json(report, Path(folder) / FILE)


def read_alone(folder: Path) -> list[float]:
    """Return the throughput of one process in each phase, from its dry run.

    **Raises:** ReportError if the folder has no dry run, or one of several processes.
    """
    path = Path(folder) / FILE
    remedy = f"Make it: tfcommx train CONFIG --dry-run --output {folder}."
    with reading("A dry run of one process", path, remedy, ReportError):
        report = json.loads(path.read_text())
        ranks, rates = report["ranks"], [phase["throughput"] for phase in report["phases"]]
    if ranks != 1:
        raise ReportError(
            f"A dry run of one process is required. Received one of {ranks} in {path}. Make it "
            "without horovodrun and --processes."
        )
    return rates


def show_dry_run(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report of a dry run."""
    console = console or terminal_console()
    sent_heading, rate = "bytes a step, one rank", f"{report['counted']}/s"
    times = ("step", "of it waiting for gradients", rate, sent_heading, "predicted")
    headings = ("phase", "epochs", "size", "batch", *times)
    table = table_of(f"{report['name']}: dry run, made-up data", headings, left=[sent_heading])
    for number, phase in enumerate(report["phases"], 1):
        sent = [
            f"{route}: {bytes_text(kinds['between'])} between nodes, "
            f"{bytes_text(kinds['inside'])} inside"
            for route, kinds in phase["bytes_by_route"].items()
        ]
        table.add_row(
            str(number),
            str(phase["epochs"]),
            size_text({**phase, **report}),
            str(phase["global_batch"]),
            f"{1e3 * phase['step_seconds']:.1f} ms",
            f"{1e3 * phase['gradients_seconds']:.1f} ms",
            f"{phase['throughput']:.0f}",
            "\n".join(sent),
            time_text(phase["predicted_seconds"]),
        )
    console.print(table)
    for number, phase in enumerate(report["phases"], 1):
        if densities := phase.get("warm_up"):
            listed = ", ".join(f"{density:g}" for density in densities)
            console.print(
                f"phase {number}: its first epochs, of density {listed}, were not run: they count "
                "as the others, though they send more"
            )
    gpu = report.get("gpu_memory_bytes")
    memory = f"{bytes_text(report['memory_bytes'])} of memory"
    memory += f", {bytes_text(gpu)} of the GPU's" if gpu else ""
    console.print(
        f"{plural(report['ranks'], 'process')} on {plural(report['nodes'], 'node')}, "
        f"{report['parameters']:,} parameters"
        f"; the largest process takes {memory}\n"
        f"the whole run: {time_text(report['predicted_seconds'])}, without waiting for data, "
        "evaluation and saving"
    )
