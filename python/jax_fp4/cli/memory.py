"""`python -m jax_fp4 memory`: bytes of weights, optimizer, saved activations and gathers.

Nothing is allocated. Layers are traced at their real shapes: the copies of a weight are those that
the product makes, what is saved is what its backward pass closes over (saved_bytes.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp

import jax_fp4
from jax_fp4 import product
from jax_fp4.cli import demo
from jax_fp4.cli.saved_bytes import saved_by

DESCRIPTION = """\
Prints what a training step of a Llama 3 model keeps and moves under each recipe: computed from the
shapes, on no device. Linear layers of the blocks are quantized; embedding, head, norms and
attention are not, and what attention and norms save is not counted. Layers that share an input
(query, key and value; gate and up) save it once; nothing is recomputed in the backward pass.
"""


@dataclasses.dataclass(frozen=True)
class Model:
    """A Llama model's dimensions.

    Attributes:
        width: of the residual stream.
        layers: blocks.
        hidden: width of the MLP.
        heads: of the queries.
        kv_heads: of keys and values.
        vocabulary: rows of the embedding and columns of the head.
    """

    width: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """[K, N] of the linear layers of one block; those with the same input are one."""
        keys_and_values = 2 * self.kv_heads * (self.width // self.heads)
        return {
            "qkv": (self.width, self.width + keys_and_values),
            "out": (self.width, self.width),
            "gate_up": (self.width, 2 * self.hidden),
            "down": (self.hidden, self.width),
        }

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear layers of all blocks."""
        return self.layers * sum(k * n for k, n in self.linear.values())

    @property
    def parameters(self) -> int:
        """All weights: those, embedding, head, and the gains of the norms."""
        norms = (2 * self.layers + 1) * self.width
        return self.linear_parameters + 2 * self.vocabulary * self.width + norms


# From the config.json that Meta publishes with each model.
MODELS = {
    "llama3-8b": Model(4096, 32, 14336, 32, 8, 128256),
    "llama3-70b": Model(8192, 80, 28672, 64, 8, 128256),
    "llama3-405b": Model(16384, 126, 53248, 128, 8, 128256),
}


