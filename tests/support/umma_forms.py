"""The kinds of tcgen05.mma as problems, with M = 128 and N = 16."""

from support.umma_problem import Problem, with_

NVFP4 = Problem("kind::mxf4nvf4.block_scale.block16", "e2m1", "e2m1", scale="ue4m3", scales=4)
NVFP4_UE8M0 = with_(NVFP4, scale="ue8m0")
BLOCK32 = Problem("kind::mxf4nvf4.block_scale.block32", "e2m1", "e2m1", scale="ue8m0", scales=2)
MXFP4 = with_(BLOCK32, form="kind::mxf4.block_scale.block32")
MXFP8 = Problem("kind::mxf8f6f4.block_scale.block32", "e4m3", "e5m2", scale="ue8m0", scales=1)
F16 = Problem("kind::f16", "f16", "f16")
BF16 = Problem("kind::f16", "bf16", "bf16")
HALF = with_(F16, result="f16")
TF32 = Problem("kind::tf32", "tf32", "tf32")
FP8 = Problem("kind::f8f6f4", "e4m3", "e5m2")
FP8_HALF = with_(FP8, result="f16")
I8 = Problem("kind::i8", "s8", "u8", result="s32")

SCALED = (NVFP4, NVFP4_UE8M0, BLOCK32, MXFP4, MXFP8)
PLAIN = (F16, BF16, HALF, TF32, FP8, FP8_HALF, I8)


def name(problem: object) -> str:
    """A short name, for test ids."""
    if not isinstance(problem, Problem):
        return str(problem)
    kind = problem.form.removeprefix("kind::").replace(".block_scale", "")
    return f"{kind}-{problem.a}-{problem.b}-{problem.scale or problem.result}"
