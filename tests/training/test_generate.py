"""`calibrate` and `generate`: the demo's model from any of the formats, with a cache.

Contract: logits from cached keys and values are those of the full forward pass, in every format in
which no row depends on others; a seed repeats its text; what is printed is what was measured.
A small model with random weights; the demo's own is the business of test_inference_quality.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4
from jax_fp4 import checkpoint
from jax_fp4.cli import calibrate, decoding, main, model_file, training, transformer
from jax_fp4.cli import corpus as corpora
from jax_fp4.cli.decoding import Runnable
from oracles import quantizer, tables
from support import tiny_model

SIZE = transformer.Size(64, 2, 128, 2, context=32, batch=2, learning_rate=1e-2)
RULES = """
[[rule]]
match = "blocks.0.*.weight"
format = "mxfp8"
[[rule]]
match = ["*.qkv.weight", "*.out.weight"]
format = "nvfp4"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A text, a model (large weights, so that its predictions differ), calibrated and converted."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(transformer.SIZES, "tiny", SIZE)
        text = tiny_model.write_text(folder)
        digest = corpora.load(text, SIZE.context + 1).digest
        params = transformer.initial_params(SIZE, 0)
        params = jax.tree.map(lambda w: w if w.ndim == 1 else 8 * w, params)
        model_file.save(
            folder / "BF16.safetensors", params, size="tiny", recipe="BF16", text=digest
        )
        words = ["--text", str(text), "--batches", "2", "--bits", "6"]
        source = str(folder / "BF16.safetensors")
        assert main(["calibrate", source, str(folder / "calibrated"), *words]) == 0
        (folder / "by_hand.toml").write_text(RULES)
        for name in ("nvfp4", "mxfp4", "mixed"):
            rules = ["--rules", str(folder / "by_hand.toml")] if name == "mixed" else []
            target = str(folder / name)
            assert main(["convert", str(folder / "calibrated"), target, "--to", name, *rules]) == 0
        yield folder


def runnable(folder: Path, name: str, activations: str) -> Runnable:
    return decoding.runnable(model_file.load(folder / name), activations)


TOKENS = np.frombuffer(b"12 times 12 is 144\n13 times", np.uint8)[None]


_forward = jax.jit(transformer.forward, static_argnames=("size", "linear"))


def full(model: Runnable, tokens: np.ndarray, linear: Any = None) -> np.ndarray:
    """Logits of every position, in one pass without a cache."""
    return np.asarray(_forward(model.params, tokens, SIZE, linear or model.linear)[0])


def cached(
    model: Runnable, tokens: np.ndarray, linear: Any = None, shift: int = 0, first: int = 5
) -> np.ndarray:
    """The same from a cache: ``first`` tokens at once, then one by one."""
    caches = transformer.empty_caches(SIZE, len(tokens), SIZE.context)
    parts, at = [], 0
    for piece in [tokens[:, :first], *np.split(tokens[:, first:], tokens.shape[1] - first, 1)]:
        start = np.int32(at + (shift if at else 0))
        logits, caches = _forward(model.params, piece, SIZE, linear or model.linear, caches, start)
        parts.append(np.asarray(logits))
        at += piece.shape[1]
    return np.concatenate(parts, axis=1)


def wide_linear(x: jax.Array, w: Any) -> jax.Array:
    return x @ w.astype(jnp.float32)


def test_cached_logits_are_those_of_the_full_pass(folder: Path) -> None:
    """With float32 layers, up to the order of sums; a position or a token off is far away."""
    model = runnable(folder, "BF16.safetensors", "bf16")
    tokens = np.concatenate([TOKENS, TOKENS[:, ::-1]])
    wanted = full(model, tokens, wide_linear)
    # Sums of at most 128 terms in float32, through two blocks: some hundred roundings of 2**-24.
    bound = 256 * 2.0**-24 * np.abs(wanted).max()
    assert np.abs(cached(model, tokens, wide_linear) - wanted).max() < bound
    assert np.abs(cached(model, tokens, wide_linear, shift=1) - wanted).max() > 1000 * bound
    other = tokens.copy()
    other[:, 0] ^= 1
    assert np.abs(cached(model, other, wide_linear)[:, -1] - wanted[:, -1]).max() > 100 * bound


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("BF16.safetensors", "bf16"),
        ("nvfp4", "bf16"),
        ("nvfp4", "static"),
        ("mxfp4", "dynamic"),
        ("mxfp4", "mxfp8"),
        ("mixed", "static"),
    ],
)
def test_cached_logits_in_every_format(folder: Path, name: str, activations: str) -> None:
    """Rows depend on no other rows; where a sum's last bit differs, a bfloat16 or a code may."""
    model = runnable(folder, name, activations)
    wanted = full(model, TOKENS)
    difference = np.abs(cached(model, TOKENS) - wanted)
    spread = wanted.std()
    # A code of four bits is up to 1/6 of its value; most positions have no such flip.
    assert np.median(difference) < 2.0**-8 * spread
    assert difference.max() < 0.25 * spread
    assert np.median(np.abs(cached(model, TOKENS, shift=1) - wanted)[:, 5:]) > 2.0**-5 * spread


