"""Kernels that cheat, put in the place of ours: the benchmark itself has to see it.

Each test takes a case as `bench` makes it and exchanges the timed call of one peer. The twin of all
of them is the honest case, in which every peer has to be found right.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp4.cli.bench import dots, gemm, quantizers, shapes, table
from jax_fp4.cli.bench.inputs import Inputs
from jax_fp4.cli.bench.measure import Case, Peer, Probes, run_case
from jax_fp4.cli.bench.records import Measured, Skipped

Call = Callable[..., Any]
GEMM = shapes.Product("", "", 48, 320, 256, 48)
ROUNDS = 5


@pytest.fixture(scope="module")
def probes() -> Probes:
    """Small ones: nobody looks at the times here."""
    return Probes(1, 1 << 20)


def measure(case: Case, name: str, cheat: Callable[[Peer], Call], probes: Probes) -> Measured:
    """The record of one peer of a case, with another call."""
    make = dict(case.peers)[name]

    def cheating() -> Peer:
        peer = make()
        return dataclasses.replace(peer, call=cheat(peer))

    (record,) = run_case(
        dataclasses.replace(case, peers=[(name, cheating)]), probes, 0, rounds=ROUNDS
    )
    assert isinstance(record, Measured)
    assert len(record.seconds) == ROUNDS
    return record


def honest(peer: Peer) -> Call:
    return peer.call


def does_nothing(peer: Peer) -> Call:
    return lambda *arguments: jax.tree.map(
        lambda aval: jnp.zeros(aval.shape, aval.dtype), jax.eval_shape(peer.call, *arguments)
    )


def returns_garbage(peer: Peer) -> Call:
    return lambda *arguments: jax.tree.map(
        lambda aval: jnp.full(aval.shape, jnp.nan, aval.dtype),
        jax.eval_shape(peer.call, *arguments),
    )


def returns_the_previous_result(peer: Peer) -> Call:
    last: list[Any] = []

    def call(*arguments: Any) -> Any:
        last.append(peer.call(*arguments))
        return last[max(0, len(last) - 2)]

    return call


def answers_from_a_cache(peer: Peer) -> Call:
    """Keyed by what a careless harness would keep the same: shapes and the weight."""
    cache: dict[Any, Any] = {}

    def call(x: Any, *others: Any) -> Any:
        key = (jax.tree.structure(x), tuple(id(leaf) for leaf in jax.tree.leaves(others[:1])))
        if key not in cache:
            cache[key] = peer.call(x, *others)
        return cache[key]

    return call


def _zeroed(part: tuple[Any, ...]) -> Callable[[Peer], Call]:
    def cheat(peer: Peer) -> Call:
        return lambda *arguments: jax.tree.map(
            lambda y: y.at[part].set(0) if y.ndim == 2 else y, peer.call(*arguments)
        )

    return cheat


def computes_half_of_the_terms(peer: Peer) -> Call:
    def call(a: Any, b: Any) -> Any:
        half = a.values.shape[1] // 2
        values = a.values.at[:, half:].set(0)
        return peer.call(dataclasses.replace(a, values=values), b)

    return call


CHEATS = {
    "nothing": does_nothing,
    "garbage": returns_garbage,
    "previous": returns_the_previous_result,
    "cached": answers_from_a_cache,
    "half of the rows": _zeroed((slice(24, None),)),
    "half of the columns": _zeroed((slice(None), slice(160, None))),
    "a tile of columns": _zeroed((slice(None), slice(128, 192))),
    "half of the terms": computes_half_of_the_terms,
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS.keys())
def test_a_product_that_cheats_is_found_wrong_and_gets_no_figure(
    cheat: Callable[[Peer], Call], probes: Probes
) -> None:
    """Whatever is left out or taken from elsewhere; and then no rate and no ratio is shown."""
    record = measure(gemm.gemm(GEMM), "jax_fp4 NVFP4 -> f32", cheat, probes)
    assert not record.correct
    assert record.verdict.startswith("WRONG")
    assert table.cells(record, record)[:-1] == ["-"] * 5


def test_a_product_of_unquantized_operands_is_found_wrong(probes: Probes) -> None:
    """A call that claims NVFP4 operands has to return their product, not that of the originals."""
    case = gemm.gemm(GEMM)
    inputs = Inputs(GEMM)  # the same numbers: they depend on shape and input set only
    samples = iter(range(100))

    def exact(peer: Peer) -> Call:
        def call(*arguments: Any) -> Any:
            s = next(samples)
            x, w = inputs.activations(s), inputs.weight(s)
            return jnp.dot(x, w.T, preferred_element_type=jnp.float32)

        return call

    record = measure(case, "jax_fp4 NVFP4 -> f32", exact, probes)
    assert not record.correct


@pytest.mark.parametrize("backward", [False, True])
def test_a_dot_that_skips_quantization_is_found_too_exact(backward: bool, probes: Probes) -> None:
    """Where the timed call quantizes, an error below the format's is a wrong result."""

    def exact(peer: Peer) -> Call:
        def product(x: Any, w: Any) -> Any:
            return jnp.dot(x, w, preferred_element_type=jnp.float32)

        def both(x: Any, w: Any, dy: Any) -> Any:
            y, pull = jax.vjp(product, x, w)
            return y, *pull(dy.astype(y.dtype))

        return both if backward else product

    for name in ("jax_fp4 NVFP4", "jax_fp4 MXFP8"):
        record = measure(dots.dot(GEMM, backward), name, exact, probes)
        assert not record.correct
        assert "more exact than the format" in record.verdict


