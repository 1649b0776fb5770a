"""Which PTX the simulated driver finds in images: text, cubins with PTX behind, fat binaries."""

import ctypes
import struct
from collections.abc import Callable

import pytest

from support import nvrtc
from support.stand_in import Driver, DriverError

MARKER = b"JAX_FP4_PTX_TEXT"


def ptx(target: str, name: str) -> bytes:
    """A module whose only entry has the given name."""
    head = f"// .target sm_50\n  .version 8.8\n.target {target}, texmode_independent\n"
    return (head + f".address_size 64\n.visible .entry {name}() {{ ret; }}\n").encode()


PLAIN = ptx("sm_80", "plain")


def cubin(sections_last: bool = True) -> bytes:
    """An ELF64 file of a header, a section table with a section without bytes, and contents."""
    contents = b"machine code" + bytes(4)
    table = 64 + len(contents) if sections_last else 64
    start = 64 if sections_last else 64 + 3 * 64
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, table, 0, 64, 56, 0, 64, 3, 0)
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, start, len(contents), 0, 0, 1, 0)
    sections += struct.pack("<IIQQQQIIQQ", 0, 8, 0, 0, start, 1 << 20, 0, 0, 1, 0)
    return header + (contents + sections if sections_last else sections + contents)


def with_ptx(image: bytes, text: bytes) -> bytes:
    image += bytes(-len(image) % 8)
    return image + MARKER + struct.pack("<Q", len(text)) + text + b"\0"


def fat_entry(kind: int, chip: int, payload: bytes, compressed: int = 0) -> bytes:
    """As NVIDIA's fatbinary 13.5 writes it: 80 bytes of header, the payload padded to 8 bytes."""
    payload += bytes(8 - len(payload) % 8)
    head = struct.pack("<HHIQIIHHI", kind, 0x101, 80, len(payload), compressed, 64, 8, 8, chip)
    return head + bytes(80 - len(head)) + payload


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def entry_of(device: str, image: bytes) -> str:
    """The name of the kernel that a device takes from an image."""
    driver = Driver(device)
    driver.start()
    module = driver.load(image)
    for name in ("plain", "family", "exact", "newer"):
        try:
            driver.handle("cuModuleGetFunction", module, name.encode())
            return name
        except DriverError:
            continue
    raise AssertionError("no known entry")


@pytest.mark.parametrize("sections_last", [True, False])
def test_ptx_behind_a_cubin_is_found(sections_last: bool) -> None:
    """The end of an ELF file is that of its last table or section with bytes in it."""
    assert entry_of("100a", with_ptx(cubin(sections_last), PLAIN)) == "plain"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100a", "sm_120a"])
def test_ptx_behind_a_real_cubin_is_found(architecture: str) -> None:
    """The same of what NVIDIA's compiler writes, whose length is no multiple of 8 everywhere."""
    image = nvrtc.cubin('extern "C" __global__ void other(int* x) { *x = 1; }', architecture)
    assert entry_of("100a", with_ptx(image, PLAIN)) == "plain"


def test_a_fat_binary_gives_the_nearest_ptx() -> None:
    """Of what runs on the device, the highest chip; of one chip, the most specific target."""
    texts = {
        name: ptx(target, name)
        for name, target in (
            ("plain", "sm_80"), ("family", "sm_100f"), ("exact", "sm_100a"), ("newer", "sm_110"),
        )
    }  # fmt: skip
    image = fatbin(fat_entry(2, 100, cubin()), *[fat_entry(1, 0, text) for text in texts.values()])
    taken = {device: entry_of(device, image) for device in ("80", "100a", "103a", "120a")}
    assert taken == {"80": "plain", "100a": "exact", "103a": "family", "120a": "newer"}


def test_the_wrapper_of_a_fat_binary_is_followed() -> None:
    """What nvcc registers points to the container."""
    body = ctypes.create_string_buffer(fatbin(fat_entry(1, 80, PLAIN)))
    wrapper = struct.pack("<IIQQ", 0x466243B1, 1, ctypes.addressof(body), 0)
    assert entry_of("100a", wrapper) == "plain"


def damaged_length() -> bytes:
    image = bytearray(with_ptx(cubin(), PLAIN))
    at = image.index(MARKER) + len(MARKER)
    image[at : at + 8] = struct.pack("<Q", len(PLAIN) - 1)
    return bytes(image)


@pytest.mark.parametrize(
    ("image", "code", "complaint"),
    [
        (lambda: cubin() + bytes(32), 200, "a cubin without PTX behind it"),
        (damaged_length, 200, "does not end where its length says"),
        (lambda: fatbin(fat_entry(2, 90, cubin())), 200, "only machine code for chips 90;"),
        (lambda: fatbin(), 200, "the fat binary has no PTX;"),
        (lambda: fatbin(fat_entry(1, 100, b"(./", 3)), 200, r"chip 100\) is compressed.*none`"),
        (lambda: fatbin(fat_entry(1, 80, PLAIN)[:-8]), 200, "an entry is longer"),
        (lambda: b"hello", 200, "is no PTX text"),
        (lambda: b"", 200, "is no PTX text"),
        (lambda: b".version 8.8\n.address_size 64\n", 218, "has no .target"),
        (lambda: fatbin(fat_entry(1, 0, PLAIN.replace(b"80", b"120a"))), 209, "is for sm_120a"),
    ],
)  # fmt: skip
def test_other_images_are_refused(image: Callable[[], bytes], code: int, complaint: str) -> None:
    """The text says what the image is, and how to make one that runs."""
    driver = Driver()
    driver.start()
    with pytest.raises(DriverError, match=complaint) as error:
        driver.load(image() + bytes(64))
    assert error.value.code == code
