"""Compiled kernels on disk, shared by the processes of a user."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT_VARIABLE = "FUSED_ADAMW_CACHE_DIR"


def directory() -> Path | None:
    """Where the cache is; None where there is no home to put it in.

    ``FUSED_ADAMW_CACHE_DIR``, else ``fused_adamw`` in ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    if chosen := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(chosen)
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(root) / "fused_adamw"


def get_or_make(key: str, make: Callable[[], bytes]) -> bytes:
    """What ``make`` returns, from the cache where it holds it whole.

    An entry carries the digest of its contents: one that is damaged, or not ours, is made anew. Entries are
    renamed into place, so that any number of processes may read and write at once. Where the cache cannot be
    written, kernels are compiled in each process.
    """
    root = directory()
    if root is None:
        return make()
    path = root / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        entry = path.read_bytes()
        digest, contents = entry[:32], entry[32:]
        if hashlib.sha256(contents).digest() == digest:
            return contents
    contents = make()
    with contextlib.suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root, delete=False) as file:
            file.write(hashlib.sha256(contents).digest() + contents)
        os.replace(file.name, path)
    return contents