@pytest.mark.parametrize("output", [0, 1, 2])
@pytest.mark.parametrize("cheat", ["nothing", "previous", "cached"])
def test_every_gradient_is_looked_at(cheat: str, output: int, probes: Probes) -> None:
    """One output of three that is wrong makes the row wrong."""

    def one(peer: Peer) -> Call:
        cheating = CHEATS[cheat](peer)

        def call(*arguments: Any) -> Any:
            right, wrong = list(peer.call(*arguments)), cheating(*arguments)
            right[output] = wrong[output]
            return right

        return call

    record = measure(dots.dot(GEMM, backward=True), "jax_fp4 NVFP4", one, probes)
    assert not record.correct
    assert f"output {output}" in record.verdict


@pytest.mark.parametrize("cheat", ["nothing", "previous", "cached", "half of the rows"])
def test_a_quantizer_that_cheats_is_found_wrong(cheat: str, probes: Probes) -> None:
    """Codes of nothing, of another matrix, or of half of this one."""
    record = measure(quantizers.quantize(256, 256, 256), "jax_fp4.quantize", CHEATS[cheat], probes)
    assert not record.correct


def test_a_quantizer_that_writes_too_little_is_found_wrong(probes: Probes) -> None:
    """A result of fewer bytes than codes and scales have."""

    def without_half_of_the_scales(peer: Peer) -> Call:
        def call(x: Any) -> Any:
            q = peer.call(x)
            return dataclasses.replace(q, scales=q.scales[:, :8])

        return call

    def without_half_of_the_codes(peer: Peer) -> Call:
        def call(x: Any) -> Any:
            packed, scales, tensor = peer.call(x)
            return packed[:, :64], scales[:, :8], tensor

        return call

    case = quantizers.quantize(256, 256, 256)
    for name, cheat in (
        ("jax_fp4.quantize", without_half_of_the_scales),
        ("jnp, compare and pack", without_half_of_the_codes),
    ):
        record = measure(case, name, cheat, probes)
        assert not record.correct
        assert record.verdict.startswith("WRONG")


@pytest.mark.parametrize(
    "case",
    [
        lambda: gemm.gemm(GEMM),
        lambda: dots.dot(GEMM, backward=False),
        lambda: dots.dot(GEMM, backward=True),
        lambda: quantizers.quantize(128, 256, 8192),
    ],
    ids=["gemm", "forward", "backward", "quantize"],
)
def test_honest_peers_are_found_right(case: Callable[[], Case], probes: Probes) -> None:
    """All of them, on inputs of which none is used twice; what cannot run says why."""
    made = case()
    used: dict[str, list[int]] = {}

    def watched(name: str, make: Callable[[], Peer]) -> Callable[[], Peer]:
        def build() -> Peer:
            peer = make()

            def arguments(s: int) -> tuple[Any, ...]:
                used.setdefault(name, []).append(s)
                return peer.arguments(s)

            return dataclasses.replace(peer, arguments=arguments)

        return build

    made = dataclasses.replace(made, peers=[(n, watched(n, m)) for n, m in made.peers])
    found = list(run_case(made, probes, 0, rounds=3))
    measured = [record for record in found if isinstance(record, Measured)]
    assert [r.verdict for r in measured if not r.correct] == []
    assert any(record.ours for record in measured)
    names = {record.peer for record in found if isinstance(record, Skipped)}
    assert names <= {
        "jax.nn.scaled_matmul NVFP4",
        "jax.nn.scaled_matmul MXFP8",
        "qwix nvfp4",
        "qwix nvfp4 -> f32",
        "qwix nvfp4, default",
        "Transformer Engine NVFP4",
        "torch bf16",
        "torch bf16 -> bf16",
    }
    assert all(len(set(indices)) == len(indices) for indices in used.values())
    for record in measured:
        assert np.all(np.array(record.seconds) > 0)
        assert len(record.seconds) == len(record.matmul_flops) == len(record.copy_bytes) == 3
