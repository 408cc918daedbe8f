"""A plugin of pytest for `make test-times`: which test files take how many CPU seconds.

With those of the processes that they have started and waited for. CPU seconds change less than
seconds do if something else runs, but they do: on crowded cores up to twice as many.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator

import pytest
import warm_ranks

LISTED = 40  # files
cpu_by_file: Counter[str] = Counter()
seconds_by_file: Counter[str] = Counter()


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) + warm_ranks.cpu_seconds()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[BEGAN] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Add it to the report of the teardown, which workers of xdist send, too."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_seconds", cpu_seconds() - item.stash[BEGAN]))


BEGAN = pytest.StashKey[float]()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.partition("::")[0]
    seconds_by_file[file] += report.duration
    if report.when == "teardown":
        cpu_by_file[file] += dict(report.user_properties).get("cpu_seconds", 0.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("CPU seconds, seconds")
    for file, cpu in cpu_by_file.most_common(LISTED):
        terminalreporter.line(f"{cpu:8.1f} {seconds_by_file[file]:8.1f}  {file}")
    total = cpu_by_file.total(), seconds_by_file.total()
    terminalreporter.line(f"{total[0]:8.1f} {total[1]:8.1f}  all {len(cpu_by_file)} files")
