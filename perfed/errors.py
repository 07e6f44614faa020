"""The one exception for bad input, and what to do when output is lost. Free of Hydra and torch."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from typing import Any


class UserError(Exception):
    """A value that the user gave and that cannot be used.

    ``key`` is the configuration key as the user would type it (``algo.delta``), ``value`` what was given and
    ``allowed`` says what is accepted. Its text is always one line.
    """

    def __init__(self, key: str, value: Any, allowed: str):
        self.key, self.value, self.allowed = key, value, " ".join(str(allowed).split())
        super().__init__(f"{key}={show(value)}: {self.allowed}")


def show(value: Any) -> str:
    """``value`` as it would be typed on the command line (``null`` for None), cut at 120 characters."""
    text = {None: "null", True: "true", False: "false"}[value] if value is None or value is True or value is False else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 120 else text[:117] + "..."


def require(ok: bool, key: str, value: Any, allowed: str) -> None:
    """Raise :class:`UserError` unless ``ok``."""
    if not ok:
        raise UserError(key, value, allowed)


def silence_stdout() -> None:
    """After a write to stdout failed (``perfed | head``): what is buffered must not fail once more at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'alpha'?)`` for a typo, or an empty string when nothing known is near."""
    hits = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{hits[0]}'?)" if hits else ""
