"""What the driver refuses reaches the user as an error that names the call, and nothing is lost."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import _native

pytestmark = pytest.mark.device

# What JAX raises for a failed call, where it waits for it and where it does not.
FAILED = (jax.errors.JaxRuntimeError, ValueError)
UNKNOWN, OUT_OF_MEMORY, NO_BINARY = 999, 2, 209  # values of cuda.h


def product() -> np.ndarray:
    """Uses every driver function: memory is cleared, kernels are loaded, maps encoded, launched."""
    x = jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64) % 7 - 3
    return np.asarray(fp4.dot(x, x))


@pytest.mark.parametrize(
    "function",
    [
        "cuInit",
        "cuDeviceGetCount",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent",
        "cuCtxPopCurrent",
        "cuStreamCreate",
        "cuStreamGetCtx",
        "cuCtxGetDevice",
        "cuDeviceGetAttribute",
        "cuStreamIsCapturing",
        "cuModuleLoadDataEx",
        "cuModuleGetFunction",
        "cuFuncGetAttribute",
        "cuFuncSetAttribute",
        "cuMemsetD8Async",
        "cuTensorMapEncodeTiled",
        "cuLaunchKernelEx",
        "cuStreamSynchronize",
    ],
)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failing_call_is_named_and_does_no_lasting_harm(function: str, nth: int) -> None:
    """The error names function and reason, and the same product works once the driver does.

    A second call of a function that is called once does not come: then the product is right.
    """
    expected = product()
    _native.reset_sim_driver("100a", 0)
    _native.fail_sim_driver(function, nth, UNKNOWN)
    once = {"cuInit", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain", "cuStreamCreate"}
    if nth == 2 and function in once | {"cuCtxGetDevice", "cuTensorMapEncodeTiled"}:
        # ... or it comes, and fails: what may not be is a wrong result.
        try:
            assert (product() == expected).all()
        except FAILED as error:
            assert function in str(error)
    else:
        with pytest.raises(FAILED) as caught:
            product()
        assert function in str(caught.value)
        assert "CUDA_ERROR_UNKNOWN" in str(caught.value)
    assert (product() == expected).all()


def test_a_gpu_without_kernels_is_refused_by_name() -> None:
    """Older than the kernels: an error with the capability and the way out."""
    _native.reset_sim_driver("75", 0)
    with pytest.raises(FAILED, match=r"compute capability 7[.]5") as caught:
        product()
    assert "CPU" in str(caught.value)


def test_a_gpu_that_is_newer_than_the_kernels_runs_ptx() -> None:
    """No cubin and no block-scaled MMA that we know: the PTX for sm_90, decoding to bf16."""
    expected = product()
    _native.reset_sim_driver("110a", 0)
    assert (product() == expected).all()  # small integers: every sum is exact
    assert _native.launch_counts()["gemm_bf16_nvfp4_128x128"] > 0


def test_a_cubin_that_the_driver_refuses_makes_room_for_ptx() -> None:
    """NO_BINARY_FOR_GPU for the first image: the next one that fits is loaded."""
    expected = product()
    _native.reset_sim_driver("100a", 0)
    _native.fail_sim_driver("cuModuleLoadDataEx", 1, NO_BINARY)
    assert (product() == expected).all()
    _native.reset_sim_driver("100a", 0)
    _native.fail_sim_driver("cuModuleLoadDataEx", 0, NO_BINARY)
    with pytest.raises(FAILED, match=r"cubin sm_100a.*PTX sm_100f") as caught:
        product()
    assert "update it" in str(caught.value)
    _native.reset_sim_driver("100a", 0)
    _native.fail_sim_driver("cuModuleLoadDataEx", 1, OUT_OF_MEMORY)
    with pytest.raises(FAILED, match="CUDA_ERROR_OUT_OF_MEMORY"):
        product()


def test_two_devices_and_two_threads() -> None:
    """Each device has its own context and modules; threads alternate between them."""
    _native.reset_sim_driver("100a,103a", 0)
    devices = jax.devices("cpu")
    assert len(devices) == 2, "make test-device gives JAX two CPU devices"
    rng = np.random.default_rng(0)
    xs = [jnp.asarray(rng.standard_normal((48, 64)), jnp.float32) for _ in range(4)]
    alone = [np.asarray(fp4.dot(x, x.T)) for x in xs]
    _native.reset_sim_driver("100a,103a", 0)
    failures: list[str] = []

    def work(first: int) -> None:
        for i in range(8):
            index, device = (first + i) % 4, devices[(first + i) % 2]
            x = jax.device_put(xs[index], device)
            if (np.asarray(fp4.dot(x, x.T)) != alone[index]).any():
                failures.append(f"product {index} on {device}")

    threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert _native.sim_driver_reports() == []
