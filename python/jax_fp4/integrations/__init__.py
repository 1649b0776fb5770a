"""How models of other libraries run their layers in FP4: `flax`, `qwix` and `maxtext`.

None of them is imported before its module is. `LayerRules` says for all three which layers keep
jax's products.
"""

from jax_fp4.integrations.layer_rules import KEEP, LayerRules

__all__ = ["KEEP", "LayerRules"]