def test_greedy_text_is_the_most_likely_of_full_passes(folder: Path) -> None:
    """Byte for byte, from a pass without a cache."""
    for name, activations in (("nvfp4", "bf16"), ("mxfp4", "mxfp8")):
        model = runnable(folder, name, activations)
        text = b"7 times"
        made = bytes(decoding.generate(model, text, 12))
        tokens = np.frombuffer(text + made, np.uint8)[None]
        # No position sees what comes after it, so one pass has the predictions of all.
        for byte, logits in zip(made, full(model, tokens)[0, len(text) - 1 :], strict=False):
            assert logits[byte] >= logits.max() - 0.1 * logits.std()  # see the test above


def test_a_seed_repeats_its_text(folder: Path) -> None:
    """The same bytes; others under another seed; top_k 1 and low temperatures are greedy."""
    model = runnable(folder, "nvfp4", "static")

    def text(**options: Any) -> bytes:
        return bytes(decoding.generate(model, b"7 times", 20, **options))

    assert text(temperature=1.0, seed=3) == text(temperature=1.0, seed=3)
    assert text(temperature=1.0, seed=3) != text(temperature=1.0, seed=4)
    # A byte depends on seed, position and text: asking for more changes nothing before it.
    longer = bytes(decoding.generate(model, b"7 times", 25, temperature=1.0, seed=3))
    assert longer[:20] == text(temperature=1.0, seed=3)
    greedy = text()
    assert text(temperature=1.0, top_k=1, seed=5) == greedy
    assert text(temperature=1e-6, seed=5) == greedy


