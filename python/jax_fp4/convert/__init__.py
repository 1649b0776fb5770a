"""Post-training quantization of checkpoints: what ``python -m jax_fp4 convert`` does."""
