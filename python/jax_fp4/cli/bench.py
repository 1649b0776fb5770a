"""`python -m jax_fp4 bench`: the CPU backend beside its peers, in one run.

What makes the figures comparable: all peers of a case run interleaved, sample by sample, in the
same process on the same cores; inputs are random and rotate through sets larger than the caches;
what timed calls returned is verified afterwards (products: whole rows and columns against float64;
our codes: every element within half a step; other codes: their error as a whole); medians are
printed with best and spread, and the ceiling of the core (multiply-accumulate on registers)
measured beside every case. Each number of cores is a process of its own, bound to that many cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPEATS = 9  # medians of at least this many interleaved samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "what", nargs="*", default=[], help="gemm, quantize, decode; all by default"
    )
    parser.add_argument(
        "--cores", type=int, nargs="*", help="numbers of cores; 1 and all by default"
    )
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help="interleaved samples of each peer"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[1024, 4096], help="gemm: M = N = K"
    )
    parser.add_argument("--out", type=Path, help="write every sample as JSON lines to this file")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns the exit code."""
    unknown = sorted(set(args.what) - set(CASES))
    if unknown:
        print(f"bench: no case {unknown[0]!r}; choose from {', '.join(CASES)}", file=sys.stderr)
        return 2
    for name, values in (("--repeats", [args.repeats]), ("--sizes", args.sizes)):
        if min(values, default=0) < 1:
            print(f"bench: {name} must be at least 1, got {values}", file=sys.stderr)
            return 2
    what = args.what or list(CASES)
    if args.in_process:
        for record in measure(what, args.sizes, args.repeats):
            print(json.dumps(record), flush=True)
        return 0
    if args.out is not None:
        try:
            args.out.write_text("")  # before anything is measured that could not be kept
        except OSError as error:
            print(f"bench: --out {args.out}: {error.strerror}", file=sys.stderr)
            return 2
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {len(available)} cores, {platform.platform()}")
    absent = [name for name in ("torch", "qwix") if importlib.util.find_spec(name) is None]
    if absent:
        print(f"not installed, so not measured: {', '.join(absent)} (pip install 'jax-fp4[bench]')")
    lines: list[str] = []
    status = 0
    try:
        for cores in args.cores or sorted({1, len(available)}):
            if not 1 <= cores <= len(available):
                print(f"bench: --cores {cores}: this machine has {len(available)}", file=sys.stderr)
                return 2
            status = max(status, _run_bound(args, what, available[:cores], lines))
    except KeyboardInterrupt:
        print("\ninterrupted; what was measured is kept", file=sys.stderr)
        status = 130
    if args.out is not None:
        args.out.write_text("".join(lines))
        print(f"samples: {args.out}")
    return status


def _run_bound(args: argparse.Namespace, what: list[str], cpus: list[int], lines: list[str]) -> int:
    """One process on ``cpus``: prints its table and collects its lines."""
    command = [sys.executable, "-m", "jax_fp4", "bench", *what, "--in-process"]
    command += ["--repeats", str(args.repeats), "--sizes", *map(str, args.sizes)]
    n = str(len(cpus))
    environment = dict(os.environ, OMP_NUM_THREADS=n, MKL_NUM_THREADS=n, OPENBLAS_NUM_THREADS=n)
    environment.setdefault("JAX_PLATFORMS", "cpu")
    bind = (lambda: os.sched_setaffinity(0, cpus)) if hasattr(os, "sched_setaffinity") else None
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=bind
    )
    assert process.stdout is not None
    case = None
    for line in process.stdout:
        record = {**json.loads(line), "cores": len(cpus)}
        lines.append(json.dumps(record) + "\n")
        if record["case"] != case:
            case = record["case"]
            title = f"{case}, {len(cpus)} core{'s' if len(cpus) > 1 else ''}"
            peak = f"peak probe {record['peak_tflops']:.2f} TFLOP/s a core"
            print(f"\n{title}, {record['unit']}   [{peak}]")
            print(f"  {'':34}{'median':>10}{'best':>10}  {'spread':>7}{'ours/peer':>11}  verified")
        _print_row(record)
    return process.wait()


