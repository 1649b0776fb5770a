"""A run of `bench` on one core whose own product may be a little slower: for comparisons.

python bench_pair.py FACTOR ROUNDS FILE measures one small product, ours made slower by the factor.
"""

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

ROW = "jax_fp4 NVFP4 -> f32"


def main(factor: float, rounds: int, path: Path) -> None:
    """Writes the records."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before jax starts its threads
    import jax

    from jax_fp4.cli.bench import gemm, records, shapes
    from jax_fp4.cli.bench.measure import Peer, Probes, run_case

    def slower(peer: Peer) -> Peer:
        def call(*arguments: Any) -> Any:
            begin = time.process_time()
            result = jax.block_until_ready(peer.call(*arguments))
            end = begin + factor * (time.process_time() - begin)
            while time.process_time() < end:
                pass
            return result

        return dataclasses.replace(peer, call=call)

    case = gemm.gemm(shapes.Product("", "", 64, 1024, 1024, 64))
    peers = [
        (name, (lambda make=make: slower(make())) if name == ROW else make)
        for name, make in case.peers
        if not name.startswith("torch")  # whose threads outlive their work
    ]
    case = dataclasses.replace(case, peers=peers)
    found = run_case(case, Probes(1, 32 << 20), 0, rounds=rounds)
    path.write_text("".join(records.to_line(record) + "\n" for record in found))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
