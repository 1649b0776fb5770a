"""The protocol: how one call is timed, so that its figure can be trusted.

For every sample of every peer, in this order:

1. Its arguments are made from input set number s, which no call has seen before.
2. The matmul probe and the copy probe run: they say what this machine can do at this moment, and
   the copy, larger than the last-level cache, throws out what step 1 left there.
3. The clock starts; the call runs until its result is computed; the clock stops.
4. What it returned is handed to the check, which keeps random parts of it. Nothing is judged before
   all samples are there.

The peers of a case take turns, sample by sample, and each round begins with another of them: what
the machine's neighbours do hits all alike.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jax_fp4 import _native
from jax_fp4.cli.bench.records import Measured, Skipped

LEAST_ROUNDS, MOST_ROUNDS = 5, 60
_PROBE_SECONDS = 0.01
_BLAS_SIZE = 384  # three matrices of 0.6 MB: they stay in a core's caches
_EVICT_AT_MOST = 256 << 20  # bytes; the last-level cache of a server may be shared and larger


class Check(Protocol):
    """Judges the results of one peer's timed calls."""

    def take(self, index: int, result: Any) -> None:
        """Keeps what has to be seen of the result on input set ``index``."""
        ...

    def verdict(self) -> tuple[bool, str]:
        """Whether all of them were right, and one line."""
        ...


@dataclasses.dataclass
class Peer:
    """One implementation.

    Attributes:
        name: in tables.
        arguments: input set number -> what the timed call takes. Not timed.
        call: the timed call.
        check: of its results.
        bytes: that a call has to move at least, in this peer's formats.
        ours: whether it is this package's.
    """

    name: str
    arguments: Callable[[int], tuple[Any, ...]]
    call: Callable[..., Any]
    check: Check
    bytes: float
    ours: bool = False


@dataclasses.dataclass
class Case:
    """One question, and who answers it.

    Attributes:
        op: as of `Measured`.
        case: the same.
        shape: the label.
        unit: of the rates.
        work: units in a call.
        flops: in a call.
        peers: (name, function that makes the peer). One that raises there or in its first calls
            does not run, and a `Skipped` says why.
    """

    op: str
    case: str
    shape: str
    unit: str
    work: float
    flops: float
    peers: Sequence[tuple[str, Callable[[], Peer]]]


