"""Loads, stores, moves, address spaces and atomics."""

import numpy as np
import pytest

from support.ptx_forms import evaluate
from support.ptx_kernel import run

TYPES = (
    "b8",
    "b16",
    "b32",
    "b64",
    "u8",
    "u16",
    "u32",
    "u64",
    "s8",
    "s16",
    "s32",
    "s64",
    "f32",
    "f64",
)


def width(kind: str) -> int:
    return int(kind[1:])


@pytest.mark.parametrize("kind", TYPES)
def test_loads_and_stores_of_every_type(kind: str) -> None:
    """ld and st move the bytes of their type; narrow signed types are extended to the register."""
    rng = np.random.default_rng(0)
    bits = width(kind)
    data = rng.integers(0, 256, 32 * bits // 8, np.uint8)
    out = np.zeros(32 * 8, np.uint8)
    register = "a2" if bits == 64 else "r2" if bits == 32 else None
    # Through a 64-bit register the extension is seen; f32 and f64 take their own width.
    wide = "a2" if kind not in ("f32",) else "r2"
    store = "st.global.b64 [a1], a2;" if wide == "a2" else "st.global.b32 [a1], r2;"
    run(
        "ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; mov.u32 r0, %tid.x;"
        f"mad.wide.u32 a0, r0, {bits // 8}, a0; mad.wide.u32 a1, r0, 8, a1; "
        f"ld.global.{kind} {wide}, [a0]; {store}",
        data,
        out,
        parameters=".param .u64 x, .param .u64 y",
    )
    assert register is None or register in ("a2", "r2")
    source = data.view({8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits])
    if kind[0] == "s":
        want = (
            source.view({8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}[bits])
            .astype(np.int64)
            .view(np.uint64)
        )
    else:
        want = source.astype(np.uint64)
    np.testing.assert_array_equal(out.view(np.uint64), want)
    back = np.zeros_like(data)
    run(
        "ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; mov.u32 r0, %tid.x; "
        "mad.wide.u32 a0, r0, 8, a0;"
        f"mad.wide.u32 a1, r0, {bits // 8}, a1; ld.global.b64 a2, [a0]; cvt.u32.u64 r2, a2; "
        f"st.global.{kind} [a1], {wide};",
        out,
        back,
        parameters=".param .u64 x, .param .u64 y",
    )
    np.testing.assert_array_equal(back, data)


SPACES = {
    "shared": (".shared .align 32 .b8 s[1024];", "mov.u32 r1, s; mad.lo.u32 r1, r0, 32, r1;", "r1"),
    "shared::cta": (
        ".shared .align 32 .b8 s[1024];",
        "mov.u32 r1, s; mad.lo.u32 r1, r0, 32, r1;",
        "r1",
    ),
    "shared::cluster": (
        ".shared .align 32 .b8 s[1024];",
        "mov.u32 r1, s; mad.lo.u32 r1, r0, 32, r1;",
        "r1",
    ),
    "local": (".local .align 32 .b8 s[32];", "mov.u64 a3, s;", "a3"),
    "global": (
        ".global .align 32 .b8 s[1024];",
        "mov.u64 a3, s; mad.wide.u32 a3, r0, 32, a3;",
        "a3",
    ),
}
SEMANTICS = [
    ("weak", "weak"),
    ("relaxed.cta", "relaxed.gpu"),
    ("acquire.cta", "release.sys"),
    ("volatile", "volatile"),
    ("", ""),
]


@pytest.mark.parametrize("space", SPACES)
def test_vectors_in_every_space(space: str) -> None:
    """v2, v4, v8 and b128, plain and with every ordering, and through generic addresses."""
    declare, address, at = SPACES[space]
    module, inside = (declare, "") if space == "global" else ("", declare)
    for load, store in SEMANTICS:
        # The PTX ISA has ordered accesses only where other threads can look.
        if load and space == "local":
            continue
        load, store = (f".{m}" if m else "" for m in (load, store))
        out = np.zeros(32 * 8, np.uint32)
        run(
            f"{inside} mov.u32 r0, %tid.x; {address} add.u32 r2, r0, 1; add.u32 r3, r0, 2; "
            "add.u32 r4, r0, 3;"
            f"st{store}.{space}.v4.b32 [{at}], {{r0, r2, r3, r4}}; "
            f"st{store}.{space}.v2.b32 [{at}+16], {{r2, r3}};"
            f"st{store}.{space}.b64 [{at}+24], 77; ld{load}.{space}.v2.b64 {{a4, a5}}, [{at}];"
            f"ld{load}.{space}.v4.u32 {{r5, r6, r7, _}}, [{at}+16];"
            "ld.param.u64 a1, [y]; mad.wide.u32 a1, r0, 32, a1; st.global.v2.b64 [a1], {a4, a5}; "
            "st.global.v4.b32 [a1+16], {r5, r6, r7, 5};",
            out,
            parameters=".param .u64 y",
            module=module,
        )
        t = np.arange(32)
        want = np.stack(
            [t, t + 1, t + 2, t + 3, t + 1, t + 2, np.full(32, 77), np.full(32, 5)], axis=1
        )
        np.testing.assert_array_equal(out.reshape(32, 8), want)


def test_256_bit_accesses_and_b128() -> None:
    """v8.b32, v4.b64, ld.b128, and mov of 128-bit registers in parts."""
    x = np.arange(32 * 8, dtype=np.uint32)
    y = np.zeros_like(x)
    run(
        "ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; mov.u32 r0, %tid.x; "
        "mad.wide.u32 a0, r0, 32, a0; mad.wide.u32 a1, r0, 32, a1;"
        "ld.global.v8.b32 {r1, r2, r3, r4, r5, r6, r7, r8}, [a0]; "
        "st.global.v8.b32 [a1], {r8, r2, r3, r4, r5, r6, r7, r1};"
        "ld.global.b128 big, [a0]; mov.b128 {a2, a3}, big; mov.b128 big, {a3, a2}; "
        "st.global.b128 [a1+16], big;",
        x,
        y,
        parameters=".param .u64 x, .param .u64 y",
    )
    a = x.reshape(32, 8)
    want = np.concatenate([a[:, 7:], a[:, 1:4], a[:, 2:4], a[:, :2]], axis=1)
    np.testing.assert_array_equal(y.reshape(32, 8), want)


@pytest.mark.parametrize(
    "kind", ["b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64"]
)
def test_moves(kind: str) -> None:
    """mov copies bits, packs and unpacks."""
    x = (
        np.random.default_rng(1)
        .integers(0, 1 << 16, 64, np.uint64)
        .astype({16: np.uint16, 32: np.uint32, 64: np.uint64}[width(kind)])
    )
    np.testing.assert_array_equal(evaluate(f"mov.{kind} {{d0}}, {{s0}};", [x], [width(kind)])[0], x)
    if kind in ("b32", "b64"):
        half = {32: np.uint16, 64: np.uint32}[width(kind)]
        bits = width(kind) // 2
        low, high = evaluate(f"mov.{kind} {{{{d0}}, {{d1}}}}, {{s0}};", [x], [bits, bits])
        np.testing.assert_array_equal(low, (x & x.dtype.type((1 << bits) - 1)).astype(half))
        (got,) = evaluate(f"mov.{kind} {{d0}}, {{{{s0}}, {{s1}}}};", [high, low], [width(kind)])
        np.testing.assert_array_equal(got, low.astype(x.dtype) << x.dtype.type(bits) | high)


def test_generic_addresses_and_their_spaces() -> None:
    """cvta, cvta.to and isspacep for every space; a generic access reaches what it names."""
    out = np.zeros(32 * 8, np.uint32)
    spaces = (
        "global",
        "shared",
        "shared::cta",
        "local",
        "const",
        "param",
        "shared::cluster",
        "param::entry",
    )
    lines = []
    for i, space in enumerate(spaces):
        source = {"global": "g", "const": "c", "local": "l", "param": "y", "param::entry": "y"}.get(
            space, "s"
        )
        cvta = space
        lines.append(
            f"mov.u64 a2, {source}; cvta.{cvta}.u64 a3, a2; cvta.to.{cvta}.u64 a4, a3; "
            f"setp.eq.u64 p, a2, a4; isspacep.{space} q, a3; and.pred p, p, q; ld.u8 r3, [a3]; "
            f"selp.u32 r2, 1, 0, p; st.global.u32 [a1+{4 * i}], r2;"
        )
    run(
        "{ .shared .b32 s; .local .b32 l; st.shared.u32 [s], 1; st.local.u32 [l], 1; "
        "ld.param.u64 a1, [y]; mov.u32 r0, %tid.x; mad.wide.u32 a1, r0, 32, a1;"
        + "\n".join(lines)
        + "}",
        out,
        parameters=".param .u64 y",
        module=".global .b32 g = 1; .const .b32 c = 2;",
    )
    np.testing.assert_array_equal(out, 1)


def test_module_variables_keep_their_initial_values() -> None:
    """Arrays, floats, nested braces, and addresses of other variables."""
    module = (
        ".const .align 4 .b32 table[4] = {1, -2, 0x3, 0b100};\n.const .f32 pi = 3.25;\n"
        ".global .align 8 .b8 bytes[3] = {7, 010, 9};\n"
        ".global .align 8 .u64 pointer = generic(bytes)+1;\n"
        ".global .b16 m[2][2] = {{1, 2}, {3, 4}};"
    )
    out = np.zeros(8, np.uint32)
    run(
        "ld.param.u64 a1, [y]; ld.const.v4.b32 {r0, r1, r2, r3}, [table]; "
        "st.global.v4.b32 [a1], {r0, r1, r2, r3};"
        "ld.const.f32 f0, [pi]; st.global.f32 [a1+16], f0; ld.global.u64 a2, [pointer]; "
        "ld.u8 r4, [a2]; st.global.u32 [a1+20], r4;"
        "ld.global.u16 r5, [m+6]; st.global.u32 [a1+24], r5; ld.global.u8 r6, [bytes+2]; "
        "st.global.u32 [a1+28], r6;",
        out,
        parameters=".param .u64 y",
        module=module,
        block=1,
    )
    assert out.tolist() == [1, 0xFFFFFFFE, 3, 4, 0x40500000, 8, 4, 9]


ATOMICS = {
    "add": (("u32", "s32", "u64", "f32", "f64"), np.add),
    "min": (("u32", "s32", "u64", "s64"), np.minimum),
    "max": (("u32", "s32", "u64", "s64"), np.maximum),
    "and": (("b32", "b64"), np.bitwise_and),
    "or": (("b32", "b64"), np.bitwise_or),
    "xor": (("b32", "b64"), np.bitwise_xor),
}
NUMPY = {
    "u32": np.uint32,
    "s32": np.int32,
    "b32": np.uint32,
    "u64": np.uint64,
    "s64": np.int64,
    "b64": np.uint64,
    "f32": np.float32,
    "f64": np.float64,
}
ORDERS = ("", ".relaxed.gpu", ".acquire.gpu", ".release.cta", ".acq_rel.sys")


@pytest.mark.parametrize(
    ("op", "kind"), [(op, kind) for op, (kinds, _) in ATOMICS.items() for kind in kinds]
)
def test_atomic_reductions(op: str, kind: str) -> None:
    """atom and red over 128 threads with every ordering, in global and shared memory."""
    rng = np.random.default_rng(4)
    dtype = NUMPY[kind]
    x = (
        rng.integers(0, 100, 128).astype(dtype)
        if kind[0] in "fub"
        else rng.integers(-50, 50, 128).astype(dtype)
    )
    want = ATOMICS[op][1].reduce(x)
    start = np.zeros(1, dtype) if op in ("add", "or", "xor") else x[:1].copy()
    if op == "and":
        start = np.full(1, -1 if kind[0] == "s" else np.iinfo(dtype).max, dtype)
    bits = width(kind)
    register = "a2" if bits == 64 else "r2"
    for order in ORDERS:
        for name in ("atom", "red"):
            if name == "red" and "acq" in order:
                continue
            cell = start.copy()
            call = (
                f"atom{order}.global.{op}.{kind} {register.replace('2', '3')}, [a1], {register};"
                if name == "atom"
                else f"red{order}.global.{op}.{kind} [a1], {register};"
            )
            run(
                "ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; mov.u32 r0, %ctaid.x; "
                "mov.u32 r1, %tid.x; mad.lo.u32 r0, r0, 64, r1;"
                f"mad.wide.u32 a0, r0, {bits // 8}, a0; ld.global.b{bits} {register}, [a0]; {call}",
                x,
                cell,
                parameters=".param .u64 x, .param .u64 y",
                grid=2,
                block=64,
            )
            assert cell[0] == want
    for space in ("", ".shared", ".shared::cta", ".shared::cluster"):
        cell = np.zeros(1, dtype)
        address = "mov.u64 a4, s; cvta.shared.u64 a4, a4;" if not space else "mov.u64 a4, s;"
        run(
            f"{{ .shared .align 8 .b64 s; ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; "
            f"mov.u32 r1, %tid.x; ld.param.u64 a5, [z]; ld.global.b{bits} {register}, [a5];"
            f"setp.eq.u32 p, r1, 0; @p st.shared.b{bits} [s], {register}; bar.sync 0; {address}"
            f"mad.wide.u32 a0, r1, {bits // 8}, a0; ld.global.b{bits} {register}, [a0];"
            f"red{space}.{op}.{kind} [a4], {register}; "
            f"atom{space}.{op}.{kind} {register.replace('2', '3')}, [a4], {register};"
            f"bar.sync 0; @p ld.shared.b{bits} {register}, [s]; "
            f"@p st.global.b{bits} [a1], {register}; }}",
            x,
            cell,
            start,
            parameters=".param .u64 x, .param .u64 y, .param .u64 z",
            block=128,
        )
        twice = ATOMICS[op][1].reduce(np.concatenate([x, x])) if op in ("add", "xor") else want
        assert cell[0] == twice


@pytest.mark.parametrize("kind", ["f16", "f16x2", "bf16", "bf16x2"])
def test_atomic_sums_of_halves(kind: str) -> None:
    """add.noftz on each half."""
    one = {"f": 0x3C00, "b": 0x3F80}[kind[0]]
    packed = kind.endswith("x2")
    cell = np.zeros(1, np.uint32 if packed else np.uint16)
    value = one << 16 | one if packed else one
    register, size = ("r2", 32) if packed else ("h0", 16)
    run(
        f"ld.param.u64 a1, [y]; mov.b{size} {register}, {value}; "
        f"red.global.add.noftz.{kind} [a1], {register};"
        f"atom.global.add.noftz.{kind} {'r3' if packed else 'h1'}, [a1], {register};",
        cell,
        parameters=".param .u64 y",
        block=16,
    )
    sum32 = {"f": 0x5000, "b": 0x4200}[kind[0]]
    assert cell[0] == (sum32 << 16 | sum32 if packed else sum32)


def test_exchange_compare_and_wrapping_counters() -> None:
    """exch, cas on 16, 32 and 64 bits, inc and dec; lanes act in lane order."""
    out = np.zeros(10, np.uint32)
    run(
        "ld.param.u64 a1, [y]; mov.u32 r0, %tid.x; atom.global.exch.b32 r1, [a1], r0; "
        "atom.global.inc.u32 r2, [a1+4], 4; red.global.inc.u32 [a1+8], 4;"
        "atom.global.dec.u32 r3, [a1+12], 6; red.global.dec.u32 [a1+16], 6; "
        "atom.global.cas.b32 r4, [a1+20], r0, 9; cvt.u64.u32 a2, r0;"
        "atom.global.exch.b64 a3, [a1+24], a2; atom.global.cas.b64 a4, [a1+32], a2, 5; "
        "cvt.u16.u32 h0, r0; atom.global.cas.b16 h1, [a1+36], h0, 3;",
        out,
        parameters=".param .u64 y",
        block=8,
    )
    # 8 increments modulo 5; 8 decrements from 0 through 6; cas hits 0, then 9 stays.
    assert out.tolist() == [7, 3, 3, 6, 6, 9, 7, 0, 5, 3]


@pytest.mark.parametrize("space", ["", ".shared", ".shared::cta", ".shared::cluster"])
@pytest.mark.parametrize("order", ORDERS)
def test_orders_and_spaces_of_the_other_atomics(order: str, space: str) -> None:
    """cas, inc, dec and sums of halves with every ordering in shared and generic memory."""
    out = np.zeros(8, np.uint32)
    address = "mov.u64 a4, s; cvta.shared.u64 a4, a4;" if not space else "mov.u64 a4, s;"
    red = (
        ""
        if "acq" in order
        else f"red{order}{space}.inc.u32 [a4], 9; red{order}{space}.add.noftz.f16x2 [a4+16], r2;"
    )
    run(
        f"{{ .shared .align 16 .b8 s[32]; ld.param.u64 a1, [y]; mov.u32 r0, 0; "
        f"mov.u32 r2, 0x3C003C00; st.shared.v4.b32 [s], {{r0, r0, r0, r0}}; "
        f"st.shared.v4.b32 [s+16], {{r0, r0, r0, r0}}; {address}"
        f"{red} atom{order}{space}.inc.u32 r3, [a4+4], 9; "
        f"atom{order}{space}.dec.u32 r3, [a4+8], 9; atom{order}{space}.cas.b32 r3, [a4+12], 0, 6;"
        f"atom{order}{space}.add.noftz.f16x2 r3, [a4+20], r2; "
        f"ld.shared.v4.b32 {{r4, r5, r6, r7}}, [s]; st.global.v4.b32 [a1], {{r4, r5, r6, r7}};"
        "ld.shared.v2.b32 {r4, r5}, [s+16]; st.global.v2.b32 [a1+16], {r4, r5}; }",
        out,
        parameters=".param .u64 y",
        block=1,
    )
    assert out.tolist() == [int(bool(red)), 1, 9, 6, 0x3C003C00 if red else 0, 0x3C003C00, 0, 0]


def test_cluster_addresses() -> None:
    """mapa names the same variable of another CTA; getctarank tells whose it is."""
    out = np.zeros((2, 4), np.uint32)
    report = run(
        "{ .shared .b32 s; mov.u32 r0, %cluster_ctarank; add.u32 r1, r0, 40; "
        "st.shared.u32 [s], r1; barrier.cluster.arrive.release.aligned; "
        "barrier.cluster.wait.acquire.aligned;"
        "xor.b32 r2, r0, 1; mov.u32 r3, s; mapa.shared::cluster.u32 r4, r3, r2; "
        "ld.shared::cluster.u32 r5, [r4]; getctarank.shared::cluster.u32 r6, r4;"
        "cvta.shared.u64 a2, s; mapa.u64 a3, a2, r2; ld.u32 r7, [a3]; getctarank.u64 r8, a3; "
        "barrier.cluster.arrive; barrier.cluster.wait;"
        "ld.param.u64 a1, [y]; mad.wide.u32 a1, r0, 16, a1; "
        "st.global.v4.b32 [a1], {r5, r6, r7, r8}; }",
        out,
        parameters=".param .u64 y",
        grid=2,
        cluster=2,
        block=32,
    )
    assert out.tolist() == [[41, 1, 41, 1], [40, 0, 40, 0]]
    assert report.bytes_read["shared::cluster"] > 0


def test_hints_change_nothing_but_need_an_address() -> None:
    """Cache hints, prefetch, discard and applypriority."""
    x = np.arange(64, dtype=np.uint32)
    y = np.zeros(64, np.uint32)
    run(
        "ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; prefetch.global.L1 [a0]; "
        "prefetch.global.L2 [a0]; prefetch.L2 [a0]; prefetch.global.L2::evict_last [a0];"
        "prefetch.global.L2::evict_normal [a0]; prefetchu.L1 [a0]; "
        "applypriority.global.L2::evict_normal [a0], 128; "
        "applypriority.L2::evict_normal [a0], 128;"
        "discard.global.L2 [a1], 128; discard.L2 [a1], 128; { .local .b32 l; mov.u64 a3, l; "
        "prefetch.local.L1 [a3]; }"
        "mov.u32 r0, %tid.x; mad.wide.u32 a0, r0, 8, a0; mad.wide.u32 a1, r0, 8, a1; "
        "mov.b64 a2, 0x12F0000000000000;"
        "ld.global.nc.L1::no_allocate.L2::evict_last.L2::cache_hint.v2.u32 {r1, r2}, [a0], a2; "
        "st.global.L1::evict_first.cs.v2.u32 [a1], {r1, r2};",
        x,
        y,
        parameters=".param .u64 x, .param .u64 y",
    )
    np.testing.assert_array_equal(x, y)


def test_mmio_and_generic_forms() -> None:
    """ld.mmio and st.mmio, ld and st without a space, of parameters of functions."""
    out = np.zeros(32, np.uint32)
    run(
        "ld.param::entry.u64 a1, [y]; mov.u32 r0, %tid.x; mad.wide.u32 a1, r0, 4, a1; "
        "st.mmio.sys.global.u32 [a1], r0; ld.mmio.sys.global.u32 r1, [a1];"
        "add.u32 r1, r1, 1; st.u32 [a1], r1; ld.u32 r2, [a1]; { .param .b32 q0; "
        "st.param::func.b32 [q0], r2; ld.param::func.b32 r3, [q0]; st.u32 [a1], r3; }",
        out,
        parameters=".param .u64 y",
    )
    np.testing.assert_array_equal(out, np.arange(32) + 1)
