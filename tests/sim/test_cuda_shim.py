"""The simulated CUDA driver runs work as a driver does: contexts, memory, launches, streams."""

import ctypes
import threading

import numpy as np
import pytest

from support import stand_in
from support.stand_in import RESULT, Driver, DriverError

HEADER = ".version 8.8\n.target {target}\n.address_size 64\n"
ADD = """
.visible .entry k(.param .u64 x, .param .u64 y, .param .u32 n)
{
    .reg .pred p; .reg .b32 r<5>; .reg .b64 a<5>; .reg .f32 f<4>;
    mov.u32 r0, %ctaid.x; mov.u32 r1, %ntid.x; mov.u32 r2, %tid.x; mad.lo.u32 r3, r0, r1, r2;
    ld.param.u32 r4, [n];
    setp.ge.u32 p, r3, r4;
    @p ret;
    ld.param.u64 a0, [x]; ld.param.u64 a1, [y];
    mul.wide.u32 a2, r3, 4; add.u64 a3, a0, a2; add.u64 a4, a1, a2;
    ld.global.f32 f0, [a3]; ld.global.f32 f1, [a4]; add.rn.f32 f2, f0, f1; st.global.f32 [a4], f2;
    ret;
}
"""
# Adds 1 to a number in memory, and multiplies it by 3: their order shows.
STEPS = """
.global .align 4 .u32 counter = 5;
.visible .entry add1(.param .u64 x)
{ .reg .b64 a; .reg .b32 r; ld.param.u64 a, [x];
  ld.global.u32 r, [a]; add.u32 r, r, 1; st.global.u32 [a], r; ret; }
.visible .entry times3(.param .u64 x)
{ .reg .b64 a; .reg .b32 r; ld.param.u64 a, [x];
  ld.global.u32 r, [a]; mul.lo.u32 r, r, 3; st.global.u32 [a], r; ret; }
.visible .entry shape(.param .u64 x)
{ .reg .b64 a; .reg .b32 r; ld.param.u64 a, [x];
  mov.u32 r, %cluster_nctaid.x; st.global.u32 [a], r;
  mov.u32 r, %nsmid; st.global.u32 [a+4], r;
  mov.u32 r, %dynamic_smem_size; st.global.u32 [a+8], r; ret; }
"""


def ptx(body: str, target: str = "sm_100a") -> str:
    return HEADER.format(target=target) + body


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.start()
    return driver


