"""CUTLASS's NVFP4 examples run on the machine: their host programs, kernels and reference checks.

Nothing of them is ours: tile schedulers, TMA through maps that their host code makes, pairs and
clusters of CTAs, cluster launch control, epilogues that quantize. The example compares every output
with a product that it computes on the host, and says whether they are equal.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from support import cutlass_examples

pytestmark = pytest.mark.foreign

SEEDS = range(20)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    built: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("cutlass")

    def get(name: str) -> Path:
        if name not in built:
            built[name] = cutlass_examples.build(name, folder)
        return built[name]

    return get


@pytest.mark.parametrize("name", cutlass_examples.EXAMPLES)
def test_example(program: Callable[[str], Path], name: str) -> None:
    """Right and without a report under 20 schedules."""
    for seed in SEEDS:
        done = cutlass_examples.run(program(name), name, seed)
        assert "Disposition: Passed" in done.stdout, (seed, done.stdout, done.stderr)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("name", "ctas"), [("72a", 2 * 2 * 4), ("79a", 4 * 8)])
def test_the_cycle_model_sees_the_whole_product(
    program: Callable[[str], Path], name: str, ctas: int
) -> None:
    """Every multiplication of M x N x K, every byte of D in bf16, every CTA on an SM of its own."""
    m, n, k = 512, 1024, 512  # tiles and clusters are full
    costs = cutlass_examples.modelled(program(name), name, (m, n, k))
    assert sum(costs.counts["mma_flop"].values()) == 2 * m * n * k
    assert costs.counts["bulk"]["written_bytes"] == 2 * m * n
    assert costs.timing is not None
    assert costs.timing.used_sms == ctas
    assert 0 < costs.timing.tensor_busy_steady <= 1


@pytest.mark.parametrize(
    ("name", "line", "kinds"),
    [
        ("72a", b"fence.proxy.async.shared::cta;", {"proxy"}),
        ("72a", b"cp.async.bulk.wait_group.read", {"race"}),
        ("72a", b"fence.mbarrier_init.release.cluster;", {"race"}),
        ("72a", b"tcgen05.wait::ld", {"race"}),
        ("72b", b"tcgen05.commit", {"deadlock"}),
        ("79a", b"fence.proxy.async.shared::cta;", {"proxy"}),
        ("79a", b"cp.async.bulk.wait_group.read", {"race"}),
    ],
)
def test_an_example_without_its_order_is_caught(
    program: Callable[[str], Path], tmp_path: Path, name: str, line: bytes, kinds: set[str]
) -> None:
    """The program with blanks in place of an instruction, at every place, ends with a report."""
    image = program(name).read_bytes()
    start, end = image.index(b".version "), image.rindex(b"ret;")
    assert line in image[start:end]
    text = image[start:end]
    while (at := text.find(line)) >= 0:
        stop = text.index(b";", at) + 1
        text = text[:at] + b" " * (stop - at) + text[stop:]
    broken = tmp_path / name
    broken.write_bytes(image[:start] + text + image[end:])
    broken.chmod(0o755)
    reports = [cutlass_examples.run(broken, name, seed) for seed in range(5)]
    found = {
        kind
        for done in reports
        for kind in kinds
        if done.returncode != 0 and f": {kind}: " in done.stderr
    }
    assert found, [done.stderr[:500] for done in reports]