class Probes:
    """The two ceilings of this machine, measured before every sample.

    On a CPU: the multiply-accumulate rate on registers (below AVX2, where the extension has no
    such loop, a float32 product of BLAS that stays in the caches), and a copy between two buffers.
    On a GPU: a bfloat16 product of 4096^3 and a copy.
    """

    def __init__(self, cores: int, cache_bytes: int) -> None:
        """Args: cores: that this process has, 0 for a GPU; cache_bytes: of the last level."""
        self.cores = cores
        size = min(2 * max(cache_bytes, 16 << 20), _EVICT_AT_MOST)
        if cores == 0:
            self._source = jax.numpy.ones(size // 4, jax.numpy.float32)
            self._copy = jax.jit(lambda x: x + 1)
            self._square = jax.numpy.ones((4096, 4096), jax.numpy.bfloat16)
            self._product = jax.jit(jax.numpy.dot)
            self.matmul_name = "bfloat16 product 4096^3"
        else:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(cores)
            self._buffers = [np.ones((2, size // cores), np.uint8) for _ in range(cores)]
            self._registers = _native.cpu_peak_flops(_PROBE_SECONDS) > 0
            operands = [np.ones((_BLAS_SIZE, _BLAS_SIZE), np.float32) for _ in range(cores)]
            self._operands = [(x, np.empty_like(x)) for x in operands]
            self.matmul_name = (
                "multiply-accumulate on registers, one core times their number"
                if self._registers
                else f"float32 products {_BLAS_SIZE}^3 by NumPy's BLAS, one on each core"
            )
        self.copy_name = f"copy of {size >> 20} MiB, reads and writes counted"

    def matmul(self) -> float:
        """FLOP/s."""
        if self.cores == 0:
            begin = time.perf_counter()
            jax.block_until_ready(self._product(self._square, self._square))
            return 2.0 * 4096**3 / (time.perf_counter() - begin)
        if self._registers:
            return self.cores * _native.cpu_peak_flops(_PROBE_SECONDS)
        return sum(self._pool.map(self._blas, self._operands))

    @staticmethod
    def _blas(arrays: tuple[np.ndarray, np.ndarray]) -> float:
        best, end = 1e9, time.perf_counter() + _PROBE_SECONDS
        while (begin := time.perf_counter()) < end:
            np.matmul(arrays[0], arrays[0], out=arrays[1])
            best = min(best, time.perf_counter() - begin)
        return 2.0 * _BLAS_SIZE**3 / best

    def copy(self) -> float:
        """Bytes/s, read and written."""
        begin = time.perf_counter()
        if self.cores == 0:
            jax.block_until_ready(self._copy(self._source))
            return 2.0 * self._source.nbytes / (time.perf_counter() - begin)
        list(self._pool.map(lambda buffer: np.copyto(buffer[1], buffer[0]), self._buffers))
        return sum(buffer.nbytes for buffer in self._buffers) / (time.perf_counter() - begin)


@dataclasses.dataclass
class _Samples:
    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    matmul: list[float] = dataclasses.field(default_factory=list)
    copy: list[float] = dataclasses.field(default_factory=list)


def _timed(peer: Peer, arguments: tuple[Any, ...]) -> tuple[float, float, Any]:
    """(wall seconds, processor seconds of all threads, result) of one call."""
    cpu_begin, begin = time.process_time(), time.perf_counter()
    result = jax.block_until_ready(peer.call(*arguments))
    elapsed = time.perf_counter() - begin
    return elapsed, time.process_time() - cpu_begin, result


def run_case(
    case: Case,
    probes: Probes,
    seconds: float,
    rounds: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[Measured | Skipped]:
    """Measures a case.

    Args:
        case: the question.
        probes: of this machine.
        seconds: it may take about this long; there are `LEAST_ROUNDS` rounds in any case.
        rounds: exactly so many, whatever time they take.
        progress: called as (rounds done, rounds).

    Yields:
        A record for each peer, ours first. After Ctrl-C those of the rounds so far, and then it
        raises KeyboardInterrupt.
    """
    begin = time.perf_counter()
    peers: list[Peer] = []
    estimate, latest, fresh = 0.0, 0.0, 0
    for name, make in case.peers:
        try:
            peer = make()
            for _ in range(2):  # to compile, and to see how long it takes
                start = time.perf_counter()
                arguments = jax.block_until_ready(peer.arguments(fresh))
                _timed(peer, arguments)
                latest = time.perf_counter() - start
                fresh += 1
            # Slow ones would leave no time for the others; a first call of few is no measure.
            if rounds is None and LEAST_ROUNDS * latest > seconds:
                raise TimeoutError(
                    f"{latest:.1f} s a sample, too long for the {seconds:.0f} s of this row "
                    "(--minutes)"
                )
            estimate += latest + 4 * _PROBE_SECONDS
            peers.append(peer)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip() or '-'}".splitlines()[0][:200]
            yield Skipped(case.op, case.case, case.shape, name, reason)
    if not peers:
        return
    left = seconds - (time.perf_counter() - begin)
    count = rounds or max(LEAST_ROUNDS, min(MOST_ROUNDS, int(left / estimate)))
    samples = {peer.name: _Samples() for peer in peers}
    unreadable: dict[str, str] = {}
    interrupted = False
    try:
        for turn in range(count):
            first = turn % len(peers)
            for peer in peers[first:] + peers[:first]:
                index = fresh + turn
                arguments = jax.block_until_ready(peer.arguments(index))
                kept = samples[peer.name]
                matmul, copy = probes.matmul(), probes.copy()
                elapsed, cpu, result = _timed(peer, arguments)
                try:
                    peer.check.take(index, result)
                except Exception as error:  # of another shape or type than was promised
                    unreadable[peer.name] = f"WRONG: {type(error).__name__}: {error}"
                kept.matmul.append(matmul)
                kept.copy.append(copy)
                kept.cpu_seconds.append(cpu)
                kept.seconds.append(elapsed)
                del arguments, result
            progress(turn + 1, count)
    except KeyboardInterrupt:
        interrupted = True
    for peer in peers:
        kept = samples[peer.name]
        if not kept.seconds:
            continue
        correct, verdict = (
            (False, unreadable[peer.name]) if peer.name in unreadable else peer.check.verdict()
        )
        done = len(kept.seconds)
        yield Measured(
            case.op, case.case, case.shape, peer.name, peer.ours, probes.cores, case.unit,
            case.work, case.flops, peer.bytes, tuple(kept.seconds),
            tuple(kept.cpu_seconds[:done]), tuple(kept.matmul[:done]), tuple(kept.copy[:done]),
            verdict, correct,
        )  # fmt: skip
    if interrupted:
        raise KeyboardInterrupt