def test_vector_add_runs_end_to_end(driver: Driver) -> None:
    """y += x over a ragged grid, from cuInit to the copy back, is NumPy's sum bit for bit."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 1000)).astype(np.float32)
    at_x, at_y = driver.upload(x), driver.upload(y)
    driver.launch(
        driver.function(ptx(ADD)), at_x, at_y, ctypes.c_uint32(1000), grid=(8, 1, 1),
        block=(128, 1, 1),
    )  # fmt: skip
    driver.synchronize()
    np.testing.assert_array_equal(driver.download(at_y, y), x + y)
    assert driver.warnings() == []


def test_parameters_may_come_as_one_block(driver: Driver) -> None:
    """`extra` hands over the bytes of all parameters; a block that is too short is refused."""
    x = np.ones(32, np.float32)
    at_x, at_y = driver.upload(x), driver.upload(x)
    function = driver.function(ptx(ADD))
    block = np.array([at_x, at_y, 32], np.uint64)
    for size, code in ((24, None), (20, None), (19, stand_in.INVALID_VALUE)):
        bytes_ = ctypes.c_size_t(size)
        extra = (ctypes.c_void_p * 5)(1, block.ctypes.data, 2, ctypes.addressof(bytes_), None)
        arguments = (ctypes.byref(stand_in.config()), function, None, extra)
        if code is None:
            driver.call("cuLaunchKernelEx", *arguments)
        else:
            with pytest.raises(DriverError, match="takes 20 bytes of parameters, got 19") as error:
                driver.call("cuLaunchKernelEx", *arguments)
            assert error.value.code == code
    np.testing.assert_array_equal(driver.download(at_y, x), 3 * x)


def test_work_of_a_stream_is_done_in_order(driver: Driver) -> None:
    """((0 + 1) * 3 + 1) * 3, also where launches are programmatic, and a fill starts it again."""
    module = driver.load(ptx(STEPS).encode())
    add1, times3 = (driver.handle("cuModuleGetFunction", module, n) for n in (b"add1", b"times3"))
    zero = np.zeros(1, np.uint32)
    for options in ({}, {"programmatic": 1}, {"number_8": 3}):
        for flags in (0, 1):
            stream = driver.handle("cuStreamCreate", flags)
            address = driver.upload(zero, stream)
            for function in (add1, times3, add1, times3):
                driver.launch(function, address, stream=stream, block=(1, 1, 1), **options)
            assert driver.download(address, zero, stream) == 12
            driver.launch(add1, address, stream=stream, block=(1, 1, 1))
            driver.call("cuMemsetD8Async", address, 1, 4, stream)
            driver.launch(add1, address, stream=stream, block=(1, 1, 1))
            driver.call("cuStreamDestroy", stream)
            assert driver.download(address, zero) == 0x01010102


def test_programmatic_launches_overlap(driver: Driver) -> None:
    """A dependent kernel that does not wait races; without the attribute it need not wait."""
    body = (
        ".visible .entry k(.param .u64 x)\n{ .reg .b64 a; .reg .b32 r; ld.param.u64 a, [x];"
        " griddepcontrol.launch_dependents;\n%s\n"
        " ld.global.u32 r, [a]; add.u32 r, r, 1; st.global.u32 [a], r; ret; }"
    )
    racing, waiting = (driver.function(ptx(body % w)) for w in ("", "griddepcontrol.wait;"))
    zero = np.zeros(1, np.uint32)
    for function, programmatic in ((racing, 0), (waiting, 1)):
        address = driver.upload(zero)
        for _ in range(5):
            driver.launch(function, address, block=(1, 1, 1), programmatic=programmatic)
        assert driver.download(address, zero) == 5
    for _ in range(2):
        driver.launch(racing, address, block=(1, 1, 1), programmatic=1)
    with pytest.raises(DriverError, match=r"race: .*griddepcontrol\.wait") as error:
        driver.synchronize()
    assert error.value.code == stand_in.LAUNCH_FAILED


def test_legacy_stream_waits_for_blocking_streams_and_they_for_it(driver: Driver) -> None:
    """add1 on one stream and times3 on the other: the order of the calls holds."""
    module = driver.load(ptx(STEPS).encode())
    add1, times3 = (driver.handle("cuModuleGetFunction", module, n) for n in (b"add1", b"times3"))
    stream = driver.handle("cuStreamCreate", 0)
    zero = np.zeros(1, np.uint32)
    for first, second in ((0, stream), (stream, 0), (2, 1), (1, 2)):
        address = driver.upload(zero)
        driver.launch(add1, address, stream=first, block=(1, 1, 1))
        driver.launch(times3, address, stream=second, block=(1, 1, 1))
        driver.synchronize(second)
        assert driver.download(address, zero) == 3


def test_launch_attributes_reach_the_kernel(driver: Driver) -> None:
    """The cluster, the multiprocessors of the device attribute, the dynamic shared memory."""
    module = driver.load(ptx(STEPS).encode())
    function = driver.handle("cuModuleGetFunction", module, b"shape")
    out = np.zeros(3, np.uint32)
    address = driver.upload(out)
    driver.launch(function, address, grid=(4, 1, 1), cluster=(4, 1, 1), shared_bytes=512)
    processors = driver.integer("cuDeviceGetAttribute", 16, 0)
    assert driver.download(address, out).tolist() == [4, processors, 512]


def test_module_variables_have_addresses(driver: Driver) -> None:
    """cuModuleGetGlobal gives place and size; an unloaded module's place is no memory any more."""
    module = driver.load(ptx(STEPS).encode())
    size = ctypes.c_size_t()
    address = driver.handle("cuModuleGetGlobal", ctypes.byref(size), module, b"counter")
    value = np.zeros(1, np.uint32)
    assert size.value == 4
    assert driver.download(address, value) == 5
    with pytest.raises(DriverError, match=r"no \.global variable 'other'"):
        driver.handle("cuModuleGetGlobal", ctypes.byref(size), module, b"other")
    driver.call("cuModuleUnload", module)
    with pytest.raises(DriverError, match="no device memory"):
        driver.download(address, value)


def test_devices_have_the_attributes_of_their_chips() -> None:
    """Capability, shared memory and cluster support follow the chip (CUDA programming guide)."""
    chips = {
        "80": (8, 0, 166912, 0), "89": (8, 9, 101376, 0), "90a": (9, 0, 232448, 1),
        "100a": (10, 0, 232448, 1), "103a": (10, 3, 232448, 1), "110a": (11, 0, 232448, 1),
        "120a": (12, 0, 101376, 1), "121a": (12, 1, 101376, 1),
    }  # fmt: skip
    driver = Driver(",".join(chips))
    driver.call("cuInit", 0)
    assert driver.integer("cuDeviceGetCount") == len(chips)
    for ordinal, (chip, expected) in enumerate(chips.items()):
        device = driver.integer("cuDeviceGet", ordinal)
        got = [driver.integer("cuDeviceGetAttribute", a, device) for a in (75, 76, 97, 120)]
        assert tuple(got) == expected, chip
        name = ctypes.create_string_buffer(64)
        driver.call("cuDeviceGetName", name, 64, device)
        assert name.value.decode() == f"PTX machine sm_{chip}"
        assert driver.get(ctypes.c_size_t, "cuDeviceTotalMem", device) == 1 << 30
    driver.call("cuDeviceGetName", name, 5, device)
    assert name.value == b"PTX "


