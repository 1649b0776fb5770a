"""The simulated CUDA driver refuses what a driver refuses, and says why."""

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support import stand_in
from support.repository import ROOT
from support.stand_in import RESULT, Driver, DriverError

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
REGISTERS = "{ .reg .b64 a; .reg .b32 r; .reg .pred p; ld.param.u64 a, [x];\n"


def kernel(body: str, directives: str = "") -> str:
    """Entry k(x, n); the body starts on line 5."""
    entry = ".visible .entry k(.param .u64 x, .param .u32 n) "
    return HEADER + entry + directives + REGISTERS + body + "\nret; }\n"


STORE = kernel("mov.u32 r, %tid.x; st.global.u32 [a], r;")
ONE = ctypes.c_uint32(1)


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.start()
    return driver


def fails(code: int, complaint: str, call: Callable[[], Any]) -> None:
    with pytest.raises(DriverError, match=complaint) as error:
        call()
    assert error.value.code == code
    assert str(error.value).startswith(f"{error.value.function} gave CUDA_ERROR_")


FUNCTIONS = sorted(
    set(
        re.findall(
            r'visit\("\w+",\s*api\.(\w+)\)',
            (ROOT / "csrc/driver/cuda_api.h").read_text()
            + (ROOT / "csrc/sim/cuda_shim.h").read_text(),
        )
    )
)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_can_be_made_to_fail(function: str, driver: Driver) -> None:
    """The injected code comes back with the function's name, and nothing else happens."""
    driver.inject(function, 1, 999)
    complaint = rf"^{function} gave CUDA_ERROR_UNKNOWN \(999\): this error was asked for"
    with pytest.raises(DriverError, match=complaint):
        driver.call(function, *[0] * 12)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_need_cuinit(function: str) -> None:
    """All but the ones that explain a driver fail before cuInit."""
    driver = Driver()
    if function in {"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"}:
        driver.handle("cuGetErrorName", 700, RESULT)
    elif function != "cuGetProcAddress":
        fails(
            stand_in.NOT_INITIALIZED,
            "cuInit must be called first",
            lambda: driver.call(function, *[0] * 12),
        )


def test_the_nth_call_can_be_made_to_fail(driver: Driver) -> None:
    """Third call: two pass, one fails, the rest pass; 0: every call fails."""
    driver.inject("cuDeviceGetCount", 3, 46)
    outcome = []
    for _ in range(5):
        try:
            outcome.append(driver.integer("cuDeviceGetCount"))
        except DriverError as error:
            outcome.append(error.code)
    assert outcome == [1, 1, 46, 1, 1]
    driver.inject("cuDeviceGetCount", 0, 2)
    for _ in range(3):
        fails(2, "asked for", lambda: driver.integer("cuDeviceGetCount"))
    with pytest.raises(ValueError, match=r"expected one of cuInit, .*got 'cuNothing'"):
        driver.inject("cuNothing", 1, 1)


@pytest.mark.parametrize("code", [0, 1, 2, 100, 209, 218, 700, 719, 900, 912, 999])
def test_codes_have_names_and_texts(code: int) -> None:
    """Known codes have both; an unknown one has none."""
    driver = Driver()
    for function in ("cuGetErrorName", "cuGetErrorString"):
        text = ctypes.c_char_p()
        driver.call(function, code, ctypes.byref(text))
        assert text.value
        with pytest.raises(DriverError, match="12345 is no code"):
            driver.call(function, 12345, ctypes.byref(text))
        assert text.value is None


