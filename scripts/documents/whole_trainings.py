"""The tables of whole trainings: time to plain Horovod's score, on links like a real cluster's."""

from __future__ import annotations

from collections.abc import Callable

from tables import Records, of_cells

# Contestant of scripts/bench end_to_end -> the data that it sends
NAMES = {
    "horovod": "plain Horovod: everything",
    "horovod_fp16": "Horovod's `Compression.fp16`",
    "auto": '`Scheme("auto")`',
    "torus": '`Scheme("torus")`',
    "asa_int4": '`Scheme("asa", wire="int4")`',
    "elias_int4": '`Scheme("hitopk", "mstopk", 0.1, wire="elias/int4")`',
    "momentum_int2": "`LowBitSGD`: its momentum in 2 bits",
    "one_bit_adam": "`OneBitAdam`, frozen by its rule",
    "step_ahead": "`StepAhead()`, the largest 2 % of updates",
    "local_sgd": "weights, averaged every 8 steps",
    "diloco": "DiLoCo: weights every 32 steps, moved by an outer optimizer",
    "streaming_diloco": "DiLoCo in 4 fragments, each sent during 8 steps",
    "ddp": "PyTorch DDP: everything",
    "ddp_fp16": "PyTorch DDP with its hook for 16 bits",
    "ddp_powersgd_4": "PyTorch DDP with its hook for PowerSGD, rank 4",
    "none": "nothing: no exchange",
}
# Contestants that only the detailed table has
OF_DETAILS = ("auto", "local_sgd", "ddp", "ddp_fp16", "none")
HEADS = (
    *("what travels", "bytes", "whole training", "time to the score", "times sooner"),
    "accuracy at the end",
)


def whole_trainings(name: str, details: bool = False) -> Callable[[Records], str]:
    """Return the table of a record; `details` adds steps and predictions."""

    def table(records: Records) -> str:
        found = {row["name"]: row for row in records.rows(name)}
        plain, rows = found["horovod"], []
        for contestant, text in NAMES.items():
            if contestant not in found or (contestant in OF_DETAILS and not details):
                continue
            row = found[contestant]
            low, high = (100 * row[f"final_{end}"] for end in ("lowest", "highest"))
            spread = f" ({low:.2f} to {high:.2f})" if row["seeds"] > 1 else ""
            # With one seed the first evaluation above the score is mostly chance
            reached = row["seeds"] > 1 and row["target_seconds"] is not None
            cells = [
                text,
                f"{100 * row['bytes_between'] / plain['bytes_between']:.1f} %",
                f"{row['seconds']:.0f} s",
                f"{row['target_seconds']:.0f} s" if reached else "",
                f"{row['times_sooner']:.1f}" if reached else "",
                f"{100 * row['final_score']:.2f}{spread} %",
            ]
            if details:
                predicted = row["predicted_seconds"]
                cells += [
                    str(row["seeds"]),
                    f"{1e3 * row['step_seconds']:.0f}",
                    "" if predicted is None else f"{predicted:.0f} s",
                ]
            rows.append(cells)
        more = ("seeds", "step, ms", "whole training, predicted") if details else ()
        return of_cells((*HEADS, *more), rows)

    return table


TABLES = {
    "end_to_end": whole_trainings("end_to_end_commlib"),
    "end_to_end_details": whole_trainings("end_to_end_commlib", details=True),
    "end_to_end_lossless": whole_trainings("end_to_end_lossless", details=True),
    "end_to_end_two_sites": whole_trainings("end_to_end_two_sites", details=True),
    "end_to_end_translate": whole_trainings("end_to_end_translate", details=True),
}