def test_functions_have_attributes(driver: Driver) -> None:
    """Threads, shared, constant and local bytes, versions and cluster come from the PTX."""
    function = driver.function(
        ptx(
            ".const .align 4 .b8 table[12];"
            ".visible .entry k() .maxntid 64, 2, 1 .reqnctapercluster 2, 1, 1\n"
            "{ .shared .align 4 .b8 s[100]; .local .align 4 .b8 l[32]; .reg .b32 r;"
            " mov.u32 r, l; mov.u32 r, s; ret; }"
        )
    )
    get = {a: driver.integer("cuFuncGetAttribute", a, function) for a in (*range(4), 5, 6, 7, 8)}
    assert get == {0: 128, 1: 100, 2: 12, 3: 32, 5: 100, 6: 100, 7: 0, 8: 49152 - 100}
    assert [driver.integer("cuFuncGetAttribute", a, function) for a in range(10, 15)] == [
        0, 2, 1, 1, 0,
    ]  # fmt: skip
    driver.call("cuFuncSetAttribute", function, 8, 232448 - 100)
    driver.call("cuFuncSetAttribute", function, 14, 1)
    driver.call("cuFuncSetAttribute", function, 9, 100)
    assert driver.integer("cuFuncGetAttribute", 8, function) == 232448 - 100
    assert driver.integer("cuFuncGetAttribute", 14, function) == 1


def test_occupancy_is_what_fits(driver: Driver) -> None:
    """16 multiprocessors of 4 CTAs at most, fewer where threads or shared memory run out."""
    function = driver.function(ptx(ADD))
    driver.call("cuFuncSetAttribute", function, 8, 232448)

    def clusters(**options: object) -> int:
        shape = stand_in.config(grid=(16, 1, 1), **options)
        return driver.integer("cuOccupancyMaxActiveClusters", function, ctypes.byref(shape))

    assert clusters() == 64
    assert clusters(cluster=(8, 1, 1)) == 8
    assert clusters(block=(1024, 1, 1)) == 32
    assert clusters(shared_bytes=232448) == 16
    assert clusters(shared_bytes=232448, cluster=(8, 1, 1)) == 2
    blocks = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    # 228 KiB hold two CTAs of 113 KiB and the KiB that each has reserved, and none more.
    for shared, expected in ((0, 4), (113 * 1024, 2), (113 * 1024 + 1, 1)):
        assert driver.integer(blocks, function, 128, shared) == expected


def test_contexts_belong_to_threads_and_devices() -> None:
    """Each thread has a stack of contexts; each device one primary context, counted."""
    driver = Driver("100a,120a")
    first = driver.start(0)
    second = driver.handle("cuDevicePrimaryCtxRetain", 1)
    assert first != second
    assert driver.handle("cuDevicePrimaryCtxRetain", 1) == second
    driver.call("cuCtxPushCurrent", second)
    assert driver.integer("cuCtxGetDevice") == 1
    stream = driver.handle("cuStreamCreate", 0)
    assert driver.handle("cuStreamGetCtx", stream, RESULT) == second
    assert driver.handle("cuStreamGetCtx", 0, RESULT) == second
    assert driver.handle("cuCtxPopCurrent") == second
    assert driver.handle("cuCtxGetCurrent") == first
    assert driver.handle("cuStreamGetCtx", stream, RESULT) == second

    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(driver.handle("cuCtxGetCurrent")))
    thread.start()
    thread.join()
    assert seen == [0]

    driver.call("cuDevicePrimaryCtxRelease", 1)
    assert driver.handle("cuStreamGetCtx", stream, RESULT) == second
    driver.call("cuDevicePrimaryCtxRelease", 1)
    with pytest.raises(DriverError, match="no live stream"):
        driver.handle("cuStreamGetCtx", stream, RESULT)
    assert driver.handle("cuDevicePrimaryCtxRetain", 1) not in (first, second)


