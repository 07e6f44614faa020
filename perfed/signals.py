"""SIGINT and SIGTERM during a run: what is being computed is finished, or undone, and kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A signal ended the run between two rounds; everything computed was kept. ``number``: the signal."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(f"signal {number}")


class Signals:
    """SIGINT and SIGTERM wait for the end of the round; a second one does not, where what it cuts short can be undone."""

    def __init__(self):
        self.number: int | None = None
        self._cuttable = True  # until the first round
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._caught) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: Any) -> None:
        if self.number is not None and self._cuttable:
            self._cuttable = False
            raise Interrupted(number)
        self.number = number

    @contextmanager
    def cuttable(self) -> Iterator[None]:
        """What is done inside may be cut short by a second signal. What fails after a first one failed through it: Ctrl-C reaches the
        compiler's processes too."""
        self._cuttable = True
        try:
            yield
        except Exception as error:
            if self.number is None:
                raise
            raise Interrupted(self.number) from error
        finally:
            self._cuttable = False

    def ignore(self) -> None:
        """From now on signals are too late: what was computed is being stored."""
        for number in self._old:
            signal.signal(number, signal.SIG_IGN)

    def check(self) -> None:
        if self.number is not None:
            raise Interrupted(self.number)
