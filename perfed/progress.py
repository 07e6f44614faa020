"""How far a run is: a bar on a terminal, else one plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO

LINE_EVERY_SECONDS = 15.0


class Progress:
    """mode: ``bar``, ``lines``, ``off``, or ``auto`` (a bar where stderr is a terminal, else lines). All goes to stderr and the log."""

    def __init__(self, rounds: int, mode: str, log: TextIO, notes: Iterable[str] = ()):
        self.rounds, self.log = rounds, log
        self.mode = ("bar" if sys.stderr.isatty() else "lines") if mode == "auto" else mode
        self.accuracy = ""
        self.bar = None
        self.begun = self.said = time.monotonic()
        self.first: int | None = None
        for note in notes:
            self.say(note)
        if self.mode == "bar":
            from tqdm import tqdm

            self.bar = tqdm(total=rounds, unit="round", file=sys.stderr, dynamic_ncols=True, leave=False, mininterval=0.2)

    def say(self, text: str) -> None:
        """One line on stderr and in the log."""
        self.note(text)
        with suppress(OSError):  # stderr is closed, or goes to a full disk: the run goes on
            if self.mode == "bar" and self.bar is not None:
                self.bar.write(text, file=sys.stderr)
            elif self.mode != "off" or text.startswith("warning"):  # a warning is about the result
                print(text, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """One line in the log alone."""
        with suppress(OSError):  # a full disk: what is not written stays in the buffer, and the run goes on
            self.log.write(text + "\n")

    def scored(self, accuracy: str) -> None:
        """What the last evaluation gave."""
        self.accuracy = accuracy
        if self.bar is not None:
            self.bar.set_postfix_str(accuracy, refresh=False)

    def round(self, k: int) -> None:
        """k rounds are done."""
        if self.first is None:
            self.first = k - 1
            self.begun = time.monotonic()
            if self.bar is not None:
                self.bar.initial = self.first  # a resumed run: earlier rounds say nothing about the time left
        if self.bar is not None:
            self.bar.n = k
            self.bar.update(0)
            return
        now = time.monotonic()
        done, total = k - self.first - 1, self.rounds - self.first - 1
        if k < self.rounds and now - self.said >= LINE_EVERY_SECONDS and done > 0:
            self.said = now
            left = (now - self.begun) / done * (total - done)
            self.say("  ".join(part for part in (f"round {k}/{self.rounds}", self.accuracy, f"about {_span(left)} left") if part))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
