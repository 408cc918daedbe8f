"""`tfcommx explain`: break down the time of a run, and predict the gain of other plans."""

from pathlib import Path
from statistics import median_low, quantiles
from typing import Annotated, Any

import typer

from tfcommx import routes
from tfcommx.cli.parameters import JsonFile, output_file, read_links, write_rows
from tfcommx.cli.plan import advice
from tfcommx.core import Links, MeasuredStep, Scheme, Timeline, Topology, reading, write_text
from tfcommx.measure.horovod_timeline import (
    Message,
    RecordedStep,
    Recording,
    is_timeline,
    measured_step,
    read_timeline,
)
from tfcommx.planner.choose import candidates, on_dense_routes, ranked
from tfcommx.planner.predict import Interval, Prediction, Setting, interval
from tfcommx.report import timeline as report
from tfcommx.report.terminal import show_rows
from tfcommx.simulator.assumptions import Assumptions, measured_time
from tfcommx.simulator.step import simulate

# Wire and selection of the lossy plans that are compared, in addition to lossless ones
CODES = "int4"
SELECTION, DENSITY = "mstopk", 0.01
# Characters of a tensor's name in a table
NAME_LENGTH = 40
KIND = "A file that `horovodrun --timeline-filename` or `tfcommx profile --exchange` wrote"