@pytest.mark.parametrize(
    ("body", "code", "line", "complaint"),
    [
        ("st.global.u32 [a+4], 1;", stand_in.ILLEGAL_ADDRESS, 5, "outside every buffer"),
        ("st.global.u32 [a+2], 1;", stand_in.MISALIGNED_ADDRESS, 5, "not aligned to 4 bytes"),
        ("trap;", stand_in.LAUNCH_FAILED, 5, "trap"),
        ("st.global.u32 [a], r;", stand_in.LAUNCH_FAILED, 5, "register r is read"),
        ("LOOP:\nbra LOOP;", stand_in.LAUNCH_TIMEOUT, 6, "instructions"),
    ],
)
def test_a_fault_of_a_kernel_sticks_to_its_context(
    body: str, code: int, line: int, complaint: str
) -> None:
    """The launch returns; the next call that waits fails, and so do all others of the context."""
    driver = Driver(seed=77, max_instructions=10000)
    driver.start()
    x = np.zeros(1, np.uint32)
    address = driver.upload(x)
    stream = driver.handle("cuStreamCreate", 1)
    good, bad = driver.function(STORE), driver.function(kernel(body))
    driver.launch(bad, address, ONE, stream=stream)
    driver.call("cuStreamSynchronize", 0)
    fails(code, complaint, lambda: driver.synchronize(stream))
    report = driver.report()
    assert f"PTX line {line}: " in report
    if code != stand_in.LAUNCH_TIMEOUT:
        assert "in kernel 'k'" in report and "seed 77" in report
    for call in (
        lambda: driver.launch(good, address, ONE),
        lambda: driver.download(address, x),
        lambda: driver.handle("cuMemAlloc", 4),
        lambda: driver.load(STORE.encode()),
        lambda: driver.call("cuCtxSynchronize"),
    ):
        fails(code, complaint, call)
        assert complaint in driver.report()
    driver.call("cuDevicePrimaryCtxRelease", 0)
    fails(stand_in.INVALID_CONTEXT, "no live context", lambda: driver.upload(x))
    driver.start()
    driver.launch(driver.function(STORE), driver.upload(x), ONE, block=(1, 1, 1))
    driver.call("cuCtxSynchronize")
    assert len(driver.fault_reports()) == 1 and complaint in driver.fault_reports()[0]


def test_a_fault_concerns_no_other_device() -> None:
    """Device 1 goes on after a kernel of device 0 has failed."""
    driver = Driver("100a,100a")
    x = np.zeros(1, np.uint32)
    driver.start(0)
    driver.launch(driver.function(kernel("trap;")), driver.upload(x), ONE)
    fails(stand_in.LAUNCH_FAILED, "trap", driver.synchronize)
    driver.start(1)
    address = driver.upload(x)
    driver.launch(driver.function(STORE), address, ONE, block=(1, 1, 1))
    assert driver.download(address, x) == 0


def test_reads_of_memory_that_nothing_wrote_are_reported(driver: Driver) -> None:
    """Memory of cuMemAlloc is not initialised: a kernel must not read it, a copy warns."""
    address = driver.handle("cuMemAlloc", 8)
    assert driver.download(address, np.zeros(2, np.uint32)).tolist() == [0xCCCCCCCC] * 2
    assert "nothing has written 8" in driver.warnings()[0]
    driver.launch(driver.function(kernel("ld.global.u32 r, [a];")), address, ONE)
    fails(stand_in.LAUNCH_FAILED, "nothing has written", driver.synchronize)


