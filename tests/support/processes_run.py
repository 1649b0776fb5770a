"""Trains the demo's tiny model as one process of several under `jax.distributed`.

    python processes_run.py PORT COUNT NUMBER LAYERS FOLDER

Process NUMBER of COUNT, with so many LAYERS of the model; COUNT 1 is the run to compare with.
Writes FOLDER/NUMBER.npz: the losses, and this process's shards of the quantized operands that the
first product of the first step has, forward and backward, each with the place where it lies. The
run to compare with adds the same operands computed on one device.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp4
from jax_fp4 import product
from jax_fp4.cli import corpus, training, transformer

PORT, COUNT, NUMBER, LAYERS, FOLDER = sys.argv[1:]
STEPS = 20
SIZE = dataclasses.replace(transformer.SIZES["tiny"], layers=int(LAYERS))


def spec_of(path: Any, leaf: Any) -> P:
    """FSDP over the contracted dimension, tensor parallel over the other one."""
    name = jax.tree_util.keystr(path)
    if leaf.ndim < 2:
        return P()
    return P("tensor", "fsdp") if "out" in name or "down" in name else P("fsdp", "tensor")


def first_operands(params: Any, tokens: jax.Array) -> list[Any]:
    """Quantized operands of the first block's first product and of its gradients."""
    layer = params["blocks"][0]
    x = params["embedding"][tokens[:, :-1].astype(jnp.int32)]
    x = transformer._rms_norm(x, layer["attention_norm"]).reshape(-1, SIZE.width)
    taken: list[Any] = []

    def multiply(a: Any, b: Any, *rest: Any, **keywords: Any) -> jax.Array:
        taken.extend((a, b))
        return original(a, b, *rest, **keywords)

    spec = product.Product(*product.sides(jax_fp4.recipes.NVFP4, False, "cols", "rows"), "float32")
    original, product.multiply = product.multiply, multiply
    try:
        y, saved = product._product_fwd(x[None], layer["qkv"][None], None, None, spec)
        product._product_bwd(spec, saved, y)  # the result serves as cotangent
    finally:
        product.multiply = original
    return [(q.values, q.linear_scales(), q.global_scale) for q in taken]


def main() -> None:
    if int(COUNT) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{PORT}", int(COUNT), int(NUMBER))
    devices = jax.device_count()
    tensor = 2 if devices == 4 else 1
    mesh = jax.make_mesh(
        (devices // tensor, tensor), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2
    )

    def put(x: Any, spec: P) -> jax.Array:
        whole = np.asarray(x)
        where = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])

    def placed(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda p, x: put(x, spec_of(p, x)), tree)

    text = corpus.load(None, SIZE.context + 1)
    recipe = jax_fp4.recipes.NVFP4
    step = functools.partial(training.train_step, size=SIZE, steps=STEPS, recipe=recipe)
    initial = jax.device_get(transformer.initial_params(SIZE, 0))
    zeros = jax.tree.map(np.zeros_like, initial)
    saved: dict[str, np.ndarray] = {}
    first = text.batch(0, 0, SIZE.batch, SIZE.context + 1)
    if COUNT == "1":
        for j, x in enumerate(jax.tree.leaves(jax.jit(first_operands)(initial, first))):
            saved[f"one device {j}"] = np.asarray(x)
    with jax.set_mesh(mesh):
        params, moments = placed(initial), (placed(zeros), placed(zeros))
        layout = jax.tree.map(lambda x: x.sharding, (params, moments))
        train_step = jax.jit(step, out_shardings=(*layout, NamedSharding(mesh, P())))
        losses = []
        for i in range(STEPS):
            tokens = put(text.batch(0, i, SIZE.batch, SIZE.context + 1), P("fsdp"))
            if i == 0:
                operands = jax.jit(first_operands)(params, tokens)
                for j, x in enumerate(jax.tree.leaves(operands)):
                    saved[f"shape {j}"] = np.array(x.shape)
                    for shard in x.addressable_shards:
                        place = [s.indices(n)[0] for s, n in zip(shard.index, x.shape, strict=True)]
                        saved[f"{j} at {place}"] = np.asarray(shard.data)
            params, moments, loss = train_step(params, moments, tokens, np.float32(i))
            losses.append(float(loss))
    saved["losses"] = np.array(losses)
    np.savez(Path(FOLDER) / f"{NUMBER}.npz", **saved)


if __name__ == "__main__":
    main()
