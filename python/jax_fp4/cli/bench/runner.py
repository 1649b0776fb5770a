"""Starts the measuring processes, and reads what they print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

from jax_fp4.cli.bench import records

_WIDTH = 24  # of the progress bar


class Progress:
    """A bar in the last line of a terminal; nothing where the output is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        """Args: stream: that shows it."""
        self._stream = stream if stream.isatty() else None
        self._shown = False

    def show(self, text: str, part: float) -> None:
        """Draws it: ``part`` of everything is done, ``text`` is being measured."""
        if self._stream is not None:
            bar = ("#" * round(part * _WIDTH)).ljust(_WIDTH, ".")
            self._stream.write(f"\r\033[K[{bar}] {part:4.0%}  {text}")
            self._stream.flush()
            self._shown = True

    def clear(self) -> None:
        """Takes it away, so that something else can be printed."""
        if self._stream is not None and self._shown:
            self._stream.write("\r\033[K")
            self._stream.flush()
            self._shown = False


def run(spec: dict[str, Any], cpus: list[int], progress: Progress) -> Iterator[records.Record]:
    """Measures in a process of its own.

    Args:
        spec: the arguments of `worker.measure`.
        cpus: that it may use; empty: it uses a GPU.
        progress: shows how far it is.

    Yields:
        Its records, as they come. After Ctrl-C also those of the rounds that were done.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when everything has been read.
        RuntimeError: if the process failed.
    """
    words = json.dumps({"cpus": cpus, "spec": spec})
    command = [sys.executable, "-m", "jax_fp4", "bench", "--worker", words]
    n = str(len(cpus) or 1)
    # The probe runs NumPy's product on each core by itself.
    environment = dict(os.environ, OMP_NUM_THREADS=n, MKL_NUM_THREADS=n, OPENBLAS_NUM_THREADS="1")
    environment["JAX_PLATFORMS"] = "cpu" if cpus else "cuda"
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C comes to us, and we pass it on once
    )
    assert process.stdout is not None
    interrupted = False

    # No exception, which could come anywhere and lose what was read.
    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        process.send_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGINT, pass_on)
    try:
        for line in process.stdout:
            if not line.startswith('{"kind": "progress"'):
                yield records.from_line(line)
            elif interrupted:
                progress.show("interrupted: finishing this sample, Ctrl-C again to stop now", 1)
            else:
                event = json.loads(line)
                progress.show(event["text"], event["part"])
        status = process.wait()
    finally:
        signal.signal(signal.SIGINT, previous)
        progress.clear()
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()
    if interrupted:
        raise KeyboardInterrupt
    if status:
        raise RuntimeError(f"the measuring process ended with status {status}")
