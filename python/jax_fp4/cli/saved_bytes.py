"""How many bytes a forward pass keeps for the backward pass, read off JAX's own linearization.

`jax.vjp` is traced, not run; what its backward function closes over is what is saved. Each saved
array counts once, and the arguments (the float32 weights, the input) do not count: they are there
anyway.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

import jax_fp4
from jax_fp4.cli import transformer
from jax_fp4.cli.transformer import Size
from jax_fp4.product import RESIDUAL_NAME


@dataclasses.dataclass(frozen=True)
class SavedBytes:
    """Bytes saved for one backward pass.

    Attributes:
        linear_activations: inputs of the linear layers, as their weight gradients will read them.
        linear_weights: weights, as the gradients of the inputs will read them.
        other_activations: norms, attention, GELU; the same work under every recipe.
    """

    linear_activations: int
    linear_weights: int
    other_activations: int


def saved_by(function: Callable[[Any, jax.Array], jax.Array], params: Any, x: Any) -> SavedBytes:
    """What the backward pass of ``function(params, x)`` keeps.

    Args:
        function: its linear layers are those of jax_fp4.
        params: a pytree of arrays or shapes.
        x: the activations that go in, an array or a shape.
    """

    def residuals(params: Any, x: jax.Array) -> list[Any]:
        _, backward = jax.vjp(function, params, x)
        return jax.tree.leaves(backward)

    jaxpr = jax.make_jaxpr(residuals)(params, x).jaxpr
    x_variable = jaxpr.invars[-1]
    depends: dict[Any, bool] = {v: v is x_variable for v in jaxpr.invars}  # on x
    named: set[Any] = set()
    for equation in jaxpr.eqns:
        inputs = [v for v in equation.invars if not isinstance(v, Literal)]
        for variable in equation.outvars:
            depends[variable] = any(depends.get(v, False) for v in inputs)
            if equation.primitive.name == "name" and equation.params["name"] == RESIDUAL_NAME:
                named.add(variable)

    totals = {"linear_activations": 0, "linear_weights": 0, "other_activations": 0}
    saved = dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, Literal))
    for variable in saved.keys() - set(jaxpr.invars):
        aval: Any = variable.aval
        kind = "linear" if variable in named else "other"
        of_what = "activations" if depends[variable] else "weights"
        if kind == "other" and of_what == "weights":
            continue  # constants of the model, such as rotary angles and the causal mask
        totals[f"{kind}_{of_what}"] += math.prod(aval.shape) * aval.dtype.itemsize
    return SavedBytes(**totals)


def saved_bytes(size: Size, recipe: jax_fp4.Recipe) -> SavedBytes:
    """The account of all blocks of the demo's model under ``recipe``, for one step."""
    layer = jax.eval_shape(lambda: transformer.initial_params(size, 0)["blocks"][0])
    x = jax.ShapeDtypeStruct((size.batch, size.context, size.width), jnp.float32)
    linear = transformer.Linear(recipe)
    one = saved_by(lambda p, x: transformer.block(p, x, size, linear)[0], layer, x)
    totals = {name: size.layers * total for name, total in dataclasses.asdict(one).items()}
    return SavedBytes(**totals)
