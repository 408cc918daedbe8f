"""`tfcommx probe`: measure the links of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tfcommx.cli.environment import load_tensorflow
from tfcommx.cli.parameters import check_output
from tfcommx.core import ConfigurationError, write_text
from tfcommx.launch.launcher import launcher

if TYPE_CHECKING:
    from tfcommx.measure.links import ProbeResult


def probe(
    output: Annotated[
        Path, typer.Option(help="File of the links; the figure is written next to it, as .png.")
    ] = Path("links.json"),
    largest: Annotated[
        int, typer.Option(min=4096, help="Bytes of the largest message; less for slow networks.")
    ] = 2**24,
    repeats: Annotated[
        int, typer.Option(min=1, help="Repeats of each size; of messages the median counts.")
    ] = 5,
) -> None:
    """Measure the links of this cluster: `horovodrun -np 8 -H ... tfcommx probe`.

    Schemes are then planned by the measured prices.
    """
    if output.suffix == ".png":
        raise ConfigurationError(
            f"`--output` needs another ending than that of the figure, .png. Received {output}, "
            "in which the figure would replace the links. Name it links.json."
        )
    if launcher().rank == 0:  # Which writes; before the measurement
        check_output(output)
    load_tensorflow()
    from tfcommx import init, is_chief
    from tfcommx.measure import links
    from tfcommx.measure.engine import matmul_load
    from tfcommx.report import figures

    comm = init()
    sizes = [size for size in links.SIZES if size <= largest]
    result = links.probe(comm, sizes, repeats, load=matmul_load(), fusion=True)
    if is_chief():
        write_text(output, result.to_json())
        figures.draw_links(
            result.links, result.points, result.by_engine, output.with_suffix(".png")
        )
        for line in _in_words(result):
            print(line)
        spread = ", ".join(f"{name} {value:.3g}" for name, value in result.spread.items())
        print(f"standard deviations: {spread or 'nothing was measured'}")
        print(
            f"{output}, {output.with_suffix('.png')}. Use it: DistributedOptimizer(..., "
            f"links={str(output)!r}), or links: in a recipe."
        )
    comm.gather_objects("done")


def _in_words(result: ProbeResult) -> list[str]:
    links, lines = result.links, []
    for kind in ("inside", "between"):
        link = getattr(links, kind)
        rate = f"{8e-9 / link.beta_s_per_byte:.3g} Gbit/s, latency {1e6 * link.alpha_s:.3g} us"
        assumed = "" if result.points[kind] else "not measured, because there are none; assumed: "
        lines.append(f"links {kind} nodes: {assumed}{rate}")
    fuses = "fuses waiting allreduces" if links.fuses else "fuses nothing"
    overhead = f"{1e3 * links.engine_s:.3g} ms for each collective"
    lines.append(f"engine {links.engine.name}: {overhead}; {fuses}")
    lines.append(f"messages while the ranks compute: {1 + links.contention:.2f} times as long")
    return lines