def test_two_threads_use_two_devices() -> None:
    """Handles of one context do not work in the other, and results stay apart."""
    driver = Driver("100a,100a")
    driver.call("cuInit", 0)
    errors: list[BaseException] = []

    def work(device: int) -> None:
        try:
            driver.start(device)
            function = driver.function(ptx(ADD))
            for step in range(10):
                x = np.full(64, device * 100 + step, np.float32)
                at_x, at_y = driver.upload(x), driver.upload(x)
                driver.launch(function, at_x, at_y, ctypes.c_uint32(64), block=(64, 1, 1))
                np.testing.assert_array_equal(driver.download(at_y, x), 2 * x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(device,)) for device in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []

    driver.start(0)
    function = driver.function(ptx(ADD))
    address = driver.upload(np.zeros(4, np.float32))
    driver.start(1)
    with pytest.raises(
        DriverError, match="context of device 0, the stream is of device 1"
    ) as error:
        driver.launch(function, address, address, ctypes.c_uint32(4))
    assert error.value.code == stand_in.INVALID_HANDLE
    with pytest.raises(DriverError, match="no device memory"):
        driver.download(address, np.zeros(4, np.float32))


def test_host_buffers_can_be_device_memory(driver: Driver) -> None:
    """A mapped buffer is read and written in place; unmapping waits for the work that uses it."""
    context = driver.handle("cuCtxGetCurrent")
    x, y = np.arange(64, dtype=np.float32), np.ones(64, np.float32)
    at = [
        driver.functions.jax_fp4_sim_map(
            ctypes.c_uint64(context), b"buffer", stand_in.pointer(a), ctypes.c_uint64(a.nbytes),
            writable, 1,
        )
        for a, writable in ((x, 0), (y, 1))
    ]  # fmt: skip
    driver.launch(driver.function(ptx(ADD)), *at, ctypes.c_uint32(64), block=(64, 1, 1))
    for address in at:
        assert driver.functions.jax_fp4_sim_unmap(
            ctypes.c_uint64(context), ctypes.c_uint64(address)
        )
    np.testing.assert_array_equal(y, 1 + x)
    assert not driver.functions.jax_fp4_sim_unmap(ctypes.c_uint64(context), ctypes.c_uint64(at[0]))


def test_copies_between_device_buffers(driver: Driver) -> None:
    """Bytes move, and so does the knowledge which of them were ever written."""
    x = np.arange(8, dtype=np.uint32)
    source, target = driver.upload(x), driver.handle("cuMemAlloc", 32)
    driver.call("cuMemcpyDtoDAsync", target + 8, source, 24, 0)
    assert driver.download(target, x)[2:].tolist() == x[:6].tolist()
    assert len(driver.warnings()) == 1
    assert "nothing has written 8" in driver.warnings()[0]


def test_functions_are_found_by_name(driver: Driver) -> None:
    """cuGetProcAddress takes names without version and gives functions that work."""
    status = ctypes.c_int(9)
    for name in (b"cuMemAlloc", b"cuTensorMapEncodeTiled", b"cuDeviceGetCount"):
        driver.handle("cuGetProcAddress", name, RESULT, 12000, 0, ctypes.byref(status))
        assert status.value == 0
        status.value = 9
    address = driver.handle("cuGetProcAddress", b"cuDeviceGetCount", RESULT, 12000, 0, None)
    count = ctypes.c_int()
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address)(ctypes.addressof(count)) == 0
    assert count.value == 1
    with pytest.raises(DriverError, match="has no 'cuMemAl'") as error:
        driver.handle("cuGetProcAddress", b"cuMemAl", RESULT, 12000, 0, ctypes.byref(status))
    assert (error.value.code, status.value) == (stand_in.NOT_FOUND, 1)


def test_tensor_maps_are_encoded_as_the_machine_reads_them(driver: Driver) -> None:
    """The driver's function gives the bytes of sim.tensor_map, and refuses what that refuses."""
    from jax_fp4 import sim

    raw = np.zeros(256, np.uint8)
    aligned = raw[-raw.ctypes.data % 64 :][:128]
    arrays = [
        np.array(a, t) for a, t in (([64, 48], np.uint64), ([128], np.uint64),
                                    ([32, 8], np.uint32), ([1, 1], np.uint32))
    ]  # fmt: skip

    def encode(target: np.ndarray, box: int) -> None:
        arrays[2][0] = box
        driver.call(
            "cuTensorMapEncodeTiled", stand_in.pointer(target), 9, 2, 1 << 36,
            *map(stand_in.pointer, arrays), 0, 2, 0, 0,
        )  # fmt: skip

    encode(aligned, 32)
    assert aligned.tobytes() == sim.tensor_map(
        1 << 36, dims=[64, 48], strides=[128], box=[32, 8], data_type="bfloat16", swizzle="64b"
    )
    for target, box, complaint in (
        (aligned, 36, r"boxDim\[0\]: expected a multiple of 8"),
        (raw[-raw.ctypes.data % 64 + 32 :], 32, "tensorMap: .*multiple of 64"),
    ):
        with pytest.raises(DriverError, match=complaint) as error:
            encode(target, box)
        assert error.value.code == stand_in.INVALID_VALUE