def _print_row(r: dict[str, Any]) -> None:
    ratio = "" if r["ratio"] is None else f"{r['ratio']:.2f}x"
    print(
        f"  {r['peer']:34}{r['median']:>10.3f}{r['best']:>10.3f}  {r['spread']:>6.0%}{ratio:>11}"
        f"  {r['verified']}",
        flush=True,
    )


class Peer:
    """One implementation: a call on input set i, and a check of what the timed call returned."""

    def __init__(
        self, name: str, call: Callable[[int], Any], check: Callable[[int, Any], str]
    ) -> None:
        """Keeps the parts."""
        self.name, self.call, self.check = name, call, check


def measure(what: list[str], sizes: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Runs the cases in this process; one record a peer and case, ours first."""
    for name in what:
        for case, unit, work, sets, peers in CASES[name](sizes):
            yield from _interleave(case, unit, work, sets, peers, repeats)


def _interleave(
    case: str, unit: str, work: float, sets: int, peers: list[Peer], repeats: int
) -> Iterator[dict[str, Any]]:
    import jax
    import numpy as np

    import jax_fp4
    from jax_fp4 import _native

    for peer in peers:  # compile and touch everything once
        _wait(peer.call(0))
    samples: dict[str, list[float]] = {peer.name: [] for peer in peers}
    last: dict[str, tuple[int, Any]] = {}
    peaks = []
    for repeat in range(repeats):
        peaks.append(_native.cpu_peak_flops(0.02))
        first = repeat % len(peers)  # nobody always runs behind the same neighbour
        for peer in peers[first:] + peers[:first]:
            index = repeat % sets
            begin = time.perf_counter()
            result = _wait(peer.call(index))
            samples[peer.name].append(time.perf_counter() - begin)
            last[peer.name] = (index, result)
    ours = statistics.median(samples[peers[0].name])
    for peer in peers:
        times = samples[peer.name]
        median = statistics.median(times)
        yield {
            "case": case,
            "peer": peer.name,
            "unit": unit,
            "median": work / median,
            "best": work / min(times),
            "spread": (max(times) - min(times)) / median,
            "ratio": None if peer is peers[0] else median / ours,
            "verified": peer.check(*last[peer.name]),
            "seconds": times,
            "peak_tflops": statistics.median(peaks) / 1e12,
            "cpu_level": jax_fp4.cpu_level(),
            "versions": {
                "jax_fp4": jax_fp4.__version__,
                "jax": jax.__version__,
                "numpy": np.__version__,
            },
        }


def _wait(result: Any) -> Any:
    """``result``, computed: JAX returns before it is."""
    import jax

    return jax.block_until_ready(result)


# ---- Cases ---------------------------------------------------------------------------------------


def _optional(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        return None


def _product_check(a: Any, b: Any, bound: float) -> Callable[[Any], str]:
    """Compares 16 rows and 16 columns of a product with float64, relative to sums of magnitudes."""
    import numpy as np

    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    rng = np.random.default_rng(0)
    parts = []
    for rows, cols in (
        (rng.integers(a.shape[0], size=16), slice(None)),
        (slice(None), rng.integers(b.shape[0], size=16)),
    ):
        parts.append((rows, cols, a[rows] @ b[cols].T, np.abs(a[rows]) @ np.abs(b[cols]).T))

    def check(product: Any) -> str:
        product = np.asarray(product, np.float64)
        error = max(
            np.max(np.abs(product[rows][:, cols] - exact) / magnitude)
            for rows, cols, exact, magnitude in parts
        )
        return f"ok {error:.0e}" if error <= bound else f"WRONG {error:.0e}"

    return check


def _gemm_case(m: int, n: int, k: int, sets: int) -> tuple[str, str, float, int, list[Peer]]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jax_fp4 as fp4

    rng = np.random.default_rng(m + n + k)
    a = [jnp.asarray(rng.standard_normal((m, k), np.float32), jnp.bfloat16) for _ in range(sets)]
    b = [jnp.asarray(rng.standard_normal((n, k), np.float32), jnp.bfloat16) for _ in range(sets)]
    bt = [x.T.copy() for x in b]
    qa, qb = [fp4.quantize(x) for x in a], [fp4.quantize(x) for x in b]
    ours = jax.jit(lambda a, b: fp4.scaled_matmul(a, b))
    ours_bf16 = jax.jit(lambda a, b: fp4.scaled_matmul(a, b, out_dtype=jnp.bfloat16))
    theirs = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    # Every sum of K f32 additions is within K * 2^-24 of the exact one, relative to sum(|terms|).
    bound = (k + 2) * 2.0**-24
    decoded = [[fp4.dequantize(x, jnp.float32) for x in side] for side in (qa, qb)]
    quantized = [_product_check(x, y, bound) for x, y in zip(*decoded, strict=True)]
    rounded = [_product_check(x, y, 2.0**-8) for x, y in zip(*decoded, strict=True)]
    plain = [_product_check(x, y, bound) for x, y in zip(a, b, strict=True)]
    peers = [
        Peer(
            "jax_fp4.scaled_matmul NVFP4 -> f32",
            lambda i: ours(qa[i], qb[i]),
            lambda i, r: quantized[i](r),
        ),
        Peer("the same, -> bf16", lambda i: ours_bf16(qa[i], qb[i]), lambda i, r: rounded[i](r)),
        Peer("jnp.dot bf16 -> f32", lambda i: theirs(a[i], bt[i]), lambda i, r: plain[i](r)),
    ]
    if m == 1:  # XLA has a fast product of a vector in f32 only
        wide = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(a, bt, strict=True)]
        peers.append(Peer("jnp.dot f32", lambda i: theirs(*wide[i]), lambda i, r: plain[i](r)))
    torch = _optional("torch")
    if torch is not None:
        ta = [torch.from_numpy(np.asarray(x, np.float32)).bfloat16() for x in a]
        tb = [torch.from_numpy(np.asarray(x, np.float32)).bfloat16() for x in b]
        plain_rounded = [_product_check(x, y, 2.0**-8) for x, y in zip(a, b, strict=True)]
        peers.append(
            Peer(
                "torch bf16 linear -> bf16",
                lambda i: torch.nn.functional.linear(ta[i], tb[i]),
                lambda i, r: plain_rounded[i](r.float().numpy()),
            )
        )
    qwix = _optional("qwix")
    if qwix is not None and m > 1:
        dims = (((1,), (1,)), ((), ()))
        wa, wb = ([qwix.quantize(x, "nvfp4", tiled_axes={1: 16}) for x in side] for side in (a, b))
        product = jax.jit(
            lambda a, b: qwix.dot_general(a, b, dims, preferred_element_type=jnp.float32)
        )
        default = jax.jit(lambda a, b: qwix.dot_general(a, b, dims))
        # Its operands are scaled differently: compare with its own dequantized values.
        own = [
            _product_check(qwix.dequantize(x), qwix.dequantize(y), 2.0**-6)
            for x, y in zip(wa, wb, strict=True)
        ]
        peers += [
            Peer("qwix nvfp4 dot -> f32", lambda i: product(wa[i], wb[i]), lambda i, r: own[i](r)),
            Peer(
                "qwix nvfp4 dot, default", lambda i: default(wa[i], wb[i]), lambda i, r: own[i](r)
            ),
        ]
    work = 2.0 * m * n * k
    if m == 1:
        return f"decode 1 x {n} x {k}", "Gweight/s", n * k / 1e9, sets, peers
    return f"gemm {m} x {n} x {k}", "TFLOP/s", work / 1e12, sets, peers


def _gemm(sizes: list[int]) -> Iterator[tuple[str, str, float, int, list[Peer]]]:
    for size in sizes:
        yield _gemm_case(size, size, size, 2 if size > 2048 else 4)


def _decode(sizes: list[int]) -> Iterator[tuple[str, str, float, int, list[Peer]]]:
    yield _gemm_case(1, 4096, 4096, 8)


def _jnp_nvfp4(x: Any) -> Any:
    """The best formulation in jnp that we know: compare with the midpoints, then pack two codes."""
    import jax.numpy as jnp

    blocks = x.astype(jnp.float32).reshape(x.shape[0], -1, 16)
    tensor = jnp.max(jnp.abs(blocks)) / 2688
    scales = (jnp.max(jnp.abs(blocks), axis=-1) / (6 * tensor)).astype(jnp.float8_e4m3fn)
    scaled = blocks / (scales.astype(jnp.float32) * tensor)[..., None]
    magnitude = jnp.abs(scaled)
    code = jnp.where(scaled < 0, 8, 0).astype(jnp.uint8)
    for midpoint in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
        code += (magnitude > midpoint).astype(jnp.uint8)
    pairs = code.reshape(x.shape[0], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales, tensor


def _quantize(sizes: list[int]) -> Iterator[tuple[str, str, float, int, list[Peer]]]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jax_fp4 as fp4

    sets, n = 4, 4096
    rng = np.random.default_rng(0)
    x = [jnp.asarray(rng.standard_normal((n, n), np.float32), jnp.bfloat16) for _ in range(sets)]

    def relative(i: int, values: Any, limit: float) -> str:
        exact = np.asarray(x[i], np.float32)
        error = np.linalg.norm(np.asarray(values, np.float32) - exact) / np.linalg.norm(exact)
        return f"ok {error:.3f}" if 0.09 < error < limit else f"WRONG {error:.3f}"

    def within_half_a_step(i: int, *copies: fp4.BlockScaledArray) -> str:
        """Every element of ours: the widest step of E2M1, from 4 to 6, is two scales wide."""
        worst = 0.0
        for q in copies:
            scales = jax.lax.bitcast_convert_type(q.scales, jnp.float8_e4m3fn)
            unit = np.repeat(np.asarray(scales, np.float32), 16, axis=1) * np.float32(
                q.global_scale
            )
            error = np.abs(
                np.asarray(fp4.dequantize(q, jnp.float32)) - np.asarray(x[i], np.float32)
            )
            worst = max(worst, float(np.max(error / (unit if q.axis == -1 else unit.T))))
        return f"ok {worst:.3f}" if worst <= 1.001 else f"WRONG {worst:.3f}"

    def theirs_values(r: Any) -> Any:
        table = np.array(
            [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
        )
        packed, scales, tensor = (np.asarray(part) for part in r)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(n, -1, 16)
        return (table[codes] * scales.astype(np.float32)[..., None] * tensor).reshape(n, n)

    row = jax.jit(lambda x: fp4.quantize(x))
    both = jax.jit(lambda x: fp4.quantize_both(x))
    theirs = jax.jit(_jnp_nvfp4)

    peers = [
        Peer("jax_fp4.quantize rows", lambda i: row(x[i]), within_half_a_step),
        Peer(
            "jax_fp4.quantize_both",
            lambda i: both(x[i]),
            lambda i, r: within_half_a_step(i, *r),
        ),
        Peer(
            "jnp, compare and pack",
            lambda i: theirs(x[i]),
            lambda i, r: relative(i, theirs_values(r), 0.1),
        ),
    ]
    qwix = _optional("qwix")
    if qwix is not None:
        other = jax.jit(lambda x: qwix.quantize(x, "nvfp4", tiled_axes={1: 16}))
        peers.append(
            Peer(
                "qwix.quantize nvfp4",
                lambda i: other(x[i]),
                lambda i, r: relative(i, qwix.dequantize(r), 0.2),  # it has no tensor scale
            )
        )
    yield f"quantize bf16 -> NVFP4, {n} x {n}", "GB/s of input", 2.0 * n * n / 1e9, sets, peers


CASES: dict[str, Callable[[list[int]], Iterator[tuple[str, str, float, int, list[Peer]]]]] = {
    "quantize": _quantize,
    "gemm": _gemm,
    "decode": _decode,
}
