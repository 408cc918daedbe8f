"""Supervise a run: start a generation of ranks, and after a loss the next one.

    hosts -> launch, link to rank 0 -> wait -> sweep processes -> cause of the end -> hosts ...

**Ranks:** local, in the launcher. Needs neither TensorFlow nor Horovod in this process.
"""

import contextlib
import functools
import math
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from tfcommx.core import LaunchError
from tfcommx.launch.commands import is_local
from tfcommx.launch.horovodrun import Launch, Running
from tfcommx.launch.hosts import Host, slots_of
from tfcommx.launch.rank_output import RankLines
from tfcommx.supervisor import goodput, sweep
from tfcommx.supervisor.generation import (
    Deaths,
    Ending,
    Generation,
    RankZeroListener,
    RunSecret,
    first_failure,
)
from tfcommx.supervisor.goodput import pause_before, price
from tfcommx.supervisor.hosts import Hosts, SupervisorOptions, host_named, in_words, place

# Makes horovodrun report a failed rank at once; the ranks receive the variable anyway
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
# Seconds after the first failure; longer than horovodrun's 5 s before it kills ranks of this host,
# and the watch's 8 s before it kills stopped ranks
ENDING_SECONDS = 10.0
# Period of looking for new hosts
POLL_SECONDS = 5.0
# Exit status of a rank after an error that the user can fix
USER_ERROR = 2


class StopSignal:
    """Ends the ranks when this process receives a signal; at once after a second signal."""

    def __init__(self) -> None:
        # The first signal; 0: none
        self.number = 0
        # The launch that is running now
        self.running: Running | None = None

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if self.running:
            self.running.terminate()


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # Such as a full disk, which must not end the run
        print(f"tfcommx: {text}", file=sys.stderr, flush=True)