@dataclasses.dataclass(frozen=True)
class LayerBytes:
    """Bytes of one linear layer under a recipe.

    Attributes:
        forward_copy: of the weight, as the forward product reads it.
        backward_copy: of the weight, as the gradient of the input reads it; saved until then.
        saved_input: the layer's input, as the gradient of the weight reads it.
    """

    forward_copy: int
    backward_copy: int
    saved_input: int


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def layer_bytes(k: int, n: int, tokens: int, recipe: jax_fp4.Recipe) -> LayerBytes:
    """The account of x bfloat16 [tokens, K] times a weight float32 [K, N]."""
    x = jax.ShapeDtypeStruct((tokens, k), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((k, n), jnp.float32)

    def forward_copy(w: jax.Array) -> Any:
        return product.matrices(w[None], [(recipe.fprop_w, "rows", 0)])

    saved = saved_by(lambda w, x: jax_fp4.dot(x, w, recipe=recipe), w, x)
    return LayerBytes(
        forward_copy=_bytes(jax.eval_shape(forward_copy, w)),
        backward_copy=saved.linear_weights,
        saved_input=saved.linear_activations,
    )


def account(
    model: Model, recipe: jax_fp4.Recipe, *, batch: int, sequence: int, shards: int
) -> dict[str, int]:
    """Bytes of a training step.

    Args:
        model: the shapes.
        recipe: of all linear layers of the blocks.
        batch: sequences on one device.
        sequence: tokens of each.
        shards: devices that weights, gradients and optimizer are spread over (FSDP).

    Returns:
        Bytes by what they hold: first those of the whole model, then those of one device.
    """
    layers = [layer_bytes(k, n, batch * sequence, recipe) for k, n in model.linear.values()]
    forward = model.layers * sum(layer.forward_copy for layer in layers)
    backward = model.layers * sum(layer.backward_copy for layer in layers)
    saved_inputs = model.layers * sum(layer.saved_input for layer in layers)
    bf16, f32 = (jnp.dtype(dtype).itemsize for dtype in (jnp.bfloat16, jnp.float32))
    master = f32 * model.parameters
    moments = 2 * master

    def part(total: int) -> int:  # of one device; the first has the rest
        return -(-total // shards)

    def received(total: int) -> int:  # in a gather
        return total - total // shards

    return {
        "weights_f32": master,
        "weights_bf16": bf16 * model.parameters,
        "moments_f32": moments,
        "gradients_f32": master,
        "forward_copies": forward,
        "backward_copies": backward,
        "device_weights_gradients_moments": part(2 * master + moments),
        "device_backward_copies": part(backward),
        "device_saved_inputs": saved_inputs,
        "device_gathered_forward": received(forward),
        "device_gathered_backward": received(backward),
        "device_gradients_scattered": received(f32 * model.linear_parameters),
    }


_LABELS = {
    "weights_f32": "weights, float32 master",
    "weights_bf16": "weights, if the master were bfloat16",
    "moments_f32": "optimizer: two float32 moments",
    "gradients_f32": "gradients, float32",
    "forward_copies": "linear weights, copies for the forward pass",
    "backward_copies": "linear weights, copies for the backward pass",
    "device_weights_gradients_moments": "master, gradients and moments",
    "device_backward_copies": "copies of linear weights kept for the backward pass",
    "device_saved_inputs": "saved inputs of linear layers",
    "device_gathered_forward": "received a step: linear weights, forward",
    "device_gathered_backward": "received a step: linear weights, backward",
    "device_gradients_scattered": "sent a step: gradients of linear weights",
}
_PREFIX = "device_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--model", choices=MODELS, default="llama3-8b", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--recipes",
        type=demo.recipes,
        default=("BF16", "FP8", "NVFP4"),
        metavar="NAME,...",
        help=f"of {', '.join(jax_fp4.RECIPES)} (default: BF16,FP8,NVFP4)",
    )
    for name, value, what in (
        ("--batch", 4, "sequences on a device"),
        ("--sequence", 8192, "tokens of each"),
        ("--shards", 4, "devices that weights and optimizer are spread over"),
    ):
        parser.add_argument(
            name, type=demo.positive, default=value, metavar="N", help=f"{what} (default: {value})"
        )
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")


def _table(accounts: dict[str, dict[str, int]], arguments: argparse.Namespace) -> str:
    model, width = MODELS[arguments.model], max(map(len, _LABELS.values()))
    columns = "".join(f"{name:>12}" for name in accounts)
    lines = [
        f"{arguments.model}: {model.parameters / 1e9:.2f} G parameters, "
        f"{model.linear_parameters / 1e9:.2f} G of them in linear layers of blocks",
        "",
        f"{'whole model, GB (10^9 bytes)':{width}}{columns}",
    ]
    in_device = False
    for key, label in _LABELS.items():
        if key.startswith(_PREFIX) and not in_device:
            in_device = True
            tokens = f"{arguments.batch} x {arguments.sequence} tokens"
            head = f"each of {arguments.shards} devices, {tokens}"
            lines += ["", f"{head:{width}}{columns}"]
        values = "".join(f"{numbers[key] / 1e9:>12.2f}" for numbers in accounts.values())
        lines.append(f"{label:{width}}{values}")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Prints the table or the JSON."""
    model = MODELS[arguments.model]
    setting = {name: getattr(arguments, name) for name in ("batch", "sequence", "shards")}
    accounts = {
        name: account(model, jax_fp4.RECIPES[name], **setting) for name in arguments.recipes
    }
    if arguments.json:
        head = {"model": arguments.model, "parameters": model.parameters, **setting}
        print(json.dumps({**head, "bytes": accounts}, indent=1))
    else:
        print(_table(accounts, arguments))
    return 0