DEVICE_ERRORS: list[tuple[int, str, Callable[[Driver], Any]]] = [
    (stand_in.INVALID_VALUE, "flags: expected 0, got 1", lambda d: d.call("cuInit", 1)),
    (101, "device: expected a number below 1, got 1", lambda d: d.integer("cuDeviceGet", 1)),
    (101, "got -1", lambda d: d.integer("cuDeviceGetAttribute", 16, ctypes.c_int(-1))),
    (801, "attribute 13 is not modelled", lambda d: d.integer("cuDeviceGetAttribute", 13, 0)),
    (1, "pi: got a null pointer", lambda d: d.call("cuDeviceGetAttribute", None, 16, 0)),
    (1, "len: expected at least 1", lambda d: d.call("cuDeviceGetName", b"x", 0, 0)),
    (201, "no live context", lambda d: d.call("cuCtxSetCurrent", 1234)),
    (201, "no live context", lambda d: d.call("cuCtxPushCurrent", 0)),
    (400, "no live stream", lambda d: d.call("cuStreamSynchronize", 1234)),
    (400, "no live stream", lambda d: d.call("cuStreamDestroy", 0)),
    (400, "no live module", lambda d: d.call("cuModuleUnload", 1234)),
    (400, "no function of a live module", lambda d: d.launch(1234)),
    (1, "flags: expected 0 or 1", lambda d: d.handle("cuStreamCreate", 2)),
    (1, "bytesize: expected more than 0", lambda d: d.handle("cuMemAlloc", 0)),
    (2, "1073741825 bytes were asked for", lambda d: d.handle("cuMemAlloc", (1 << 30) + 1)),
    (1, "an address that cuMemAlloc has given", lambda d: d.call("cuMemFree", 4096)),
    (1, "memory: this context has none", lambda d: d.call("cuMemsetD8Async", 64, 0, 1, 0)),
    (1, "srcHost: got a null", lambda d: d.call("cuMemcpyHtoDAsync", 64, None, 1, 0)),
    (1, "image: expected a module", lambda d: d.handle("cuModuleLoadDataEx", None, 0, None, None)),
    (801, "before 12.0", lambda d: d.handle("cuGetProcAddress", b"cuInit", RESULT, 11000, 0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("code", "complaint", "call"), DEVICE_ERRORS)
def test_wrong_arguments_are_refused(
    code: int, complaint: str, call: Callable[[Driver], Any], driver: Driver
) -> None:
    """Wrong numbers, null pointers and handles that are none: the text names the argument."""
    fails(code, complaint, lambda: call(driver))


def test_copies_stay_inside_their_buffer(driver: Driver) -> None:
    """One byte too many is refused, and the text names buffer and distance."""
    x = np.zeros(4, np.uint32)
    address = driver.upload(x)
    fails(1, "reach beyond 'cuMemAlloc of 16 bytes'", lambda: driver.download(address + 1, x))
    fails(1, "this is its byte 16", lambda: driver.download(address + 16, x))
    fails(1, "this is its byte -8", lambda: driver.download(address - 8, x))
    driver.call("cuMemFree", address)
    fails(1, "no device memory", lambda: driver.download(address, x))
    fails(1, "cuMemAlloc has given", lambda: driver.call("cuMemFree", address))


def test_memory_runs_out_and_comes_back() -> None:
    """The device holds what reset() says; freed memory can be had again."""
    driver = Driver(memory_bytes=1000)
    driver.start()
    first = driver.handle("cuMemAlloc", 600)
    fails(
        2, "500 bytes .* of the device's 1000 bytes 600", lambda: driver.handle("cuMemAlloc", 500)
    )
    driver.call("cuMemFree", first)
    driver.handle("cuMemAlloc", 1000)


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        (dict(grid=(0, 1, 1)), 1, r"grid \(0, 1, 1\)"),
        (dict(grid=(1, 65536, 1)), 1, r"grid \(1, 65536, 1\)"),
        (dict(grid=(1, 1, 65536)), 1, r"grid \(1, 1, 65536\)"),
        (dict(block=(1, 0, 1)), 1, r"block \(1, 0, 1\)"),
        (dict(block=(1, 1, 65)), 1, r"block \(1, 1, 65\)"),
        (dict(block=(1024, 2, 1)), 1, "has 2048 threads"),
        (dict(block=(256, 1, 1)), 701, "has 256 threads; it was compiled for at most 128"),
        (dict(shared_bytes=49153), 1, "sharedMemBytes of 'k': expected at most 49152, got 49153"),
        (dict(cluster=(0, 1, 1)), 1, r"cluster \(0, 1, 1\) must not be empty"),
        (dict(cluster=(3, 1, 1), grid=(4, 1, 1)), 1, "is no multiple of cluster"),
        (dict(cluster=(16, 1, 1), grid=(16, 1, 1)), 912, "at most 8 CTAs; up to 16 with NON_"),
        (dict(number_2=1), 801, "COOPERATIVE: cooperative launches are not modelled"),
        (dict(number_7=0), 801, "launch attribute 7 is not modelled"),
    ],
)  # fmt: skip
def test_wrong_launches_are_refused(
    options: dict[str, Any], code: int, complaint: str, driver: Driver
) -> None:
    """A launch beyond the limits fails at once, with the argument and the limit."""
    function = driver.function(kernel("", ".maxntid 128\n"))
    fails(code, complaint, lambda: driver.launch(function, 0, ONE, **options))
    driver.launch(function, 0, ONE, block=(128, 1, 1), shared_bytes=49152)
    for hint in (0, 1, 3, 5, 8, 9, 10, 11, 14):
        driver.launch(function, 0, ONE, **{f"number_{hint}": 1})
    driver.launch(function, 0, ONE, number_2=0)
    driver.synchronize()


def test_large_clusters_need_consent_and_room(driver: Driver) -> None:
    """16 CTAs run once the function allows it; 17 never do, and not more than the device holds."""
    function = driver.function(kernel(""))
    driver.call("cuFuncSetAttribute", function, 14, 1)
    driver.launch(function, 0, ONE, grid=(16, 1, 1), cluster=(16, 1, 1))
    shape = dict(grid=(32, 1, 1), cluster=(32, 1, 1))
    fails(912, "at most 16 CTAs", lambda: driver.launch(function, 0, ONE, **shape))
    old = Driver("80")
    old.start()
    plain = old.function(kernel("").replace("sm_100a", "sm_80"))
    for options in (dict(grid=(2, 1, 1), cluster=(2, 1, 1)), dict(programmatic=1)):
        fails(801, "need sm_90", lambda o=options: old.launch(plain, 0, ONE, **o))


