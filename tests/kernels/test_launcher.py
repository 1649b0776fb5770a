"""csrc/driver/launch.h over the stand-in driver: image choice, graphs, contexts."""

import ctypes
import functools
from collections.abc import Iterator

import numpy as np
import pytest

from jax_fp4.cli import doctor
from oracles import pack
from support import device_kernels, stand_in
from support.native import shared_library
from support.repository import ROOT

GLOBAL, PER_THREAD, RELAXED = 0, 1, 2  # capture modes of cuda.h
KERNELS = ("amax_32", "gemm_sm100_mxfp4_128x32", "gemm_sm100_mxfp4_128x64")


@functools.cache
def library() -> ctypes.CDLL:
    csrc = ROOT / "csrc"
    sources = [ROOT / "tests" / "kernels" / "launcher_c.cc"]
    sources += sorted((csrc / "driver").glob("*.cc")) + sorted((csrc / "plan").glob("*.cc"))
    result = shared_library("launcher", sources, "-Wall", "-Wextra", "-Werror", "-O1", "-ldl")
    for name in ("start", "load", "run_amax", "run_product"):
        getattr(result, name).restype = ctypes.c_char_p
    for kernel in KERNELS:
        text = device_kernels.ptx(kernel, "100f").encode() + b"\0"
        result.add_image(kernel.encode(), b"100f", 0, text, ctypes.c_size_t(len(text)))
    return result


