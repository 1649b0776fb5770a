"""`python -m jax_fp4 memory`: against sizes by hand, XLA's memory analysis, and a mesh."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_fp4
from jax_fp4.cli import main, memory
from support.repository import ROOT

ALIGNMENT = 64  # of every buffer that XLA's CPU backend assigns
POINTER = 8  # of an array in a tuple


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["memory", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- By hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # As published with the models: the sum over the tensors of each checkpoint.
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_models_have_the_published_number_of_parameters(model: str, parameters: int) -> None:
    """Embedding, head, norms and linear layers."""
    assert memory.MODELS[model].parameters == parameters


def test_llama3_8b_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 has 2 bytes; NVFP4 1/2 + 1/16, FP8 1 + 1/32, and 4 a tensor; the rest is float32."""
    layers, shards, tokens = 32, 8, 2 * 4096
    k_n = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
    weights = layers * sum(k * n for k, n in k_n)
    inputs = layers * sum(k * tokens for k, _ in k_n)
    tensors = layers * len(k_n) * 4
    everything = 8_030_261_248
    got = printed(
        capsys, "--model", "llama3-8b", "--batch", "2", "--sequence", "4096", "--shards", "8"
    )
    assert (got["parameters"], got["shards"]) == (everything, shards)
    expected_copies = {
        "BF16": (2 * weights, 2 * inputs),
        "FP8": (weights * 33 // 32 + tensors, inputs * 33 // 32 + tensors),
        "NVFP4": (weights * 9 // 16 + tensors, inputs * 9 // 16 + tensors),
    }
    assert got["bytes"].keys() == expected_copies.keys()
    for name, (copies, saved) in expected_copies.items():
        assert got["bytes"][name] == {
            "weights_f32": 4 * everything,
            "weights_bf16": 2 * everything,
            "moments_f32": 8 * everything,
            "gradients_f32": 4 * everything,
            "forward_copies": copies,
            "backward_copies": copies,
            "device_weights_gradients_moments": 16 * everything // shards,
            "device_backward_copies": math.ceil(copies / shards),
            "device_saved_inputs": saved,
            "device_gathered_forward": copies - copies // shards,
            "device_gathered_backward": copies - copies // shards,
            "device_gradients_scattered": 4 * weights * (shards - 1) // shards,
        }


def test_one_device_gathers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """And holds everything."""
    numbers = printed(capsys, "--shards", "1", "--recipes", "NVFP4")["bytes"]["NVFP4"]
    assert numbers["device_gathered_forward"] == numbers["device_gradients_scattered"] == 0
    assert numbers["device_backward_copies"] == numbers["backward_copies"]


def test_table_shows_gigabytes(capsys: pytest.CaptureFixture[str]) -> None:
    """A column for each recipe, rounded to 0.01 GB."""
    assert main(["memory", "--model", "llama3-70b", "--recipes", "MXFP8,NVFP4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("llama3-70b: 70.55 G parameters, 68.45 G of them in linear layers")
    (master,) = (line for line in lines if line.startswith("weights, float32 master"))
    assert master.split()[-2:] == ["282.21", "282.21"]
    (forward,) = (line for line in lines if line.endswith("38.50") and "forward" in line)
    assert forward.split()[-2:] == ["70.59", "38.50"]  # 33/32 and 9/16 of 68.45 G


@pytest.mark.parametrize("model", memory.MODELS)
def test_documented_tables_are_what_is_printed(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/memory.md shows the command and its output."""
    assert main(["memory", "--model", model]) == 0
    shown = f"$ python -m jax_fp4 memory --model {model}\n{capsys.readouterr().out}```\n"
    assert shown in (ROOT / "docs" / "memory.md").read_text()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--model", "gpt"], "argument --model: invalid choice: 'gpt'"),
        (["--batch", "0"], "argument --batch: must be 1 or more, got 0"),
        (["--recipes", "FP2"], "'FP2' is no recipe"),
    ],
)
def test_wrong_arguments_are_refused(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit code 2."""
    with pytest.raises(SystemExit) as stop:
        main(["memory", *words])
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


# ---- Against XLA ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BF16", "FP8", "MXFP8", "NVFP4"])
def test_saved_bytes_are_what_xla_returns_from_the_forward_pass(name: str) -> None:
    """A compiled forward pass that returns its residuals: their bytes, and a table of pointers.

    Nothing else is an output, so that there is no tolerance: each array adds 8 bytes to the table.
    """
    recipe = jax_fp4.RECIPES[name]
    for k, n in ((256, 384), (128, 512)):
        tokens = 512
        w = jax.ShapeDtypeStruct((k, n), jnp.float32)
        x = jax.ShapeDtypeStruct((tokens, k), jnp.bfloat16)

        def residuals(w: jax.Array, x: jax.Array) -> list[jax.Array]:
            _, backward = jax.vjp(lambda w, x: jax_fp4.dot(x, w, recipe=recipe), w, x)
            return jax.tree.leaves(backward)

        arrays = len(jax.eval_shape(residuals, w, x))
        analysis = jax.jit(residuals).lower(w, x).compile().memory_analysis()
        ours = memory.layer_bytes(k, n, tokens, recipe)
        assert (
            ours.saved_input + ours.backward_copy
            == analysis.output_size_in_bytes - POINTER * arrays
        )


@pytest.mark.parametrize("name", ["FP8", "MXFP8", "NVFP4"])
def test_each_layer_adds_its_saved_bytes_to_xlas_peak(name: str) -> None:
    """Temporary memory of a whole backward pass grows by the account, layer by layer.

    The peak is at the turn from forward to backward, where everything saved is alive, and what one
    layer needs for itself does not grow with their number. The tolerance is alignment: a layer adds
    six arrays (codes, scales and tensor scale, of input and weight) and the tuples of the custom
    calls that made them, ten buffers at most of up to 63 bytes too many. Gradients are reduced to a
    number where they arise, or else XLA puts temporaries into their buffers. BF16 is left out:
    XLA's CPU backend keeps bfloat16 operands as float32.
    """
    recipe, tokens, width = jax_fp4.RECIPES[name], 1024, 256

    def peak(layers: int) -> int:
        def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
            for w in ws:
                x = jax_fp4.dot(x, w, recipe=recipe, preferred_element_type=jnp.bfloat16)
            return jnp.sum(x.astype(jnp.float32) ** 2)

        def norm(ws: list[jax.Array], x: jax.Array) -> Any:
            return sum(jnp.sum(g * g) for g in jax.grad(loss)(ws, x))

        ws = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
        x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
        return jax.jit(norm).lower(ws, x).compile().memory_analysis().temp_size_in_bytes

    ours = memory.layer_bytes(width, width, tokens, recipe)
    surplus = (peak(6) - peak(3)) - 3 * (ours.saved_input + ours.backward_copy)
    assert 0 <= surplus <= 3 * 10 * (ALIGNMENT - 1)


_MESH_PROGRAM = """\
import jax, jax.numpy as jnp, jax_fp4
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("f",), axis_types=(AxisType.Auto,))
put = lambda *shape_spec: jax.ShapeDtypeStruct(
    shape_spec[0], shape_spec[1], sharding=NamedSharding(mesh, P("f")))
w, x = put((256, 384), jnp.float32), put((1024, 256), jnp.bfloat16)
def loss(w, x):
    y = jax_fp4.dot(x, w, recipe=jax_fp4.recipes.NVFP4)
    return (y.astype(jnp.float32) ** 2).sum()
step = jax.jit(jax.grad(loss, (0, 1)), out_shardings=(w.sharding, x.sharding))
print(step.lower(w, x).compile().as_text())
"""


def test_a_mesh_gathers_the_copies_of_the_account() -> None:
    """Weight and tokens on four devices: all that XLA gathers are the weight's two copies.

    Without the tensor scales, 4 bytes each, which every device has from the common amax.
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", _MESH_PROGRAM],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.findall(r"= (\(?[^=]*?\)?) all-gather(?:-start)?\(", done.stdout)
    shapes = [
        match for results in found for match in re.findall(r"([a-z]+\d+)\[([\d,]*)\]", results)
    ]
    assert {dtype for dtype, _ in shapes} == {"u8"}
    gathered = sum(math.prod(int(n) for n in dims.split(",")) for _, dims in shapes)
    ours = memory.layer_bytes(256, 384, 256, jax_fp4.recipes.NVFP4)
    assert gathered == ours.forward_copy + ours.backward_copy - 2 * 4
