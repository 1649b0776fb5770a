"""The simulated driver's captures: what is recorded, what ends a capture, what a graph does."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support import stand_in
from support.stand_in import RESULT, Driver, DriverError

PTX = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry add(.param .u64 x, .param .u32 n)
{ .reg .b64 a; .reg .b32 r, s; ld.param.u64 a, [x]; ld.param.u32 s, [n];
  ld.global.u32 r, [a]; add.u32 r, r, s; st.global.u32 [a], r; ret; }
"""
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
ZERO = np.zeros(1, np.uint32)


class Recording:
    """A driver with a number in memory, a kernel that adds to it, and a stream that captures."""

    def __init__(self, mode: int = GLOBAL, flags: int = 1) -> None:
        self.driver = Driver()
        self.driver.start()
        self.module = self.driver.load(PTX.encode())
        self.function = self.driver.handle("cuModuleGetFunction", self.module, b"add")
        self.address = self.driver.upload(ZERO)
        self.stream = self.driver.handle("cuStreamCreate", flags)
        self.driver.call("cuStreamBeginCapture", self.stream, ctypes.c_int(mode))

    def add(self, number: int, stream: int | None = None, **options: Any) -> None:
        self.driver.launch(
            self.function, self.address, ctypes.c_uint32(number), block=(1, 1, 1),
            stream=self.stream if stream is None else stream, **options,
        )  # fmt: skip

    def status(self, stream: int) -> int:
        return self.driver.get(ctypes.c_int, "cuStreamIsCapturing", stream, RESULT)

    def end(self) -> int:
        return self.driver.handle("cuStreamEndCapture", self.stream, RESULT)

    def run(self, graph: int) -> None:
        executable = self.driver.handle("cuGraphInstantiateWithFlags", graph, 0)
        self.driver.call("cuGraphLaunch", executable, self.stream)
        self.driver.call("cuGraphExecDestroy", executable)

    def value(self) -> int:
        return int(self.driver.download(self.address, ZERO, self.stream)[0])


def fails(code: int, complaint: str, call: Callable[[], Any]) -> None:
    with pytest.raises(DriverError, match=complaint) as error:
        call()
    assert error.value.code == code


def test_a_captured_launch_runs_when_its_graph_does() -> None:
    """Nothing runs while recording; each launch of the graph does all of it, in order."""
    recording = Recording()
    driver = recording.driver
    source = np.array([100], np.uint32)
    assert recording.status(recording.stream) == 1
    driver.call("cuMemsetD8Async", recording.address, 0, 4, recording.stream)
    recording.add(3)
    recording.add(4, programmatic=1)
    driver.call(
        "cuMemcpyHtoDAsync", recording.address, stand_in.pointer(source), 4, recording.stream
    )
    recording.add(5)
    graph = recording.end()
    assert recording.status(recording.stream) == 0
    assert recording.value() == 0
    recording.run(graph)
    assert recording.value() == 105
    source[0] = 200  # the host memory is read when the graph runs
    recording.run(graph)
    assert recording.value() == 205
    driver.call("cuGraphDestroy", graph)
    fails(1, "no live graph", lambda: driver.handle("cuGraphInstantiateWithFlags", graph, 0))


def test_parameters_are_those_of_the_capture() -> None:
    """Kernel parameters are copied at the launch: changing them later changes nothing."""
    recording = Recording()
    number = ctypes.c_uint32(7)
    recording.driver.launch(
        recording.function, recording.address, number, block=(1, 1, 1), stream=recording.stream
    )
    number.value = 9
    recording.run(recording.end())
    assert recording.value() == 7


def test_a_graph_can_be_captured_into_another() -> None:
    """A graph launched into a capturing stream becomes part of its graph."""
    recording = Recording()
    recording.add(1)
    inner = recording.end()
    recording.driver.call("cuStreamBeginCapture", recording.stream, ctypes.c_int(GLOBAL))
    recording.add(10)
    recording.run(inner)
    outer = recording.end()
    assert recording.value() == 0
    recording.run(outer)
    assert recording.value() == 11


FORBIDDEN: list[tuple[str, Callable[[Recording], Any]]] = [
    ("loading a module", lambda r: r.driver.load(PTX.encode())),
    ("unloading a module", lambda r: r.driver.call("cuModuleUnload", r.module)),
    ("cuMemAlloc", lambda r: r.driver.handle("cuMemAlloc", 4)),
    ("cuMemFree", lambda r: r.driver.call("cuMemFree", r.address)),
    ("cuCtxSynchronize", lambda r: r.driver.call("cuCtxSynchronize")),
    ("cuMemcpyHtoD", lambda r: r.driver.call("cuMemcpyHtoD", r.address, stand_in.pointer(ZERO), 4)),
    ("cuMemcpyDtoH", lambda r: r.driver.call("cuMemcpyDtoH", stand_in.pointer(ZERO), r.address, 4)),
]