def call(function: str, *arguments: int | bytes) -> None:
    """Calls a function of the library; its error is an AssertionError with the text."""
    error = getattr(library(), function)(
        *[ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
    )
    assert error is None, error.decode()


class Device:
    """A context with a stream; arrays in its memory."""

    def __init__(self, driver: stand_in.Driver, device: int = 0) -> None:
        self.driver = driver
        self.context = driver.start(device)
        self.stream = driver.handle("cuStreamCreate", 0)

    def place(self, array: np.ndarray) -> int:
        self.driver.call("cuCtxSetCurrent", self.context)
        address = self.driver.handle("cuMemAlloc", array.nbytes)
        self.write(address, array)
        return address

    def write(self, address: int, array: np.ndarray) -> None:
        self.driver.call("cuCtxSetCurrent", self.context)
        data = np.ascontiguousarray(array)
        self.driver.call("cuMemcpyHtoD", address, data.ctypes.data, data.nbytes)

    def read(self, address: int, like: np.ndarray) -> np.ndarray:
        self.driver.call("cuCtxSetCurrent", self.context)
        self.driver.call("cuStreamSynchronize", self.stream)
        result = np.empty_like(like)
        self.driver.call("cuMemcpyDtoH", result.ctypes.data, address, result.nbytes)
        return result


@pytest.fixture
def driver() -> Iterator[stand_in.Driver]:
    result = stand_in.Driver("100a,103a")
    call("start", str(stand_in.path("libcuda.so.1")).encode())
    yield result
    assert result.fault_reports() == []


class Amax:
    """amax of a matrix of a device."""

    def __init__(self, device: Device, seed: int, shape: tuple[int, int] = (70, 90)) -> None:
        self.device, self.shape = device, shape
        self.x = self.numbers(seed)
        self.address = device.place(self.x)
        self.origin = device.place(np.zeros(3, np.uint32))
        self.amax = device.place(np.full(1, 0xFFFF_FFFF, np.uint32))

    def numbers(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal(self.shape).astype(np.float32)

    def run(self) -> None:
        call("run_amax", self.device.stream, self.address, self.origin, self.amax, *self.shape)

    def check(self) -> None:
        got = self.device.read(self.amax, np.empty(1, np.float32))
        assert got[0] == np.abs(self.x).max()


@pytest.mark.parametrize(
    ("target", "cubin", "chips"),
    [
        ("80", True, {80, 86, 89}),
        ("90", True, {90}),
        ("100a", True, {100}),
        ("103a", True, {103}),
        ("120a", True, {120}),
        ("80", False, {80, 86, 89, 90, 100, 103, 110, 120, 121}),
        ("90", False, {90, 100, 103, 110, 120, 121}),
        ("100f", False, {100, 103}),
        ("120f", False, {120, 121}),
    ],
)
def test_which_images_fit_a_device(target: str, cubin: bool, chips: set[int]) -> None:
    """Binaries stay in their major version, family PTX in its family, plain PTX runs forward."""
    devices = {75, 80, 86, 89, 90, 100, 103, 110, 120, 121}
    assert {c for c in devices if library().fits(target.encode(), int(cubin), c)} == chips


def test_the_most_specific_image_comes_first() -> None:
    """Cubins before PTX; then newer before older, and a family's text before a plain one."""
    order = [(b"103a", 1), (b"100a", 1), (b"90", 1), (b"80", 1), (b"100f", 0), (b"100", 0),
             (b"90", 0), (b"80", 0)]  # fmt: skip
    for i, a in enumerate(order):
        for j, b in enumerate(order):
            assert bool(library().better(*a, *b)) == (i < j), (a, b)


@pytest.mark.parametrize("chip", [75, 80, 86, 90, 100, 103, 110, 120, 121])
def test_doctor_names_the_image_that_is_loaded(chip: int) -> None:
    """`doctor` and csrc/driver choose alike among all images of a build."""
    targets = [("80", 1), ("90", 1), ("100a", 1), ("103a", 1), ("120a", 1), ("121a", 1),
               ("80", 0), ("90", 0), ("100f", 0), ("120f", 0)]  # fmt: skip
    best: tuple[str, int] | None = None
    for target, cubin in targets:
        if library().fits(target.encode(), cubin, chip) and (
            best is None or library().better(target.encode(), cubin, best[0].encode(), best[1])
        ):
            best = (target, cubin)
    images = [("k", f"{'cubin' if cubin else 'PTX'} sm_{target}") for target, cubin in targets]
    expected = best and f"{'cubin' if best[1] else 'PTX'} sm_{best[0]}"
    assert doctor.image_for(images, "k", chip) == expected


@pytest.mark.parametrize(
    ("chip", "code"), [(80, "bf16"), (90, "bf16"), (100, "sm100"), (103, "sm100"), (121, "sm120")]
)
def test_what_a_capture_may_need_is_loaded_before_and_nothing_else(chip: int, code: str) -> None:
    """The product kernels of the chip, and those that bring operands into their layout."""
    names = {kernel.name for kernel in device_kernels.compiler().kernels()}
    loaded = {name for name in names if library().loaded_for(chip, name.encode())}
    own = {name for name in names if name.startswith(f"gemm_{code}_")}
    assert own and loaded == own | {"gemm_reduce", "tile_scales", "pad_rows"}


def test_a_first_call_under_capture_is_refused_and_spoils_nothing(driver: stand_in.Driver) -> None:
    """Kernels are not loaded while a graph is captured; the capture goes on, as it was."""
    amax = Amax(Device(driver), 0)
    driver.call("cuStreamBeginCapture", amax.device.stream, RELAXED)
    with pytest.raises(AssertionError, match=r"amax_32 is not loaded.*captured"):
        amax.run()
    graph = driver.handle("cuStreamEndCapture", amax.device.stream, stand_in.RESULT)
    assert graph != 0
    amax.run()
    amax.check()


@pytest.mark.parametrize("mode", [GLOBAL, PER_THREAD, RELAXED])
def test_a_loaded_kernel_is_captured_and_replayed(driver: stand_in.Driver, mode: int) -> None:
    """`load` before the capture; each replay clears the output and reads the present values."""
    device = Device(driver)
    amax = Amax(device, 1)
    call("load", device.stream, b"amax")
    driver.call("cuStreamBeginCapture", device.stream, mode)
    amax.run()
    graph = driver.handle("cuStreamEndCapture", device.stream, stand_in.RESULT)
    exec_ = driver.handle("cuGraphInstantiateWithFlags", stand_in.RESULT, graph, 0)
    for seed in (2, 3, 4):
        amax.x = amax.numbers(seed) / np.float32(seed)
        device.write(amax.address, amax.x)
        driver.call("cuGraphLaunch", exec_, device.stream)
        amax.check()


def test_tensor_maps_are_of_the_call_and_not_of_the_capture_before(
    driver: stand_in.Driver,
) -> None:
    """Graphs of one shape over three sets of arrays: each reads and writes its own."""
    device = Device(driver)
    call("load", device.stream, b"gemm")
    rng = np.random.default_rng(0)
    m, n, k = 40, 24, 64
    one = device.place(np.ones(1, np.float32))
    graphs: list[tuple[int, int, np.ndarray]] = []
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    for _ in range(3):
        codes = [rng.integers(0, 8, (rows, k)).astype(np.uint8) for rows in (m, n)]
        scales = [np.full((rows, k // 32), 127, np.uint8) for rows in (m, n)]
        operands = []
        for code, scale in zip(codes, scales, strict=True):
            operands += [device.place(pack.pack(code, 4)), device.place(pack.tile_scales(scale))]
        d = device.place(np.full((m, n), np.nan, np.float32))
        driver.call("cuStreamBeginCapture", device.stream, RELAXED)
        call("run_product", device.stream, *operands, one, d, m, n, k)
        graph = driver.handle("cuStreamEndCapture", device.stream, stand_in.RESULT)
        exec_ = driver.handle("cuGraphInstantiateWithFlags", stand_in.RESULT, graph, 0)
        graphs.append((exec_, d, values[codes[0]] @ values[codes[1]].T))
    for exec_, d, expected in reversed(graphs):
        driver.call("cuGraphLaunch", exec_, device.stream)
        assert (device.read(d, expected) == expected).all()


def test_contexts_have_modules_of_their_own(driver: stand_in.Driver) -> None:
    """Two devices in turn, and the default stream of whichever context is current."""
    devices = [Device(driver, 0), Device(driver, 1)]
    sums = [Amax(device, i) for i, device in enumerate(devices)]
    for _ in range(2):
        for amax in sums:
            amax.run()
            amax.check()
    driver.call("cuCtxSetCurrent", devices[0].context)
    sums[0].x = sums[0].numbers(9)
    devices[0].write(sums[0].address, sums[0].x)
    call("run_amax", 0, sums[0].address, sums[0].origin, sums[0].amax, *sums[0].shape)
    driver.call("cuStreamSynchronize", 0)
    sums[0].check()


def test_no_context_for_the_default_stream_is_an_error(driver: stand_in.Driver) -> None:
    """A null stream and no current context: said so, before anything is called with it."""
    driver.start()
    driver.call("cuCtxSetCurrent", None)
    with pytest.raises(AssertionError, match="no CUDA context"):
        call("load", 0, b"amax")
