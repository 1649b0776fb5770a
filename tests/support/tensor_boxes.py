"""Random tensor maps, and boxes that lie inside, across and outside their tensors."""

from hypothesis import strategies as st

from oracles.tensor_box import SWIZZLES, TYPES, Tensor


def extent(tensor: Tensor) -> int:
    """Bytes that the tensor spans, at most."""
    outer = sum(s * d for s, d in zip(tensor.strides, tensor.dims[1:], strict=True))
    return max(outer, tensor.dims[0] * TYPES[tensor.data_type][0] // 8)


@st.composite
def boxes(draw: st.DrawFn, stores: bool = False) -> tuple[Tensor, tuple[int, ...], int]:
    """A tensor map of any rank, type and swizzle, coordinates around its edges, and a place."""
    names = [n for n in sorted(TYPES) if not (stores and n == "16u4_align16b")]
    name = draw(st.sampled_from(names))
    bits, sixteen = TYPES[name]
    padded = sixteen * 8 != bits * 16
    swizzles = ["none", "128b", "128b_atom_32b"] if padded else sorted(SWIZZLES)
    swizzle = draw(st.sampled_from([s for s in swizzles if not (stores and "flip" in s)]))
    span = SWIZZLES[swizzle][0]
    align = 32 if padded else 16
    if padded:
        inner = 128
    elif span:
        inner = span * 8 // bits
    else:
        inner = draw(st.integers(1, min(8, 256 * bits // 128))) * 128 // bits
    unit = 128 if padded else 2 if bits == 4 else 1
    rank = draw(st.integers(1, 5))
    dims = [draw(st.integers(1, 3 if padded else 2 * inner // unit)) * unit]
    box, steps, strides = [inner], [draw(st.integers(1, 8))], []
    pitch = -(-dims[0] * bits // 8 // align) * align
    room = 40
    for _ in range(1, rank):
        dims.append(draw(st.integers(1, 7)))
        box.append(draw(st.integers(1, min(9, room))))
        room //= box[-1]
        steps.append(draw(st.integers(1, 3)))
        strides.append(pitch + draw(st.integers(0, 2)) * align)
        pitch = strides[-1] * dims[-1]
    tensor = Tensor(
        name, tuple(dims), tuple(strides), tuple(box), swizzle, tuple(steps),
        draw(st.sampled_from(["zeros", "nan"]))
        if name.startswith(("float", "bfloat")) else "zeros",
    )  # fmt: skip
    first = draw(st.integers(0 if stores else -inner // unit - 1, dims[0] // unit + 1)) * unit
    others = [
        draw(st.integers(0 if stores else -b - 1, d + 1))
        for b, d in zip(box[1:], dims[1:], strict=True)
    ]
    return tensor, (first, *others), draw(st.integers(0, 9)) * 128