def test_parameters_must_be_given(driver: Driver) -> None:
    """A missing pointer is named with its position; two ways at once are one too many."""
    function = driver.function(kernel(""))
    shape = ctypes.byref(stand_in.config())
    one = ctypes.c_uint64(1)
    partly = (ctypes.c_void_p * 2)(ctypes.addressof(one), None)
    launch = "cuLaunchKernelEx"
    fails(
        1,
        r"kernelParams\[0\] of 'k'.*8 bytes",
        lambda: driver.call(launch, shape, function, None, None),
    )
    fails(
        1,
        r"kernelParams\[1\] of 'k'.*4 bytes",
        lambda: driver.call(launch, shape, function, partly, None),
    )
    fails(1, "expected one of them", lambda: driver.call(launch, shape, function, partly, partly))
    stray = (ctypes.c_void_p * 3)(7, None, None)
    fails(1, "extra: expected CU_LAUNCH", lambda: driver.call(launch, shape, function, None, stray))
    fails(1, "config: got a null", lambda: driver.call(launch, None, function, partly, None))


def test_function_attributes_have_limits(driver: Driver) -> None:
    """Shared memory beyond the chip's is refused, and so is what nobody can set or know."""
    function = driver.function(kernel(""))
    most = 232448
    set_, get = "cuFuncSetAttribute", "cuFuncGetAttribute"
    fails(
        1, f"expected 0 to {most}, got {most + 1}", lambda: driver.call(set_, function, 8, most + 1)
    )
    fails(1, "cannot be set", lambda: driver.call(set_, function, 1, 5))
    fails(801, "attribute 4 is not modelled", lambda: driver.integer(get, 4, function))
    fails(500, "no entry 'other'; it has: k", lambda: driver.function(kernel(""), "other"))


@pytest.mark.parametrize(
    ("device", "target", "runs"),
    [
        ("100a", "sm_100a", True), ("103a", "sm_100a", False), ("103a", "sm_100f", True),
        ("110a", "sm_100f", False), ("120a", "sm_100a", False), ("121a", "sm_120f", True),
        ("120a", "sm_90", True), ("90a", "sm_100a", False), ("90a", "sm_80", True),
        ("130", "sm_100f", False),
    ],
)  # fmt: skip
def test_modules_load_on_the_chips_of_their_target(device: str, target: str, runs: bool) -> None:
    """The refusal names what the image is for and what the device is."""
    driver = Driver(device)
    driver.start()
    text = kernel("").replace("sm_100a", target).encode()
    if runs:
        driver.load(text)
    else:
        fails(209, f"is for {target}; the device is sm_{device}", lambda: driver.load(text))


def test_ptx_newer_than_the_driver_is_refused() -> None:
    """A driver of CUDA 12.8 reads PTX 8.7, one of 12.9 reads 8.8 (PTX ISA, release notes)."""
    for version, newest in ((12080, "8.7"), (12000, "8.0")):
        driver = Driver(driver_version=version)
        driver.start()
        assert driver.integer("cuDriverGetVersion") == version
        fails(
            222,
            f"of version 8.8; the driver reads up to {newest}",
            lambda d=driver: d.load(STORE.encode()),
        )
    driver = Driver(driver_version=12090)
    driver.start()
    driver.load(STORE.encode())


def test_wrong_ptx_is_refused_with_its_line(driver: Driver) -> None:
    """The report and the caller's error log both have the line; a right module empties the log."""
    log = ctypes.create_string_buffer(b"old", 200)
    options = (ctypes.c_int * 2)(5, 6)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 200)

    def load(text: str) -> int:
        return driver.handle("cuModuleLoadDataEx", text.encode() + b"\0", 2, options, values)

    fails(218, "line 5.*foo.bar", lambda: load(kernel("foo.bar r, r;")))
    assert b"line 5" in log.value
    load(STORE)
    assert log.value == b""


def test_a_driver_without_devices_says_so() -> None:
    """cuInit fails with the code of a machine without GPU; a chip that is none is refused."""
    driver = Driver("")
    fails(stand_in.NO_DEVICE, "no chip is named", lambda: driver.call("cuInit", 0))
    with pytest.raises(ValueError, match="sm '12' is no chip that is modelled"):
        Driver("100a,12")


def test_contexts_must_be_current(driver: Driver) -> None:
    """Without a current context nothing of the default stream works; nothing can be popped."""
    driver.call("cuCtxSetCurrent", 0)
    fails(201, "no current context", lambda: driver.handle("cuMemAlloc", 4))
    fails(201, "no current context", lambda: driver.integer("cuCtxGetDevice"))
    fails(201, "no context to pop", lambda: driver.handle("cuCtxPopCurrent"))
    driver.call("cuDevicePrimaryCtxRelease", 0)
    fails(201, "no primary context to release", lambda: driver.call("cuDevicePrimaryCtxRelease", 0))