def test_samples_follow_the_predictions() -> None:
    """Frequencies of 20 000 draws, within five standard deviations; none outside of top_k."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 256)), jnp.float32) * 3
    keys = jax.random.split(jax.random.key(0), 20_000)
    for temperature, top_k in ((1.0, None), (0.5, None), (1.0, 5)):
        drawn = jax.vmap(lambda k, t=temperature, n=top_k: decoding._sampled(logits, t, k, n))(keys)
        counts = np.bincount(np.asarray(drawn), minlength=256)
        weights = np.exp(np.asarray(logits[0], np.float64) / temperature)
        if top_k is not None:
            weights[np.argsort(weights)[:-top_k]] = 0
        p = weights / weights.sum()
        deviation = np.sqrt(len(keys) * p * (1 - p))
        assert (np.abs(counts - len(keys) * p) <= 5 * deviation + (p > 0)).all()


# ---- What is measured ----------------------------------------------------------------------------


def test_explain_shows_the_way_of_every_layer(folder: Path) -> None:
    """A mixed model: NVFP4 with a static amax, MXFP8, and bfloat16 where a layer was kept."""
    model = runnable(folder, "mixed", "static")
    found = jax_fp4.explain(
        lambda p, t: transformer.forward(p, t, SIZE, model.linear)[0]
    )(model.params, TOKENS)  # fmt: skip
    assert [(p.path, p.left, p.right) for p in found] == [
        *[("quantized", "MXFP8_E4M3", "MXFP8_E4M3")] * 4,
        *[("quantized", "NVFP4 static", "NVFP4")] * 2,
        *[("bfloat16", "bfloat16", "bfloat16")] * 2,
    ]


def test_bytes_are_those_of_the_file(folder: Path) -> None:
    """Linear weights with scales, and the rest, without static scales of activations."""
    for name in ("BF16.safetensors", "nvfp4", "mxfp4", "mixed"):
        model = model_file.load(folder / name)
        with checkpoint.Checkpoint(folder / name) as file:
            sizes = {n: e.nbytes for n, e in file.entries.items() if "input_global" not in n}
        linear = sum(
            n for key, n in sizes.items() if re.match(r"blocks\.\d\.(qkv|out|up|down)", key)
        )
        assert model.linear_bytes == linear
        assert model.other_bytes == sum(sizes.values()) - linear
        assert model.bits_per_weight == pytest.approx(8 * linear / (2 * 64 * 512))


def test_perplexity_is_that_of_the_logits(folder: Path) -> None:
    """exp of the mean of -log p over the batches of held-out text, in float64."""
    corpus = corpora.load(folder / "text.txt", SIZE.context + 1)
    model = runnable(folder, "mxfp4", "mxfp8")
    losses = []
    for tokens in corpus.validation_batches(16, SIZE.batch, SIZE.context + 1):
        logits = full(model, tokens[:, :-1]).astype(np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses.append(-np.take_along_axis(log_p, tokens[:, 1:, None].astype(int), -1).mean())
    assert decoding.perplexity(model, corpus) == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)


def test_calibration_measures_what_it_says(folder: Path) -> None:
    """The divergence of one layer in NVFP4 and the amax of one input, in NumPy."""
    model = model_file.load(folder / "BF16.safetensors")
    batches = [TOKENS, TOKENS[:, ::-1].copy()]
    choices = calibrate.sensitivities(model, batches)
    assert list(choices) == [name for name, _, _ in model_file.linear_names(SIZE)]
    assert all(
        list(own) == ["mxfp4", "nvfp4", "mxfp6", "mxfp8", "keep"] for own in choices.values()
    )
    w = np.asarray(model.linear["blocks.1.up"]).astype(np.float32)
    q = quantizer.quantize(w, "NVFP4")
    params: Any = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.params)
    changed = {**params, "blocks": [dict(layer) for layer in params["blocks"]]}
    changed["blocks"][1]["up"] = jnp.asarray(
        (q.values() * np.float64(q.global_scale)).T, jnp.float32
    )

    def log_p(params: Any, tokens: np.ndarray) -> np.ndarray:
        x = full(Runnable(params, SIZE, None), tokens, calibrate._wide_linear).astype(np.float64)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    pairs = [(log_p(params, tokens), log_p(changed, tokens)) for tokens in batches]
    wanted = np.mean([(np.exp(p) * (p - q)).sum(-1).mean() for p, q in pairs])
    assert choices["blocks.1.up"]["nvfp4"].cost == pytest.approx(wanted, rel=0.02)
    for own in choices.values():
        assert own["keep"].cost == 0
        assert own["mxfp4"].cost > own["mxfp6"].cost > 0

    x = np.asarray(params["embedding"])[TOKENS.reshape(-1)].astype(np.float64)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    largest = tables.round_to_bf16(np.abs(x).max().astype(np.float32).reshape(1))[0]
    found = calibrate.input_amax(model.params, batches[:1], SIZE)
    assert found["blocks.0.qkv"] == pytest.approx(largest, rel=2**-8)
    calibrated = checkpoint.load(folder / "calibrated")
    numbers = json.loads((folder / "calibrated" / "calibration.json").read_text())
    for name, layer in numbers["layers"].items():
        amax = checkpoint.activation_amax(calibrated, f"{name}.weight")
        assert amax == pytest.approx(layer["input_amax"], rel=2**-22)


def test_rules_of_calibration_fit_the_budget(folder: Path) -> None:
    """`convert` takes them, and the model needs as many bits as were asked for, or fewer."""
    target = folder / "best"
    words = ["--to", "mixed", "--rules", str(folder / "calibrated" / "rules.toml")]
    assert main(["convert", str(folder / "calibrated"), str(target), *words]) == 0
    model = model_file.load(target)
    assert 5 < model.bits_per_weight <= 6
    numbers = json.loads((folder / "calibrated" / "calibration.json").read_text())
    for name, w in model.linear.items():
        choice = numbers["layers"][name]["chosen"]
        kind = str(w.format) if hasattr(w, "format") else "keep"
        assert kind.lower().startswith(choice)


# ---- The commands --------------------------------------------------------------------------------


def test_command_prints_text_speed_bytes_and_perplexity(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every number is that of the functions above."""
    text = folder / "text.txt"
    words = ["generate", str(folder / "nvfp4"), "--text", str(text), "--prompt", "7 times"]
    words += ["--tokens", "20", "--against", str(folder / "BF16.safetensors")]
    assert main([*words, "--activations", "static", "--temperature", "1", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    model = runnable(folder, "nvfp4", "static")
    made = bytes(decoding.generate(model, b"7 times", 20, temperature=1.0, seed=3))
    head, continuation, tail = printed.split("---\n")
    assert continuation.removesuffix("\n") == "7 times" + "".join(
        chr(b) if chr(b).isprintable() or b == 10 else "?" for b in made
    )
    assert "8 x NVFP4, 36,896 bytes (4.50 bits a weight)" in head and "static" in head
    assert re.search(r"20 tokens, [\d,]+ tokens/s", tail)
    corpus = corpora.load(text, SIZE.context + 1)
    found = decoding.perplexity(model, corpus)
    base = decoding.perplexity(runnable(folder, "BF16.safetensors", "bf16"), corpus)
    assert f"perplexity {found:.4f} " in tail and f" {base:.4f}: " in tail
    assert f"{100 * (found / base - 1):+.2f} %" in tail


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["generate", "gone"], "gone: no such file; train a model with"),
        (["generate", "foreign.safetensors"], "is no model of the demo"),
        (["generate", "nvfp4"], "was trained on another text than the Python standard library"),
        (["generate", "nvfp4", "--activations", "mxfp8"], "blocks.0.qkv is NVFP4, whose blocks"),
        (["generate", "bare", "--activations", "static"], "calibrate` writes a model with them"),
        (["generate", "nvfp4", "--tokens", "29"], "at most 32 in all"),
        (["generate", "nvfp4", "--prompt", ""], "expected one byte or more"),
        (["generate", "nvfp4", "--tokens", "0"], "argument --tokens: must be 1 or more"),
        (["generate", "nvfp4", "--temperature", "-1"], "--temperature: must be 0 or more"),
        (["generate", "nvfp4", "--top-k", "300", "--tokens", "9"], "there are 256 bytes"),
        (["calibrate", "nvfp4", "x"], "blocks.0.qkv is NVFP4 already"),
        (["calibrate", "BF16.safetensors", "x", "--text", "text.txt", "--bits", "4"],
         "the smallest formats need 4.2500 bits a weight"),
        (["calibrate", "BF16.safetensors", "x", "--bits", "0"], "--bits: must be above 0"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line_and_exit_code_2(
    folder: Path,
    words: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is wrong and what to do, before anything runs or is written."""
    monkeypatch.chdir(folder)
    if "foreign.safetensors" in words:
        checkpoint.save("foreign.safetensors", {"w": np.ones(3)}, convention="modelopt")
    if "bare" in words and not Path("bare").exists():
        assert main(["convert", "BF16.safetensors", "bare", "--to", "nvfp4"]) == 0
        capsys.readouterr()
    words = words if "--tokens" in words or words[0] == "calibrate" else [*words, "--tokens", "9"]
    try:
        code = main(words)
    except SystemExit as stop:  # what argparse does
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2 and complaint in printed.err and len(printed.err.splitlines()) == 1
    assert printed.out == "" and not Path("x").exists()


def test_a_trained_model_is_written_as_it_is(folder: Path, tmp_path: Path) -> None:
    """Linear weights rounded to bfloat16, everything else bit for bit."""
    params = transformer.initial_params(SIZE, 7)
    path = tmp_path / "model.safetensors"
    model_file.save(path, params, size="tiny", recipe="BF16", text="x")
    loaded = model_file.load(path)
    assert loaded.metadata["recipe"] == "BF16" and loaded.size == SIZE
    for i, layer in enumerate(params["blocks"]):
        for name, value in layer.items():
            got = np.asarray(loaded.params["blocks"][i][name]).astype(np.float32)
            wanted = np.asarray(value)
            wanted = tables.round_to_bf16(wanted) if name in transformer.LINEAR else wanted
            np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(loaded.params["embedding"], params["embedding"])
    tokens = np.tile(TOKENS, (2, 1))
    np.testing.assert_array_equal(
        training._validation_step(loaded.params, tokens, SIZE, jax_fp4.recipes.BF16),
        training._validation_step(params, tokens, SIZE, jax_fp4.recipes.BF16),
    )