def explain(
    run: Annotated[
        Path,
        typer.Argument(
            help="File that `horovodrun --timeline-filename` or `tfcommx profile --exchange` wrote."
        ),
    ],
    links: Annotated[
        Path | None,
        typer.Option(help="File that `tfcommx probe` wrote: also simulate the step, and plan it."),
    ] = None,
    slots: Annotated[int, typer.Option(help="Ranks on each node, of a timeline.")] = 1,
    png: Annotated[
        Path | None, output_file(text="Draw the steps, below each other.", picture=True)
    ] = None,
    trace: Annotated[
        Path | None, output_file(text="Write them for chrome://tracing and Perfetto.")
    ] = None,
    json_file: JsonFile = None,
    profile: Annotated[
        Path | None, output_file(text="Write the profile of the run: tfcommx plan FILE.")
    ] = None,
) -> None:
    """Explain a recorded run: the waits of its messages, and the gain of a better plan."""
    others_s, measured_steps = 0.0, []
    with reading(KIND, run, "Name one."):
        recorded_by_horovod = is_timeline(run)
    if recorded_by_horovod:
        recording = read_timeline(run)
        typical = recording.typical
        early = recording.earliest(typical)
        _show_recording(run, recording, early)
        others_s = typical.exposed_parts.ranks_s
        write_rows(
            json_file,
            [
                {
                    "start_seconds": step.start_s,
                    "step_seconds": step.step_s,
                    "exposed_seconds": step.exposed_s,
                    **{f"exposed_{name}": s for name, s in step.exposed_parts._asdict().items()},
                    "messages": len(step.messages),
                }
                for step in recording.steps
            ],
        )
        if links or profile or png or trace:
            # At least one node, even if the user names more slots than there were ranks
            topology = Topology(max(1, recording.ranks // max(1, slots)), slots)
            # As recorded, and with gradients as early as they may have been ready
            measured_steps = [
                measured_step(recording, recorded, topology) for recorded in (typical, early)
            ]
    else:
        measured_steps = [MeasuredStep.read(run, routes.read_plan)]
        timeline, plan = measured_steps[0].timeline, measured_steps[0].plan
        row = {
            "start_seconds": 0.0,
            "step_seconds": timeline.step_s,
            "exposed_seconds": timeline.exposed_s,
            "messages": len(plan.buckets),
        }
        write_rows(json_file, [row])
    if not measured_steps:
        print("With --links links.json, which `tfcommx probe` writes, it is compared with plans.")
        return
    step = measured_steps[0]
    if profile:
        write_text(profile, step.profile.to_json())
    steps = {"recorded": step.timeline}
    prices = read_links(links, step.plan.topology) if links else None
    predicted = [_predicted(measured, prices) for measured in measured_steps] if prices else []
    if predicted:
        steps["simulated"] = predicted[0][0]
    for name, timeline in steps.items():
        print(f"\n{name}\n{report.draw_text(timeline)}")
    if predicted:
        names = [bucket.name for bucket in step.plan.buckets]
        _show([_bucket_row(number, bucket, steps) for number, bucket in enumerate(names)])
        _show_difference(steps["recorded"], steps["simulated"], others_s)
        _show_better(predicted)
    if png:
        report.draw_timelines(steps, png)
    if trace:
        write_text(trace, report.trace_events(steps))


def _show_recording(run: Path, recording: Recording, early: RecordedStep) -> None:
    steps, typical = recording.steps, recording.typical
    print(f"{run}: {len(steps)} steps of {recording.ranks} ranks.")
    for label, seconds in (
        ("A step takes", [step.step_s for step in steps]),
        ("From the last gradient to the last sum", [step.exposed_s for step in steps]),
    ):
        # Twice, because `quantiles` refuses a single step
        deciles = quantiles([*seconds, *seconds], n=10, method="inclusive")
        print(
            f"{label}: {1e3 * median_low(seconds):.1f} ms; one in ten less than "
            f"{1e3 * deciles[0]:.1f}, or more than {1e3 * deciles[-1]:.1f}."
        )
    parts = typical.exposed_parts
    print(
        f"A typical step, of {1e3 * typical.step_s:.1f} ms, shows {1e3 * typical.exposed_s:.1f} ms "
        f"of its exchange: messages {1e3 * parts.messages_s:.1f} ms, waiting for other ranks "
        f"{1e3 * parts.ranks_s:.1f} ms, the engine {1e3 * parts.engine_s:.1f} ms."
    )
    if early.exposed_s > typical.exposed_s:
        print(
            f"It may be up to {1e3 * early.exposed_s:.1f} ms: this engine sees no gradient while a "
            "message is on the way, and some came right after one."
        )
    print("Its messages, in ms:")
    _show([_message_row(message, typical) for message in typical.messages])


def _message_row(message: Message, step: RecordedStep) -> dict[str, Any]:
    waits = step.waits_of(message)
    return {
        "first tensor": message.name[:NAME_LENGTH],
        "tensors": len(message.tensors),
        "entries": message.entries,
        "ready": 1e3 * (message.ready_s - step.start_s),
        "behind others": 1e3 * waits.messages_s,
        "for ranks": 1e3 * waits.ranks_s,
        "for the engine": 1e3 * waits.engine_s,
        "on the way": 1e3 * (message.end_s - message.begin_s),
        "there": 1e3 * (message.end_s - step.start_s),
    }


def _predicted(step: MeasuredStep, links: Links) -> tuple[Timeline, list[Prediction]]:
    """Simulate the step by its recorded plan, and by the best lossless and lossy plans."""
    assumptions = Assumptions(measured_time(step.profile))
    simulated = simulate(step.plan, step.profile, links, assumptions)
    setting = Setting(step.profile, step.plan.topology, links, assumptions)
    lossy = Scheme("allgather", SELECTION, DENSITY)
    sums = on_dense_routes([Scheme(wire=CODES)], setting.topology, messages=False)
    return simulated, [
        candidates(setting)[0],
        ranked(setting, sums, for_optimal=0)[0],
        candidates(setting, lossy, thorough=False)[0],
    ]


def _bucket_row(number: int, name: str, steps: dict[str, Timeline]) -> dict[str, Any]:
    # In ms; "-" if another bucket carries it
    row: dict[str, Any] = {"bucket": name[:NAME_LENGTH]}
    for label, timeline in steps.items():
        messages = [s for s in timeline.spans if s.kind == "message" and s.bucket == number]
        on_the_way = 1e3 * sum(span.end_s - span.start_s for span in messages)
        row[f"{label}: on the way"] = on_the_way if messages else "-"
        # Two columns of one heading need two keys
        there = "there" if label == "recorded" else "there "
        row[there] = 1e3 * messages[-1].end_s if messages else "-"
    return row


def _show_difference(recorded: Timeline, simulated: Timeline, others_s: float) -> None:
    difference = recorded.step_s - simulated.step_s
    computing = _computed_s(recorded) - _computed_s(simulated)
    parts = {
        "computing": computing,
        "waiting for other ranks": others_s,
        "messages": difference - computing - others_s,
    }
    text = ", ".join(f"{name} {_signed_ms(seconds)}" for name, seconds in parts.items())
    print(
        f"\nThe recorded step differs from the simulated one by {_signed_ms(difference)}: {text}."
    )


def _signed_ms(seconds: float) -> str:
    return f"{round(1e3 * seconds, 1) + 0.0:+.1f} ms"  # Without -0.0


def _computed_s(timeline: Timeline) -> float:
    return max((span.end_s for span in timeline.spans if span.kind == "backward"), default=0.0)


def _show_better(predicted: list[tuple[Timeline, list[Prediction]]]) -> None:
    # The step as recorded; the next, if known, has its gradients as early as possible
    recorded, better = predicted[0]
    names = (
        "best that loses nothing",
        f"best with all entries in {CODES}",
        f"best with {DENSITY:.0%} of the entries",
    )
    as_recorded = interval(recorded.compute_s, recorded.exposed_s, better[0].spread)
    rows = [_better_row("as recorded", recorded.step_s, as_recorded, "")]
    for position, (name, prediction) in enumerate(zip(names, better, strict=True)):
        shorter = [1 - plans[position].step_s / plain.step_s for plain, plans in predicted]
        low, high = f"{min(shorter):.1%}", f"{max(shorter):.1%}"
        saved = low if low == high else f"{low} to {high}"
        rows.append(_better_row(name, prediction.step_s, prediction.interval, saved))
    _show(rows)
    for position, name in enumerate(names):
        print(f"{name}: {advice(predicted[-1][1][position])}")


def _better_row(plan: str, step_s: float, within: Interval, shorter: str) -> dict[str, Any]:
    return {
        "plan": plan,
        "simulated step ms": 1e3 * step_s,
        "nine of ten": f"{1e3 * within.low:.2f} to {1e3 * within.high:.2f}",
        "shorter by": shorter,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    shown = [
        {name: f"{x:.2f}" if isinstance(x, float) else x for name, x in row.items()} for row in rows
    ]
    show_rows(shown, left=[name for name, x in rows[0].items() if isinstance(x, str)])
