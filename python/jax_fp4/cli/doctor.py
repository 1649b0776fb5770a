"""`python -m jax_fp4 doctor`: what is installed, what is used, and what is missing.

Every line is read from this machine when the command runs; nothing is assumed. Whatever can be
broken (the extension, JAX, a driver) is tried inside the function that reports it.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Says what is installed, which CPU level is used, whether a GPU driver is there, and whether the
numbers come out right. The exit code is 0 if everything that the CPU backend needs works, else 1.
"""

_PACKAGES = ("jax_fp4", "jax", "jaxlib", "numpy", "matplotlib")
_OPTIONAL = {"matplotlib": "pictures of the demo"}
# Names in /proc/cpuinfo of what each level needs (csrc/cpu/cpu.cc asks the processor itself).
_LEVEL_FLAGS = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": (
        "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_vnni", "fma", "f16c",
    ),
    "avx512_bf16": ("avx512_bf16",),
    "amx": ("amx_tile", "amx_bf16"),
}  # fmt: skip
_LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")

# x[i, j] = ((7 i + 13 j) mod 31 - 15) * 0.375 of shape [2, 32], quantized in two ways, and each
# result's product with itself. The bytes were computed by tests/oracles, not by this package.
_EXPECTED = {
    "rounded to nearest": {
        "values": "afd6e4716b3e9fc6e5726a4d0fc7e5f24d0fc7e5f26a4d1eb7e6f3695c2ea7d6",
        "scales": "7e7e7e7e",
        "global_scale": "9224093b",
        "product": "7fccc143ffffe0c0ffffe0c0ffeeb543",
    },
    "stochastic, rotated": {
        "values": "220818bfa9e8c93c5c4849177bd9991de714fecade654ed9351a765d56b6da5e",
        "scales": "7e7b7779",
        "global_scale": "0cc3703b",
        "product": "c961bc43b0129941b012994171cca443",
    },
}


@dataclasses.dataclass
class Finding:
    """One line of the report.

    Attributes:
        topic: what it is about.
        text: what was found.
        problem: whether the CPU backend cannot work because of it.
        data: the same for programs.
    """

    topic: str
    text: str
    problem: bool = False
    data: Any = None


