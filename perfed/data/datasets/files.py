"""Files of a dataset: hashes, a cache of decoded arrays below ``data_root/cache``, and whether a host answers.

What is kept is written to a temporary name and renamed. A data_root without write permission works too: then nothing
is kept, and nothing is ever needed from the cache.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import os
import re
import threading
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

BROKEN = (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile)
"""What reading a damaged file may raise."""


def sha256(*parts: Any) -> str:
    """Hash (hex) of JSON-able parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def digest(path: Path, root: Path, algorithm: str = "sha256") -> str:
    """Hash (hex) of a file, unpacked if it is a .gz but no .tar.gz; remembered by path, size and time of change."""
    stat = path.stat()
    key = "hash-" + sha256(str(path.resolve()), stat.st_size, stat.st_mtime_ns, algorithm)[:32]
    if (stored := recall(root, key, "value")) is not None:
        return str(stored[0])
    packed = path.suffix == ".gz" and not path.name.endswith(".tar.gz")
    with gzip.open(path) if packed else open(path, "rb") as file:
        value = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    keep(root, key, value=value)
    return value


def recall(root: Path, key: str, *names: str) -> list[np.ndarray] | None:
    """Arrays kept by :func:`keep`, or None where there are none or they are damaged."""
    try:
        with np.load(root / "cache" / f"{key}.npz", allow_pickle=False) as stored:
            return [stored[name] for name in names]
    except BROKEN:
        return None


def keep(root: Path, key: str, **arrays: Any) -> bool:
    """Store arrays below ``root/cache``; False where that cannot be written."""
    folder = root / "cache"
    temporary = folder / f".{key}-{os.getpid()}-{threading.get_ident()}"
    try:
        if not writable(folder):
            return False
        folder.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)
        os.replace(temporary, folder / f"{key}.npz")
        return True
    except OSError:
        temporary.unlink(missing_ok=True)
        return False


def writable(folder: Path) -> bool:
    """Whether ``folder`` can be made or written to. A folder without a write bit is left alone even by root."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return there.is_dir() and bool(there.stat().st_mode & 0o222) and os.access(there, os.W_OK)


def unreachable(url: str, seconds: float = 5.0) -> str:
    """Why ``url`` does not answer within ``seconds``, or "". In a thread, because looking up a name knows no timeout."""
    reason = f"no answer in {seconds:g} s"

    def ask() -> None:
        nonlocal reason
        try:
            request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "perfed"})
            with urllib.request.urlopen(request, timeout=seconds):
                reason = ""
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return reason


def natural(text: str) -> tuple[list[str | int], str]:
    """Sort key that reads digits as numbers: 2 before 10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", text))], text
