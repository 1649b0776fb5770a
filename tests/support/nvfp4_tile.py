"""An NVFP4 matrix product of one tile on tensor memory, by one CTA or a pair, as PTX.

    D [128 G, 128 G] f32 = A B^T, G CTAs; K in blocks of 256 elements

warp 4 copies a block of A, B and the scales into one of two stages of shared memory (tensor maps),
warp 5 copies the scales on to tensor memory and multiplies, warps 0-3 store the result.

    full[s]   copies -> warp 5: the bytes of both CTAs, in the even CTA
    empty[s]  products -> warp 4: a commit, in every CTA
    done      products -> warps 0-3: the last commit, in every CTA

Stage s:        A 128 rows x 128 bytes | B 128 rows | scales of A 2048 | scales of B 2048 G bytes
Tensor memory:  D columns 0 .. 128 G - 1 | scales of A from 256 + 16 s, of B from 288 + 32 s
Every instruction that orders something is needed; tests/mutation takes them away one by one.
Each CTA holds its rows of A, its half of B, and the scales of its rows of A and of all of B.
"""

import numpy as np

from jax_fp4 import sim

BLOCK = 256  # elements of K in a stage: 128 bytes a row
GROUPS = 4  # of 64 elements in a block: products and 512-byte atoms of scales
THREADS = 192
_OPERAND, _SCALES = 128 * 128, 512 * GROUPS
_SWIZZLED, _PLAIN = 0x4000_4040_0000_0000, 0x4008_0000_0000  # constant parts of matrix descriptors


def shared_bytes(group: int) -> int:
    return 2 * (2 * _OPERAND + _SCALES * (1 + group))