def _reason(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _versions() -> list[Finding]:
    found = [Finding("python", f"{platform.python_version()}, {platform.platform()}")]
    found[0].data = {"version": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a broken package is what this command is for
            optional = _OPTIONAL.get(name)
            text = f"not there ({_reason(error)})" + (
                f"; needed for {optional}" if optional else ""
            )
            found.append(Finding(name, text, problem=optional is None))
            continue
        version = getattr(module, "__version__", "of unknown version")
        folder = str(Path(module.__file__ or "").parent)
        found.append(
            Finding(name, f"{version} in {folder}", data={"version": version, "path": folder})
        )
    return found


def _extension() -> list[Finding]:
    """The extension and the version of XLA's foreign function interface that it speaks."""
    try:
        from jax_fp4 import _compat, _core
    except Exception as error:
        text = f"does not load ({_reason(error)})"
        if importlib.util.find_spec("jax_fp4._core") is None:
            text = "missing: build it with `pip install .` in a checkout"
        return [Finding("extension", text, problem=True)]
    built, running = _core.FFI_API_VERSION, _compat.runtime_ffi_api_version()
    data = {"built": list(built), "running": None if running is None else list(running)}
    text = f"built for XLA FFI {built[0]}.{built[1]}"
    if running is None:
        return [Finding("extension", f"{text}; what jaxlib offers is unknown", data=data)]
    text += f", jaxlib offers {running[0]}.{running[1]}"
    if built > running:
        text += ": too old; update jaxlib, or rebuild with `pip install .`"
    return [Finding("extension", text, problem=built > running, data=data)]


def _processor_flags() -> set[str] | None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return None


def missing_for(level: str, flags: set[str] | None) -> str:
    """What this machine lacks for a level that it does not reach."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"that level exists for x86-64 only, this is {platform.machine()}"
    if flags is None:
        return "which instructions are missing cannot be read on this system"
    missing = [flag for flag in _LEVEL_FLAGS[level] if flag not in flags]
    if missing:
        return f"the processor lacks {', '.join(missing)}"
    return "the processor has the instructions, but the operating system does not grant them"


def _cpu() -> list[Finding]:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        from jax_fp4 import _native

        used, best = _native.cpu_level(), _native.best_cpu_level()
    except Exception as error:
        return [Finding("cpu", f"no level: {_reason(error)}", problem=True, data={"cpus": count})]
    data: dict[str, Any] = {"cpus": count, "level": used, "best_level": best, "next_level": None}
    text = f"level {used}, the best one here is {best}; {count} processors"
    if best != _LEVELS[-1]:
        following = _LEVELS[_LEVELS.index(best) + 1]
        data["next_level"] = {
            "level": following,
            "missing": missing_for(following, _processor_flags()),
        }
        text += f"; {following} is out of reach: {data['next_level']['missing']}"
    return [Finding("cpu", text, data=data)]


def _self_check() -> list[Finding]:
    """Quantizes a small matrix and multiplies it, and compares every byte with the module's."""
    try:
        import jax
        import jax.numpy as jnp
        import numpy as np

        import jax_fp4

        i, j = np.indices((2, 32))
        x = ((7 * i + 13 * j) % 31 - 15).astype(np.float32) * np.float32(0.375)
        wrong: list[str] = []
        with jax.default_device(jax.devices("cpu")[0]):
            nearest = jax_fp4.quantize(jnp.asarray(x))
            seed = jnp.array([1, 2], jnp.uint32)
            stochastic = jax_fp4.quantize(
                jnp.asarray(x), rounding="stochastic", seed=seed, hadamard=True
            )
            for (how, expected), q in zip(_EXPECTED.items(), (nearest, stochastic), strict=True):
                got = {
                    "values": q.values,
                    "scales": q.scales,
                    "global_scale": q.global_scale,
                    "product": jax_fp4.scaled_matmul(q, q),
                }
                for name, hexadecimal in expected.items():
                    if np.asarray(got[name]).tobytes().hex() != hexadecimal:
                        wrong.append(f"{name} ({how})")
    except Exception as error:
        return [
            Finding("self-check", f"failed: {_reason(error)}", problem=True, data={"ok": False})
        ]
    if wrong:
        text = f"failed: wrong bytes in {', '.join(wrong)}; please report this with the lines above"
        return [Finding("self-check", text, problem=True, data={"ok": False, "wrong": wrong})]
    text = "passed: quantization and product give the expected bytes"
    return [Finding("self-check", text, data={"ok": True})]


def _driver_devices(cuda: ctypes.CDLL) -> tuple[int, list[dict[str, str]]]:
    """(driver version as the driver writes it, its GPUs)."""

    def check(call: str, status: int) -> None:
        if status:
            raise OSError(f"{call} returned CUDA error {status}")

    version, count = ctypes.c_int(), ctypes.c_int()
    check("cuDriverGetVersion", cuda.cuDriverGetVersion(ctypes.byref(version)))
    check("cuInit", cuda.cuInit(0))
    check("cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count)))
    devices = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        check("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), index))
        check("cuDeviceGetName", cuda.cuDeviceGetName(name, len(name), device))
        capability = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
            value = ctypes.c_int()
            status = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            check("cuDeviceGetAttribute", status)
            capability.append(str(value.value))
        devices.append({"name": name.value.decode(), "compute_capability": ".".join(capability)})
    return version.value, devices


def gpu_names(library: str = "libcuda.so.1") -> list[str]:
    """Names of the GPUs that the driver sees; none without a driver."""
    try:
        return [device["name"] for device in _driver_devices(ctypes.CDLL(library))[1]]
    except (OSError, AttributeError):
        return []


def image_for(images: list[tuple[str, str]], kernel: str, capability: int) -> str | None:
    """The image of a kernel that a device of that capability loads first (driver/launch.h)."""

    def fits(image: str) -> bool:
        kind, _, target = image.partition(" sm_")
        number = int(target.rstrip("af"))
        if target.endswith("a"):
            return number == capability
        same = number // 10 == capability // 10
        return number <= capability and (same or (kind == "PTX" and not target.endswith("f")))

    def rank(image: str) -> tuple[bool, int, bool]:
        target = image.partition(" sm_")[2]
        return image.startswith("cubin"), int(target.rstrip("af")), target.endswith("f")

    fitting = [image for name, image in images if name == kernel and fits(image)]
    return max(fitting, key=rank, default=None)


def _images() -> tuple[Finding, list[tuple[str, str]]]:
    """What was compiled into the extension."""
    try:
        from jax_fp4 import _native

        images = _native.kernel_images()
    except Exception as error:  # the extension's own line says why
        return Finding("device images", f"unknown ({_reason(error)})", data={}), []
    counts: dict[str, int] = {}
    for _, image in images:
        counts[image] = counts.get(image, 0) + 1
    if not counts:
        text = "none: this build computes on the CPU only (JAX_FP4_ARCHS, or no device compilers)"
    else:
        kernels = len({kernel for kernel, _ in images})
        text = f"{kernels} kernels: " + ", ".join(f"{n} {image}" for image, n in counts.items())
    return Finding("device images", text, data=counts), images


def _gpu_use(capability: int, images: list[tuple[str, str]]) -> str:
    """What a device of that compute capability runs, and why."""
    if capability < 80:
        return "not used: the kernels need compute capability 8.0"
    quantizer = image_for(images, "quantize_nvfp4_16", capability)
    if quantizer is None:
        return "not used: this build has no image for it"
    from jax_fp4 import _native
    from jax_fp4.formats import NVFP4

    operand = f"{NVFP4.attribute()} layout=tiled"
    shape = (1, 4096, 4096, 4096)  # the family depends on the chip only
    plan = _native.plan_gemm(operand, operand, shape, (False, False), "bfloat16", capability, 100)
    product = image_for(images, plan["kernel"], capability)
    family = plan["kernel"].partition("_nvfp4")[0]
    products = f"products by {family} from {product}" if product else "no products"
    return f"quantizers from {quantizer}, {products}"


def _gpu(library: str = "libcuda.so.1") -> list[Finding]:
    found, images = _images()
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        text = f"none: {library} cannot be loaded (no GPU is needed)"
        return [Finding("gpu driver", text, data={"found": False, "devices": []}), found]
    try:
        number, devices = _driver_devices(cuda)
    except (OSError, AttributeError) as error:
        text = f"{library} is there but of no use ({error})"
        return [Finding("gpu driver", text, data={"found": True, "devices": []}), found]
    version = f"{number // 1000}.{number % 1000 // 10}"
    names = []
    for device in devices:
        capability = int(device["compute_capability"].replace(".", ""))
        device["use"] = _gpu_use(capability, images)
        names.append(f"{device['name']} ({device['compute_capability']}): {device['use']}")
    text = f"for CUDA {version}; {'; '.join(names) or 'no GPU'}"
    if number < 12090:
        text += "; older than CUDA 12.9: the images may not load, update the driver"
    data = {"found": True, "cuda": version, "devices": devices}
    return [Finding("gpu driver", text, data=data), found]


def examine() -> list[Finding]:
    """Everything the report says, in its order."""
    backend = [*_extension(), *_cpu()]
    if any(finding.problem for finding in backend):
        check = [Finding("self-check", "not run: the extension is of no use", data={"ok": False})]
    else:
        check = _self_check()
    return [*_versions(), *backend, *_gpu(), *check]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; the exit code is 1 if the CPU backend cannot work."""
    findings = examine()
    problems = [f"{f.topic}: {f.text}" for f in findings if f.problem]
    if arguments.json:
        topics = {f.topic: {"text": f.text, "problem": f.problem, "data": f.data} for f in findings}
        print(json.dumps({"ok": not problems, "problems": problems, "findings": topics}, indent=1))
        return 1 if problems else 0
    width = max(len(f.topic) for f in findings)
    for finding in findings:
        print(f"{'!' if finding.problem else ' '} {finding.topic:<{width}}  {finding.text}")
    print(
        f"\n{len(problems)} problem(s), marked with !" if problems else "\neverything needed works"
    )
    return 1 if problems else 0