@pytest.mark.parametrize(("name", "call"), FORBIDDEN, ids=[name for name, _ in FORBIDDEN])
def test_what_a_capture_forbids_ends_it(name: str, call: Callable[[Recording], Any]) -> None:
    """The call fails and the capture is lost; in a relaxed capture it is allowed."""
    recording = Recording()
    recording.add(1)
    fails(900, f"{name} while a stream captures", lambda: call(recording))
    assert recording.status(recording.stream) == 2
    fails(901, "was invalidated", lambda: recording.add(1))
    fails(901, "invalidated its capture", recording.end)
    recording.add(2)
    assert recording.value() == 2
    call(Recording(RELAXED))


def test_waiting_for_a_capturing_stream_ends_its_capture() -> None:
    """In every mode: nothing that was recorded runs, so nothing can be waited for."""
    for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
        recording = Recording(mode)
        fails(900, "it is capturing", lambda r=recording: r.driver.synchronize(r.stream))
        fails(901, "invalidated", recording.end)


def test_the_legacy_stream_must_rest_while_a_blocking_stream_captures() -> None:
    """Work on it would wait for the capture; a stream that does not block it is no obstacle."""
    recording = Recording(flags=0)
    fails(906, "legacy stream must not be used", lambda: recording.status(0))
    fails(906, "legacy stream would wait", lambda: recording.add(1, stream=0))
    fails(901, "invalidated", recording.end)
    recording = Recording(flags=1)
    assert recording.status(0) == 0
    recording.add(1, stream=0)
    recording.driver.synchronize(0)
    recording.end()
    assert recording.value() == 1


def test_captures_concern_threads_by_their_mode() -> None:
    """Global: no thread may allocate; thread-local: other threads may, and may not end it."""

    def in_thread(call: Callable[[], Any]) -> list[int]:
        codes: list[int] = []

        def run() -> None:
            try:
                recording.driver.start()
                call()
                codes.append(0)
            except DriverError as error:
                codes.append(error.code)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return codes

    for mode, allocation, ending in ((GLOBAL, 900, 908), (THREAD_LOCAL, 0, 908), (RELAXED, 0, 0)):
        recording = Recording(mode)
        assert in_thread(recording.end) == [ending]
        assert in_thread(lambda r=recording: r.driver.handle("cuMemAlloc", 4)) == [allocation]


def test_captures_begin_and_end_where_they_can() -> None:
    """Default streams are not captured, a capture begins once, and ends once."""
    recording = Recording()
    driver = recording.driver
    begin = "cuStreamBeginCapture"
    for stream in (0, 1, 2):
        fails(900, "created stream", lambda s=stream: driver.call(begin, s, ctypes.c_int(0)))
    fails(900, "capturing already", lambda: driver.call(begin, recording.stream, ctypes.c_int(0)))
    fails(1, "mode: expected 0 to 2", lambda: driver.call(begin, recording.stream, ctypes.c_int(3)))
    fails(900, "it is capturing", lambda: driver.call("cuStreamDestroy", recording.stream))
    graph = recording.end()
    fails(903, "not capturing", recording.end)
    fails(801, "flags", lambda: driver.handle("cuGraphInstantiateWithFlags", graph, 8))
    fails(1, "no live graph", lambda: driver.call("cuGraphLaunch", 5, recording.stream))
    fails(1, "no live graph", lambda: driver.call("cuGraphDestroy", 5))
    fails(1, "no live graph", lambda: driver.call("cuGraphExecDestroy", 5))


def test_a_graph_outlives_no_module() -> None:
    """Launching a graph whose kernel's module was unloaded is reported."""
    recording = Recording()
    recording.add(1)
    graph = recording.end()
    recording.driver.call("cuModuleUnload", recording.module)
    recording.run(graph)
    fails(
        400, "module of 'add' was unloaded", lambda: recording.driver.synchronize(recording.stream)
    )


def test_graphs_belong_to_a_context() -> None:
    """A stream of another device cannot run one, and they end with their context."""
    driver = Driver("100a,100a")
    driver.start(1)
    other = driver.handle("cuStreamCreate", 1)
    driver.start(0)
    stream = driver.handle("cuStreamCreate", 1)
    driver.call("cuStreamBeginCapture", stream, ctypes.c_int(GLOBAL))
    graph = driver.handle("cuStreamEndCapture", stream, RESULT)
    executable = driver.handle("cuGraphInstantiateWithFlags", graph, 0)
    fails(400, "another context", lambda: driver.call("cuGraphLaunch", executable, other))
    driver.call("cuDevicePrimaryCtxRelease", 0)
    fails(1, "no live graph", lambda: driver.call("cuGraphLaunch", executable, other))
    fails(1, "no live graph", lambda: driver.call("cuGraphDestroy", graph))
