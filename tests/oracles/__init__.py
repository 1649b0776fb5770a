"""What the project's numbers must be, computed a second way.

Nothing here imports the project, jax or ml_dtypes: only the standard library and NumPy. The
modules are written from the formats' specifications (value tables, searches over midpoints, exact
integers), not from `csrc/numerics` (bit arithmetic), so that one mistake cannot be in both.

    tables     value of every code; rounding to a table; bf16 and f16 on integers
    quantizer  amax, scales and codes of every format, and dequantization
    pack       how codes are packed in rows, and the 128x4 scale layout
    gemm       exact block-scaled products with an error bound per element
    mma        the tensor core's accumulation model, on integers
    training   the three matrix products of the NVFP4 training recipe
"""