def kernel(group: int, blocks: int) -> str:
    """PTX of the entry `tile`; its parameters are the maps of A, B and their scales, and D."""
    n = 128 * group
    stage_bytes = shared_bytes(group) // 2
    places = {"a": 0, "b": _OPERAND, "sa": 2 * _OPERAND, "sb": 2 * _OPERAND + _SCALES}
    multicast = ".multicast::cluster" if group == 2 else ""
    mask = ", both" if group == 2 else ""
    barrier = (
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
        if group == 2
        else "bar.sync 0;"
    )
    pair = ".cta_group::2" if group == 2 else ""
    # The even CTA's products use what the odd CTA's warp has allocated.
    before = "tcgen05.fence::before_thread_sync;\n" if group == 2 else ""
    after = "tcgen05.fence::after_thread_sync;\n" if group == 2 else ""

    def wait(name: str, at: str, parity: int) -> str:
        return (
            f"{name}:\nmbarrier.try_wait.parity.shared::cta.b64 ok, [{at}], {parity};\n"
            f"@!ok bra {name};\n"
        )

    def load(what: str, at: str, dimensions: int, coordinates: str) -> str:
        return (
            f"cp.async.bulk.tensor.{dimensions}d.shared::cluster.global.tile"
            f".mbarrier::complete_tx::bytes{pair} [{at}], [{what}, {{{coordinates}}}], [leader];\n"
        )

    produce, multiply = "", ""
    for i in range(blocks):
        s, parity = i % 2, i // 2 % 2
        stage = {what: f"smem+{s * stage_bytes + place}" for what, place in places.items()}
        if i >= 2:
            produce += wait(f"E{i}", f"empty+{8 * s}", parity ^ 1)
        produce += (
            f"@even mbarrier.arrive.expect_tx.shared::cta.b64 _, [full+{8 * s}], "
            f"{group * stage_bytes};\nadd.u32 leader, bars, {8 * s};\n"
        )
        if group == 2:
            produce += "mapa.shared::cluster.u32 leader, leader, 0;\n"
        produce += load("map_a", stage["a"], 2, f"{BLOCK * i}, row")
        produce += load("map_b", stage["b"], 2, f"{BLOCK * i}, row")
        produce += load("map_sa", stage["sa"], 3, f"0, {GROUPS * i}, rank")
        produce += load("map_sb", stage["sb"], 3, f"0, {GROUPS * i}, 0")

        sa, sb = 256 + 16 * s, 288 + 32 * s
        multiply += wait(f"F{i}", f"full+{8 * s}", parity)
        if i >= 2:  # no tcgen05.cp follows a product by itself that has read the same columns
            multiply += "tcgen05.fence::after_thread_sync;\n"
        for what in places:
            constant = _SWIZZLED if what in "ab" else _PLAIN
            multiply += (
                f"mov.u32 x, {stage[what]};\nshr.u32 x, x, 4;\ncvt.u64.u32 d_{what}, x;\n"
                f"or.b64 d_{what}, d_{what}, {constant:#x};\n"
            )
        copy = f"tcgen05.cp.cta_group::{group}.32x128b.warpx4 [tensor+{{}}], y;\n"
        for j in range(GROUPS):
            multiply += f"add.u64 y, d_sa, {32 * j};\n" + copy.format(sa + 4 * j)
            for half in range(group):
                multiply += f"add.u64 y, d_sb, {32 * j + 128 * half};\n"
                multiply += copy.format(sb + 4 * group * j + 4 * half)
        for j in range(GROUPS):
            multiply += (
                f"setp.ne.u32 more, {i + j}, 0;\n"
                f"add.u64 y, d_a, {2 * j};\nadd.u64 z, d_b, {2 * j};\n"
                f"tcgen05.mma.cta_group::{group}.kind::mxf4nvf4.block_scale.block16 "
                f"[tensor], y, z, {group << 27 | n // 8 << 17 | 0x480:#x}, "
                f"[tensor+{sa + 4 * j}], [tensor+{sb + 4 * group * j}], more;\n"
            )
        signal = "done" if i == blocks - 1 else f"empty+{8 * s}"
        if blocks - 2 <= i < blocks - 1:
            continue  # nobody waits for this stage again
        multiply += (
            f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster"
            f"{multicast}.b64 [{signal}]{mask};\n"
        )

    addresses = "".join(
        f"mov.b64 {name}, {name}_bytes;\ncvta.param.u64 {name}, {name};\n"
        for name in ("map_a", "map_b", "map_sa", "map_sb")
    )
    registers = ", ".join(f"v{k}" for k in range(32))
    store = ""
    for column in range(0, n, 32):
        store += f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{registers}}}, [x+{column}];\n"
        store += "".join(f"st.global.b32 [out+{4 * (column + k)}], v{k};\n" for k in range(32))

    return f""".version 8.8
.target sm_100f
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry tile(.param .align 64 .b8 map_a_bytes[128],
    .param .align 64 .b8 map_b_bytes[128], .param .align 64 .b8 map_sa_bytes[128],
    .param .align 64 .b8 map_sb_bytes[128], .param .u64 result)
{{
.shared .align 8 .b64 full[2];
.shared .align 8 .b64 empty[2];
.shared .align 8 .b64 done;
.shared .align 4 .b32 slot;
.reg .pred p, ok, even, more;
.reg .b16 both;
.reg .b32 thread, warp, rank, row, tensor, leader, bars, x, v<32>;
.reg .b64 map_a, map_b, map_sa, map_sb, d_a, d_b, d_sa, d_sb, y, z, out;
mov.u32 thread, %tid.x;
shr.u32 warp, thread, 5;
mov.u32 rank, %cluster_ctarank;
shl.b32 row, rank, 7;
setp.eq.u32 even, rank, 0;
mov.u32 bars, full;
setp.ne.u32 p, thread, 0;
@p bra READY;
mbarrier.init.shared::cta.b64 [full], 1;
mbarrier.init.shared::cta.b64 [full+8], 1;
mbarrier.init.shared::cta.b64 [empty], 1;
mbarrier.init.shared::cta.b64 [empty+8], 1;
mbarrier.init.shared::cta.b64 [done], 1;
fence.mbarrier_init.release.cluster;
READY:
setp.ne.u32 p, warp, 5;
@p bra ALLOCATED;
tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [slot], 512;
ALLOCATED:
{before}{barrier}
{after}ld.shared.u32 tensor, [slot];
setp.eq.u32 p, warp, 4;
@p bra PRODUCE;
setp.eq.u32 p, warp, 5;
@p bra MULTIPLY;
{wait("D", "done", 0)}tcgen05.fence::after_thread_sync;
ld.param.u64 out, [result];
add.u32 x, row, thread;
mul.wide.u32 y, x, {4 * n};
add.u64 out, out, y;
shl.b32 x, warp, 21;
add.u32 x, x, tensor;
{store}tcgen05.wait::ld.sync.aligned;
bra END;
PRODUCE:
{addresses}elect.sync _|p, -1;
@!p bra END;
{produce}bra END;
MULTIPLY:
@!even bra END;
elect.sync _|p, -1;
@!p bra END;
mov.u16 both, 3;
{multiply}END:
tcgen05.fence::before_thread_sync;
{barrier}
tcgen05.fence::after_thread_sync;
setp.ne.u32 p, warp, 5;
@p bra OUT;
tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 tensor, 512;
OUT:
ret;
}}
"""


def scale_atoms(scales: np.ndarray) -> np.ndarray:
    """Scales [R, K/16] as [R/128, K/64] atoms: scale (r, s) at byte 16 (r%32) + 4 (r/32) + s."""
    rows, columns = scales.shape
    tiles = scales.reshape(rows // 128, 4, 32, columns // 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(rows // 128, -1, 512)


def launch(
    machine: sim.Machine,
    module: sim.Module,
    codes: tuple[np.ndarray, np.ndarray],
    scales: tuple[np.ndarray, np.ndarray],
    **options: int,
) -> np.ndarray:
    """D of A and B, uint8 codes [rows, K] with scale bytes [rows, K/16], 128 or 256 rows each."""
    rows, k = codes[0].shape
    group = rows // 128
    maps = []
    for values in codes:
        packed = np.ascontiguousarray(values[:, ::2] | values[:, 1::2] << 4)
        maps.append(
            sim.tensor_map(
                machine.address(packed), (k, rows), (k // 2,), (BLOCK, 128), "16u4_align8b", "128b"
            )
        )
    for values, tiles in zip(scales, (1, group), strict=True):
        atoms = scale_atoms(values)
        maps.append(
            sim.tensor_map(
                machine.address(atoms),
                (256, k // 64, group),
                (512, 512 * (k // 64)),
                (256, GROUPS, tiles),
                "uint16",
            )
        )
    d = np.zeros((rows, rows), np.float32)
    module.launch("tile", group, THREADS, group, shared_bytes(group), [*maps, d], **options)
    return d