class Supervisor:
    """Runs generations of ranks until one succeeds.

    Args:
        make_launch: returns the launch for hosts and the number of a generation.
        stop: ends the ranks when this process receives a signal.
    """

    def __init__(
        self,
        hosts: Hosts,
        options: SupervisorOptions,
        make_launch: Callable[[list[Host], int], Launch],
        stop: StopSignal,
    ) -> None:
        self._hosts, self._options = hosts, options
        self._make_launch, self._stop = make_launch, stop
        self._ours, self._deaths = RunSecret(), Deaths()
        self.generations: list[Generation] = []
        # Hosts that answered after the last generation, and hosts that did so with silent ranks
        self._answered: set[str] = set()
        self._suspected: set[str] = set()
        # Exit status of the first failure
        self._status: int | None = None

    def run(self) -> None:
        """Start generations until one ends with status 0.

        **Raises:** LaunchError if the run cannot continue; SystemExit after a signal.
        """
        try:
            while not self._generation_ended_well():
                pass
        finally:
            self._clean_up()

    def _generation_ended_well(self) -> bool:
        launch = self._make_launch(self._wait_for_hosts(), len(self.generations))
        if self._stop.number:
            sys.exit(128 + self._stop.number)
        generation = Generation(len(self.generations), launch.hosts, time.monotonic())
        if generation.number:
            say(start_line(generation))
        self.generations.append(generation)
        lines = RankLines()
        running, status = self._carry_out(generation, launch, lines)
        # Swept before the cause is judged, because a host that does not answer now is the cause
        self._answered = self._sweep(generation)
        if self._stop.number:
            generation.how = f"ended by signal {self._stop.number}"
            sys.exit(128 + self._stop.number)
        if status == 0:
            generation.how = "finished"
            return True
        self._go_on_or_raise(generation, running, status, lines)
        return False

    def _wait_for_hosts(self) -> list[Host]:
        before = self.generations[-1].hosts if self.generations else ()
        fewest = self._options.fewest if self.generations else self._options.first
        try:
            return self._hosts.wait(fewest, before, self._answered, lambda: bool(self._stop.number))
        except LaunchError as error:
            raise LaunchError(str(error), self._status or 1) from None

    def _carry_out(
        self, generation: Generation, launch: Launch, lines: RankLines
    ) -> tuple[Running, int]:
        local = all(is_local(host.name) for host in launch.hosts)
        wake, ended = threading.Event(), threading.Event()
        epochs: list[int] = []

        def heard(message: dict[str, Any]) -> None:
            event = generation.hear(message, time.monotonic())
            if event == "first step" and generation.number:
                say(self._first_step_line(generation))
            if event == "epoch":
                epochs.append(message["epoch_ended"])
                wake.set()

        link = RankZeroListener(
            self._ours, generation.number, heard, [*self._options.interfaces], local
        )

        def look_for_hosts() -> None:
            minutes = self._options.grow_every
            period = math.inf if minutes is None else 60 * minutes
            next_look = generation.began + period
            while not ended.is_set():
                wake.wait(POLL_SECONDS)
                wake.clear()
                due, epochs[:] = bool(epochs), []
                time_now = time.monotonic()
                if time_now >= next_look:
                    due, next_look = True, time_now + period
                why = self._why_to_grow(generation) if due and not ended.is_set() else ""
                # Asked again, because `_why_to_grow` runs a script and commands on hosts
                if why and not ended.is_set():
                    generation.asked_to_pause = link.pause("growth")
                if generation.asked_to_pause:
                    say(why)
                    return

        growth = threading.Thread(target=look_for_hosts, daemon=True)
        try:
            running = self._stop.running = Running(launch, link.variables | UNBUFFERED)
            # The signal was received before `running` was set. Not twice, which kills at once
            if self._stop.number and not running.asked:
                running.terminate()
            end_the_rest = functools.partial(self._end_the_rest, generation, lines)
            growth.start()
            threading.Thread(target=end_the_rest, daemon=True).start()
            return running, running.wait(lines)
        finally:
            # Set first: the threads end by it, and must not sweep the ranks of the next generation
            generation.ended = time.monotonic()
            self._stop.running = None
            ended.set()
            wake.set()
            link.close()
            # Because the next generation uses the hosts, too. A run that a signal ends does not
            # wait, because a user's script may take a minute
            while growth.is_alive() and not self._stop.number:
                growth.join(0.1)

    def _end_the_rest(self, generation: Generation, lines: RankLines) -> None:
        # After a failure horovodrun waits for the other ranks, and on other hosts only the watch
        # would end them
        while not generation.ended:
            time.sleep(1)
            endings = lines.endings
            if endings and time.monotonic() - endings[0][0] > ENDING_SECONDS:
                self._sweep(generation, "ranks")
                return

    def _sweep(self, generation: Generation, *ranks: str) -> set[str]:
        """End the generation's remaining processes; return the hosts that answer."""
        names = [host.name for host in generation.hosts]
        arguments = self._ours.run, str(generation.number), *ranks
        # On this host directly, because ssh to it may not work
        if survivors := sweep.sweep(*arguments):
            say(f"Processes of the ranks that were killed have not ended: {survivors}.")
        return self._hosts.answering(
            names, [sys.executable, "-I", "-S", sweep.__file__, *arguments]
        )

    # --- the cause of an end ---------------------------------------------------------------

    def _go_on_or_raise(
        self, generation: Generation, running: Running, status: int, lines: RankLines
    ) -> None:
        """Report the loss, and leave hosts out. **Raises:** LaunchError to end the run."""
        names = {host.name for host in generation.hosts}
        host_names = (host_named(host, generation.hosts) for host in generation.leaving)
        leaving = {host for host in host_names if host}
        pause_requested = generation.asked_to_pause or bool(generation.leaving)
        dead = names - self._answered
        ending = Ending(first_failure(lines), pause_requested, lines.missing, dead, leaving)
        generation.how = ending.what_was_lost(running.launch)
        if ending.first and not ending.paused and self._status is None:
            self._status = ending.first.status
        if ending.first and ending.first.status == USER_ERROR:  # The next one would end like it
            raise running.failed(status, lines)
        failed = not ending.paused and not ending.dead
        if failed and self._deaths.add(generation):
            raise running.failed(status, lines, self._deaths.in_words(generation))
        if generation.number == self._options.reset_limit:
            limit = f"--reset-limit {generation.number} is reached."
            raise running.failed(status, lines, limit)
        say(f"{generation.how}{_at_step(generation)}.")
        silent = {host for host in ending.silent(running.launch).values() if not is_local(host)}
        for host in sorted(ending.dead):
            self._hosts.leave_out(host)
        # Only the second time, because a host that answers may have lost a link for some seconds
        for host in sorted(silent & self._suspected):
            self._hosts.leave_out(host)
        self._suspected = silent
        for host in leaving if ending.paused else ():
            self._hosts.let_leave(host)

    def _first_step_line(self, generation: Generation) -> str:
        earlier = self.generations[-2::-1]
        # One that was lost before its first step has no steps to compare with
        before = next((other for other in earlier if other.steps is not None), earlier[0])
        seconds = f"{pause_before(generation, before):.1f} s after the last one"
        if generation.resumed is None:
            return f"Generation {generation.number} has taken its first step, {seconds}."
        sources = {
            "memory": "continues from the snapshot in memory of step",
            "file": "continues from the file of step",
            "start": "begins anew, at step",
        }
        source, total, _ = generation.resumed
        repeated = max(0, (before.steps or 0) - total)
        return (
            f"Generation {generation.number} {sources.get(source, source)} {total}; {repeated} "
            f"steps are repeated. Its first step came {seconds}."
        )

    # --- growth ----------------------------------------------------------------------------

    def _why_to_grow(self, generation: Generation) -> str:
        # Empty if a restart does not pay. Its price is not known without a speed, which is asked
        # for before the hosts, because they may come from a user's script of a minute
        if generation.number == self._options.reset_limit or generation.steps_per_second is None:
            return ""
        hosts = place(self._hosts.offered(), generation.hosts, self._options.most)
        ranks = slots_of(hosts)
        if ranks <= generation.ranks:
            return ""
        restart_price = price(self.generations, ranks)
        lasted = time.monotonic() - self.generations[0].began
        # The rest of the run is assumed to be as long as the run so far
        if restart_price is None or restart_price.pays_after > lasted:
            return ""
        new = {host.name for host in hosts} - {host.name for host in generation.hosts}
        if self._hosts.answering(new) != new:
            return ""
        return (
            f"{ranks} ranks can run in place of {generation.ranks}, on {in_words(hosts)}. "
            f"{restart_price.in_words()} The ranks pause."
        )

    # --- the end ---------------------------------------------------------------------------

    def _clean_up(self) -> None:
        """End every process of the run, remove its memory files, and show the table."""
        if not self.generations:
            return
        hosts = {host.name for generation in self.generations for host in generation.hosts}
        sweep.sweep(self._ours.run)
        command = [sys.executable, "-I", "-S", sweep.__file__, self._ours.run]
        self._hosts.answering(hosts, command)
        if len(self.generations) > 1:
            result = goodput.goodput(self.generations)
            with contextlib.suppress(OSError):
                print(goodput.table(self.generations), file=sys.stderr)
            say(result.in_words())
        if self._options.file:
            try:
                goodput.write(self.generations, self._options.file)
            except OSError as error:  # Not raised, because it would hide the cause of the end
                say(f"--generations: {error}.")


def start_line(generation: Generation) -> str:
    ranks = f"{generation.ranks} rank{'s' * (generation.ranks > 1)}"
    line = f"Generation {generation.number} starts on {ranks}: {in_words(generation.hosts)}."
    if len({host.slots for host in generation.hosts}) > 1:
        line += " The hosts have unequal numbers of ranks: only one-level routes work."
    return line


def _at_step(generation: Generation) -> str:
    if generation.steps is None:
        return ", before the first step" if generation.linked else ""
    return f", at step {generation.steps}"
