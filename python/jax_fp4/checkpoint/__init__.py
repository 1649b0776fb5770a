"""Quantized checkpoints in safetensors files, as other programs write and read them.

    tree = checkpoint.load("model")          # or Checkpoint("model"), which reads what is asked for
    checkpoint.save("out", tree, convention="compressed-tensors")

docs/checkpoints.md has the conventions and the command that quantizes a checkpoint.
"""

from jax_fp4.checkpoint.conventions import CONVENTIONS, fill_zero_scales
from jax_fp4.checkpoint.fused import activation_amax, fuse
from jax_fp4.checkpoint.header import CheckpointError
from jax_fp4.checkpoint.reading import Checkpoint, load
from jax_fp4.checkpoint.writing import save

__all__ = [
    "CONVENTIONS",
    "Checkpoint",
    "CheckpointError",
    "activation_amax",
    "fill_zero_scales",
    "fuse",
    "load",
    "save",
]
