"""The demo's model as a checkpoint: linear weights in bfloat16, stored [out, in] as others do.

    blocks.0.qkv.weight ... bfloat16 [N, K], what `convert` quantizes
    blocks.0.attention_norm.weight, blocks.0.mlp_norm.weight, norm.weight, embedding.weight: float32
    blocks.0.qkv.input_global_scale ... float32 [1], 2688 / amax of its input, where calibrated

`__metadata__` has the size and the text that it was trained on; `convert` passes both on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp4
from jax_fp4 import checkpoint
from jax_fp4.cli import transformer
from jax_fp4.cli.transformer import Params, Size
from jax_fp4.convert.mixed import stored_bits

_KIND = "jax_fp4 demo"
_CONVENTION = "compressed-tensors"


class ModelError(ValueError):
    """A file holds no model of the demo; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to run.

    Attributes:
        params: as `transformer.forward` takes them; linear weights [K, N], quantized or bfloat16.
        size: its dimensions.
        metadata: strings of the file: "size", "recipe" of its training, "text" (a digest).
        linear: the linear weights by name, as stored; bfloat16 or `BlockScaledArray`, [N, K].
        input_amax: static amax of the input of each linear layer, where the file has it.
    """

    params: Params
    size: Size
    metadata: dict[str, str]
    linear: dict[str, Any]
    input_amax: dict[str, np.float32]

    @property
    def linear_bytes(self) -> int:
        """Stored bytes of the linear weights, with scales."""
        return sum(map(stored_bits, self.linear.values())) // 8

    @property
    def other_bytes(self) -> int:
        """Stored bytes of embedding and norms."""
        leaves = jax.tree.leaves((self.params["embedding"], self.params["norm"]))
        for layer in self.params["blocks"]:
            leaves += [layer[name] for name in layer if name not in transformer.LINEAR]
        return sum(leaf.nbytes for leaf in leaves)

    @property
    def bits_per_weight(self) -> float:
        """Of linear weights, with scales."""
        return 8 * self.linear_bytes / sum(w.size for w in map(_logical, self.linear.values()))


def _logical(w: Any) -> Any:
    shape = (*w.values.shape[:-1], w.length) if hasattr(w, "values") else w.shape
    return np.broadcast_to(np.zeros((), np.uint8), shape)


def linear_names(size: Size) -> list[tuple[str, int, str]]:
    """(stored name without ".weight", block, layer) of the linear layers, in calling order."""
    layers = itertools.product(range(size.layers), transformer.LINEAR)
    return [(f"blocks.{i}.{layer}", i, layer) for i, layer in layers]


def tensors_of(params: Params) -> dict[str, np.ndarray]:
    """The stored form of trained weights."""
    tensors = {"embedding.weight": np.asarray(params["embedding"])}
    for i, layer in enumerate(params["blocks"]):
        for name, value in layer.items():
            if name in transformer.LINEAR:
                value = np.ascontiguousarray(np.asarray(value.astype(jnp.bfloat16)).T)
            tensors[f"blocks.{i}.{name}.weight"] = np.asarray(value)
    tensors["norm.weight"] = np.asarray(params["norm"])
    return tensors


def save(path: Path, params: Params, *, size: str, recipe: str, text: str) -> None:
    """Writes a model that was trained.

    Args:
        path: a .safetensors file.
        params: float32.
        size: a name in `transformer.SIZES`.
        recipe: that it was trained with.
        text: digest of the corpus.
    """
    save_tensors(
        path, tensors_of(params), {"model": _KIND, "size": size, "recipe": recipe, "text": text}
    )


def save_tensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Writes tensors as they are."""
    checkpoint.save(path, tensors, convention=_CONVENTION, metadata=metadata)


def load(path: Path) -> Model:
    """Reads a model: what the demo wrote, or what `convert` made of it.

    Raises:
        ModelError: the file is no such model.
        CheckpointError: it is damaged.
    """
    if not path.exists():
        raise ModelError(f"{path}: no such file; train a model with `python -m jax_fp4 demo`")
    with checkpoint.Checkpoint(path) as file:
        metadata = file.metadata
        size = transformer.SIZES.get(metadata.get("size", ""))
        if metadata.get("model") != _KIND or size is None:
            raise ModelError(
                f"{path} is no model of the demo: expected a file of its --out folder, or what "
                "`convert` made of one"
            )
        like = jax.eval_shape(lambda: transformer.initial_params(size, 0))
        tree = dict(file)
    try:
        params = _params(tree, size)
        shapes = jax.tree.map(lambda leaf: leaf.shape, params, is_leaf=_is_array)
        if shapes != jax.tree.map(lambda leaf: leaf.shape, like):
            raise ModelError(f"{path}: shapes are not those of the demo's size {metadata['size']}")
    except KeyError as error:
        raise ModelError(f"{path}: there is no tensor {error}") from None
    names = [name for name, _, _ in linear_names(size)]
    amax = {name: checkpoint.activation_amax(tree, f"{name}.weight") for name in names}
    return Model(
        params=params,
        size=size,
        metadata=metadata,
        linear={name: tree[f"{name}.weight"] for name in names},
        input_amax={name: value for name, value in amax.items() if value is not None},
    )


def _is_array(x: Any) -> bool:
    return isinstance(x, jax_fp4.BlockScaledArray)


def _params(tree: Mapping[str, Any], size: Size) -> Params:
    def kernel(w: Any) -> Any:
        """[N, K] as stored -> [K, N]; the codes of a quantized one stay where they are."""
        if _is_array(w):
            return jax.tree.map(jnp.asarray, dataclasses.replace(w, axis=-2))
        return jnp.asarray(w.T)

    def layer(i: int) -> Params:
        norms = {
            name: jnp.asarray(tree[f"blocks.{i}.{name}.weight"])
            for name in ("attention_norm", "mlp_norm")
        }
        return {
            **norms,
            **{name: kernel(tree[f"blocks.{i}.{name}.weight"]) for name in transformer.LINEAR},
        }

    return {
        "embedding": jnp.asarray(tree["embedding.weight"]),
        "blocks": [layer(i) for i in range(size.layers)],
        "norm": jnp.asarray(tree["norm.weight"]),
    }
