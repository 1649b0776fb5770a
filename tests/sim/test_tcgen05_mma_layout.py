"""tcgen05.mma: operands in every canonical layout, and the spellings of the instruction."""

import pytest

from support.umma_forms import (
    BF16,
    BLOCK32,
    F16,
    FP8,
    HALF,
    I8,
    MXFP4,
    MXFP8,
    NVFP4,
    TF32,
    name,
)
from support.umma_problem import Instance, Problem, with_

K_MAJOR = [("none", 0), ("32B", 0), ("64B", 0), ("64B", 1), *(("128B", s) for s in range(4))]


@pytest.mark.parametrize(("swizzle", "step"), K_MAJOR)
@pytest.mark.parametrize(
    "problem", [NVFP4, with_(MXFP8, a="e2m1", b="e2m3"), F16, with_(FP8, a="e3m2"), TF32], ids=name
)
def test_k_major(problem: Problem, swizzle: str, step: int) -> None:
    """Every swizzle, at every step along K inside a row of its pattern."""
    problem = with_(problem, swizzles=(swizzle, swizzle), step=step)
    Instance(with_(problem, n=24)).check()
    other = "64B" if swizzle != "64B" else "128B"
    if step == 0:
        Instance(with_(problem, n=24, swizzles=(swizzle, other))).check()


@pytest.mark.parametrize("majors", [("mn", "k"), ("k", "mn"), ("mn", "mn")])
@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize(
    "problem", [BF16, HALF, FP8, with_(MXFP8, a="e2m1", b="e3m2"), with_(I8, n=32)], ids=name
)
def test_mn_major(problem: Problem, swizzle: str, majors: tuple[str, str]) -> None:
    """Elements that follow each other along M or N, also with their padding."""
    Instance(with_(problem, n=problem.n * 3, majors=majors, swizzles=(swizzle, swizzle))).check()


@pytest.mark.parametrize("majors", [("mn", "k"), ("k", "mn"), ("mn", "mn")])
def test_mn_major_words(majors: tuple[str, str]) -> None:
    """32-bit elements along M or N have the swizzle with atoms of 32 bytes."""
    swizzles = tuple("128B_atom_32B" if major == "mn" else "128B" for major in majors)
    Instance(with_(TF32, n=72, majors=majors, swizzles=swizzles)).check()


@pytest.mark.parametrize("majors", [("mn", "k"), ("mn", "mn")])
@pytest.mark.parametrize("problem", [F16, MXFP8], ids=name)
def test_mn_major_in_two_ctas(problem: Problem, majors: tuple[str, str]) -> None:
    """Each CTA's part has the layout of its own."""
    Instance(with_(problem, m=256, n=96, group=2, majors=majors)).check()


FORMS = [
    (NVFP4, "kind::mxf4nvf4.block_scale.scale_vec::4X", "100a"),
    (BLOCK32, "kind::mxf4nvf4.block_scale.scale_vec::2X", "103a"),
    (BLOCK32, "block_scale.block32.kind::mxf4nvf4", "100f"),
    (MXFP4, "kind::mxf4.block_scale", "100f"),
    (MXFP4, "kind::mxf4.block_scale.scale_vec::2X", "100a"),
    (MXFP8, "kind::mxf8f6f4.block_scale", "103f"),
    (MXFP8, "kind::mxf8f6f4.block_scale.scale_vec::1X", "110a"),
    (with_(MXFP8, tensor_a=True), "kind::mxf8f6f4.block_scale", "100a"),
    (with_(MXFP8, tensor_a=True), "kind::mxf8f6f4.block_scale.scale_vec::1X", "100a"),
    (I8, "kind::i8", "110a"),
]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("problem", "form", "target"), FORMS, ids=name)
def test_spellings(problem: Problem, form: str, target: str, group: int) -> None:
    """The names of the scale sizes, defaults, and the targets that have them."""
    instance = Instance(with_(problem, m=128 * group, n=32 * group, group=group))
    instance.mma.form = form
    instance.run.target = target
    instance.run.version = "9.0" if target == "110a" else "8.8"
    instance.check()


COLLECTED = [
    *(F16, TF32, FP8, I8, MXFP8, MXFP4, NVFP4, BLOCK32),
    *(with_(form, tensor_a=True) for form in (F16, FP8, I8, MXFP8)),
    *(with_(form, disabled=(1, 2, 3, 4)) for form in (F16, FP8, I8)),
    *(with_(form, tensor_a=True, disabled=(1, 2, 3, 4)) for form in (TF32, FP8, I8)),
    with_(TF32, tensor_a=True),
    with_(NVFP4, form="kind::mxf4nvf4.block_scale.scale_vec::4X"),
    with_(MXFP4, form="kind::mxf4.block_scale.scale_vec::2X"),
    *(
        with_(MXFP8, form="kind::mxf8f6f4.block_scale.scale_vec::1X", tensor_a=tensor_a)
        for tensor_a in (False, True)
    ),
]


@pytest.mark.parametrize("problem", COLLECTED, ids=name)
def test_collector_buffer(problem: Problem) -> None:
    """A that was kept by ::fill may be used again until ::lastuse; results do not depend on it."""
    instance = Instance(with_(problem, n=32, accumulate=False))
    instance.run.mmas = [
        instance.mma.with_(form=f"{problem.form}.collector::a::{use}")
        for use in ("fill", "use", "use", "lastuse", "discard")
    ]
    instance.check()
