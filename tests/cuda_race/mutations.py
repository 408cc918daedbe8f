"""Remove each barrier and fence of the CUDA kernels in turn, and see whether the check notices.

    cd tests && python -m cuda_race.mutations     # prints a table

If the check passes without a barrier, the barrier is redundant or no case needs its protection.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cuda_race import race

BARRIER = re.compile(r"\b__(?:syncthreads|syncwarp|threadfence)\w*\([^()]*\)")
# Options of scripts/check_cuda, tried in turn until something is noticed
SMALL = ("--cases", "15", "--largest", "20000", "--seed", "7", "--rounds", "0")
LARGE = ("--cases", "90", "--largest", "60000", "--seed", "8", "--rounds", "0")
SECONDS = 1200  # allowed for a run


class Site(NamedTuple):
    """A barrier or fence in a source."""

    file: Path
    # From 1
    line: int
    # The call, in its line
    start: int
    end: int
    # For example "__syncthreads()"
    call: str
    # The next line with code, which names the site when lines move
    before: str

    def __str__(self) -> str:
        """Return "file: call before: next line"."""
        return f"{self.file.name}: {self.call} before: {self.before}"


def sites(tree: Path = race.ROOT) -> list[Site]:
    """Return all barriers and fences of the kernels in a tree."""
    result = []
    for file in sorted((tree / "ops" / "kernels").iterdir()):
        if file.suffix not in (".cu", ".h"):
            continue
        code = [line.split("//")[0] for line in file.read_text().splitlines()]
        for number, line in enumerate(code):
            following = [later.strip() for later in code[number + 1 :] if later.strip(" }")]
            for match in BARRIER.finditer(line):
                before = following[0] if following else ""
                result.append(Site(file, number + 1, *match.span(), match[0], before))
    return result


def remove(site: Site, tree: Path) -> Path:
    """Remove one barrier from the copy of its file in a tree; return the copy."""
    copy = tree / site.file.relative_to(race.ROOT)
    text = site.file.read_text().splitlines(keepends=True)
    line = text[site.line - 1]
    text[site.line - 1] = line[: site.start] + line[site.end :]
    copy.write_text("".join(text))
    return copy


def noticed(program: Path) -> str:
    """Return how a run of the check notices a mistake; empty if it does not."""
    for options in (SMALL, LARGE):
        result = race.run(program, *options, timeout=SECONDS)
        if result.findings:
            first = result.findings[0]
            against = f" against {first.other}" if first.other else ""
            return f"{first.kind}, {first.memory} memory, at {first.at}{against}"
        if result.status == 3:
            return "threads wait for others that have ended"
        if result.status == 124:
            return "does not end"
        if result.status:
            report = re.search(r"\{.*\}", result.output)
            failures = json.loads(report[0])["failures"] if report else "?"
            return f"status {result.status}, {failures} wrong results"
    return ""


def mutations(folder: Path) -> Iterator[tuple[Site, str]]:
    """Yield each barrier with how its removal is noticed, as by `noticed`."""
    files = [*race.sources(), *race.runtime()]
    base = folder / "base"
    base.mkdir()
    objects = race.objects(files, base)
    unchanged = noticed(race.link(base / "check", objects))
    assert not unchanged, f"the unchanged kernels must pass: {unchanged}"
    for number, site in enumerate(sites()):
        tree, changed = folder / f"tree{number}", folder / f"changed{number}"
        for name in ("ops/kernels", "scripts/verify"):
            shutil.copytree(race.ROOT / name, tree / name)
        changed.mkdir()
        remove(site, tree)
        again = [
            tree / file.relative_to(race.ROOT)
            for file, compiled in zip(files, objects, strict=True)
            if str(site.file) in compiled.with_suffix(".d").read_text().replace("\\\n", "").split()
        ]
        assert again, f"no source includes {site.file}"
        new = {one.name: one for one in race.objects(again, changed, tree)}
        program = race.link(changed / "check", [new.get(old.name, old) for old in objects])
        yield site, noticed(program)
        shutil.rmtree(tree)
        shutil.rmtree(changed)


def main() -> None:
    """Print a row of a table for each barrier."""
    print("| file and line | removed | noticed |", "|---|---|---|", sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for site, how in mutations(Path(folder)):
            print(
                f"| {site.file.name}:{site.line} | `{site.call}` before `{site.before}` | {how} |"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
