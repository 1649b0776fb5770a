"""The demo's text, as bytes: what is read, in which order, and which part is held out."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_MAX_BYTES = 32 << 20
# The last tenth of every stretch is held out, so that both parts are of the same kind although the
# files are in the order of their names.
_STRETCH_BYTES = 640 << 10
_HELD_OUT = 10
# Folders of the standard library that hold no library code, or not Python's own.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class CorpusError(ValueError):
    """The text is missing or of no use; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to train on, and bytes held out.

    Attributes:
        train: uint8.
        validation: uint8.
        files: how many files were read.
        source: what the user named, for reports.
        digest: SHA-256 of all bytes, in hex.
    """

    train: np.ndarray
    validation: np.ndarray
    files: int
    source: str
    digest: str

    def batch(self, seed: int, step: int, sequences: int, length: int) -> np.ndarray:
        """The batch of a training step, uint8 [sequences, length]: a pure function."""
        random = np.random.default_rng([seed, step])
        starts = random.integers(0, self.train.size - length + 1, sequences)
        return self.train[starts[:, None] + np.arange(length)]

    def validation_batches(self, count: int, sequences: int, length: int) -> Iterator[np.ndarray]:
        """``count`` batches uint8 [sequences, length], spread evenly over the held-out bytes."""
        starts = np.linspace(0, self.validation.size - length, count * sequences).astype(np.int64)
        for chunk in starts.reshape(count, sequences):
            yield self.validation[chunk[:, None] + np.arange(length)]


def _standard_library() -> tuple[list[Path], str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in root.rglob("*.py")
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1])
    ]
    if not paths:
        raise CorpusError(f"no Python sources in {root}; name a text with --text FILE_OR_DIR")
    return paths, "the Python standard library"


def _named(text: Path) -> tuple[list[Path], str]:
    if text.is_dir():
        hidden = (".", "__pycache__")
        paths = [
            path
            for path in text.rglob("*")
            if path.is_file()
            and not any(p.startswith(hidden) for p in path.relative_to(text).parts)
        ]
        return paths, str(text)
    if not text.exists():
        raise CorpusError(f"--text {text}: no such file or folder")
    return [text], str(text)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def load(text: Path | None, sequence_length: int) -> Corpus:
    """Reads the corpus.

    Args:
        text: a file, taken as it is, or a folder, whose UTF-8 files are read in the order of their
            paths; None for the sources of the running Python's standard library.
        sequence_length: tokens that one training sequence needs.

    Raises:
        CorpusError: nothing to read, or too little of it.
    """
    paths, source = _standard_library() if text is None else _named(text)
    parts: list[bytes] = []
    total = 0
    for path in sorted(paths):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CorpusError(f"cannot read {path}: {error.strerror}") from None
        if path != text and not _is_text(data):
            continue
        parts.append(data[: _MAX_BYTES - total])
        total += len(parts[-1])
        if total == _MAX_BYTES:
            break
    joined = b"".join(parts)
    needed = _HELD_OUT * sequence_length
    if total < needed:
        raise CorpusError(
            f"{source} holds {total} bytes of text, but at least {needed} are needed "
            f"({sequence_length} of them held out); name a longer one with --text"
        )
    everything = np.frombuffer(joined, np.uint8)
    stretch = min(total, _STRETCH_BYTES)
    held_out = np.arange(total) % stretch >= stretch - stretch // _HELD_OUT
    return Corpus(
        train=everything[~held_out],
        validation=everything[held_out],
        files=len(parts),
        source=source,
        digest=hashlib.sha256(joined).hexdigest(),
    )
