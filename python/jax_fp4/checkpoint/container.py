"""Reading and writing the tensors of one safetensors file, a tensor or a piece of one at a time."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from pathlib import Path

import numpy as np

from jax_fp4.checkpoint.header import (
    CHECKSUMS,
    DTYPES,
    CheckpointError,
    Entry,
    Header,
    fail,
    read_header,
    with_checksums,
)


class FileReader:
    """A safetensors file, its header checked and its tensors unread.

    Attributes:
        path: the file.
        header: what it holds.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file = open(self.path, "rb", buffering=0)
        except OSError as error:
            fail(self.path, None, "a file that can be read", str(error.strerror), "check the path")
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self.header = read_header(self._file, self.path, self._size)
        except OSError as error:
            self._file.close()
            fail(self.path, None, "a file that can be read", str(error.strerror), "check the path")
        except CheckpointError:
            self._file.close()
            raise
        self._checksums = self.header.checksums

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def entry(self, name: str) -> Entry:
        """The entry of a tensor."""
        entry = self.header.entries.get(name)
        if entry is None:
            fail(self.path, name, "a tensor of the file", "no such tensor", "see its header")
        return entry

    def read_into(self, name: str, at: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the tensor's bytes from byte ``at`` on."""
        entry = self.entry(name)
        assert at + len(buffer) <= entry.nbytes
        self._file.seek(self.header.data_start + entry.begin + at)
        done = 0
        while done < len(buffer):
            count = self._file.readinto(buffer[done:])
            if not count:
                got = f"{at + done} bytes"
                fail(self.path, name, f"{entry.nbytes} bytes of data", got)
            done += count

    def read(self, name: str) -> np.ndarray:
        """The tensor, with its NumPy type; packed types as uint8, the last axis counting bytes.

        Raises:
            CheckpointError: the file is shorter than it was, or the tensor's checksum is wrong.
        """
        entry = self.entry(name)
        data = np.empty(entry.nbytes, np.uint8)
        self.read_into(name, 0, data.data)
        self.check(name, zlib.crc32(data.data))
        return shaped(data, entry)

    def check(self, name: str, checksum: int) -> None:
        """``checksum`` is that of the tensor, if the file has checksums."""
        if self._checksums is not None and checksum != self._checksums[name]:
            expected = f"data with CRC-32 {self._checksums[name]:08x}"
            fail(self.path, name, expected, f"{checksum:08x}")


def shaped(data: np.ndarray, entry: Entry) -> np.ndarray:
    """Bytes uint8 [entry.nbytes] with the entry's dtype and shape."""
    dtype = DTYPES[entry.dtype]
    if dtype.numpy is not None:
        return data.view(dtype.numpy).reshape(entry.shape)
    if entry.shape and entry.shape[-1] * dtype.bits % 8 == 0:
        return data.reshape(*entry.shape[:-1], entry.shape[-1] * dtype.bits // 8)
    return data


class FileWriter:
    """Writes the tensors of one file, in any order, each in pieces from its first byte on.

    The file has its name only when it is complete: until `finish`, everything goes to ``partial``.

    Args:
        path: the file's name.
        partial: the name until then, on the same file system.
        header: what the file will hold.
        resume: go on with an existing ``partial``; `verify` says which tensors it has.
    """

    def __init__(self, path: Path, partial: Path, header: Header, *, resume: bool = False) -> None:
        self.path, self.partial, self.header = path, partial, header
        self._written: dict[str, tuple[int, int]] = {}  # bytes, and CRC-32 of them
        self._size = header.data_start + header.data_bytes
        reuse = resume and partial.exists() and partial.stat().st_size == self._size
        with self._errors():
            self._file = open(partial, "r+b" if reuse else "w+b", buffering=0)
            try:
                if not reuse:
                    self._allocate()
            except OSError:
                self.abandon()
                raise

    def _allocate(self) -> None:
        # A disk that is too small is found here, before any work.
        free = shutil.disk_usage(self.partial.parent).free
        if free < self._size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._file.truncate(self._size)

    def _errors(self) -> _WriteErrors:
        return _WriteErrors(self)

    def write(self, name: str, data: np.ndarray) -> None:
        """Appends the bytes of ``data`` to what was written of the tensor."""
        entry = self.header.entries[name]
        done, checksum = self._written.get(name, (0, 0))
        view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        assert done + len(view) <= entry.nbytes
        with self._errors():
            self._file.seek(self.header.data_start + entry.begin + done)
            rest = view
            while rest:
                rest = rest[self._file.write(rest) :]
        self._written[name] = (done + len(view), zlib.crc32(view, checksum))

    def restart(self, name: str) -> None:
        """Forgets what was written of a tensor."""
        self._written.pop(name, None)

    def verify(self, name: str, checksum: int) -> bool:
        """Whether an earlier run's tensor lies in ``partial``; it then counts as written."""
        entry = self.header.entries[name]
        self._file.seek(self.header.data_start + entry.begin)
        found, left = 0, entry.nbytes
        while left:
            piece = self._file.read(min(left, 1 << 24))
            if not piece:
                return False
            found, left = zlib.crc32(piece, found), left - len(piece)
        if found == checksum:
            self._written[name] = (entry.nbytes, checksum)
        return found == checksum

    def checksum(self, name: str) -> int:
        """CRC-32 of what was written of a tensor."""
        return self._written.get(name, (0, 0))[1]

    def finish(self) -> None:
        """Writes the header and gives the file its name."""
        for name, entry in self.header.entries.items():
            done = self._written.get(name, (0, 0))[0]
            assert done == entry.nbytes, f"{name}: {done} of {entry.nbytes} bytes written"
        header = self.header
        if CHECKSUMS in (header.metadata or {}):
            header = with_checksums(header, {name: self.checksum(name) for name in header.entries})
        with self._errors():
            self._file.seek(0)
            rest = memoryview(len(header.raw).to_bytes(8, "little") + header.raw)
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self.partial, self.path)
            sync_folder(self.path.parent)

    def close(self) -> None:
        """Closes ``partial`` and leaves it, to be resumed."""
        self._file.close()

    def abandon(self) -> None:
        """Closes and removes ``partial``."""
        self._file.close()
        self.partial.unlink(missing_ok=True)


class _WriteErrors:
    """Turns an OSError of writing into a CheckpointError that says what is missing."""

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            write_failed(self._writer.path, error, self._writer._size)


def write_failed(path: Path, error: OSError, size: int) -> None:
    """Raises the CheckpointError for an OSError while a file of ``size`` bytes was written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        try:
            free = f"{shutil.disk_usage(path.parent).free} bytes free"
        except OSError:
            free = "an unknown rest"
        way_out = "make room and call again; no file was changed"
        reason = f"{free} ({error.strerror})"
        fail(path, None, f"on a disk with room for its {size} bytes", reason, way_out)
    fail(path, None, "a file that can be written", str(error.strerror or error), "check the path")


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
