"""What can be converted: safetensors, .npz files, orbax checkpoints. All as named matrices.

A source reads pieces of a tensor, so that a conversion never holds a whole one (safetensors), or
holds one at a time (the others, whose files have no way to read a piece).
"""

from __future__ import annotations

import abc
import dataclasses
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jax_fp4.checkpoint import Checkpoint, CheckpointError
from jax_fp4.checkpoint.header import DTYPES, fail, numpy_dtype

_OTHER_WAY = "convert safetensors, .npz or an orbax folder"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a source: its dtype (NumPy's name) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the source."""
        return math.prod(self.shape) * np.dtype(self.numpy).itemsize

    @property
    def numpy(self) -> np.dtype:
        """NumPy's dtype."""
        return next(d.numpy for d in DTYPES.values() if d.numpy and d.numpy.name == self.dtype)


class Source(abc.ABC):
    """Tensors by name.

    Attributes:
        path: the file or folder.
        tensors: what it holds, in its order.
        metadata: strings of a safetensors file.
    """

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    @abc.abstractmethod
    def rows(self, name: str, axis: int, lead: int, first: int, count: int) -> np.ndarray:
        """Rows of a matrix of a tensor [..., R, C], the contracted axis last.

        Args:
            name: the tensor.
            axis: -1: rows are rows. -2: rows are columns.
            lead: number of the matrix, leading dimensions flattened.
            first: first row.
            count: rows.

        Returns:
            [count, length].
        """

    @abc.abstractmethod
    def data(self, name: str, first: int, count: int) -> np.ndarray:
        """Bytes ``first`` to ``first + count`` of a tensor, uint8."""

    @abc.abstractmethod
    def files(self) -> list[Path]:
        """The files that the tensors are in."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes what is open."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Safetensors(Source):
    def __init__(self, path: Path) -> None:
        self.path = path
        self._checkpoint = Checkpoint(path)
        self.metadata = {
            k: v for k, v in self._checkpoint.metadata.items() if not k.startswith("jax_fp4")
        }
        self.tensors = {}
        for name, entry in self._checkpoint.entries.items():
            dtype = DTYPES[entry.dtype].numpy
            if self._checkpoint.quantized or dtype is None:
                got = next(iter(self._checkpoint.quantized), f"{name} of dtype {entry.dtype}")
                way_out = "take the checkpoint that it was made from"
                self.close()
                fail(path, None, "a checkpoint that is not quantized", got, way_out)
            self.tensors[name] = Tensor(name, dtype.name, entry.shape)
        self._whole: tuple[str, np.ndarray] | None = None

    def rows(self, name: str, axis: int, lead: int, first: int, count: int) -> np.ndarray:
        tensor = self.tensors[name]
        height, width = tensor.shape[-2:]
        if axis == -2:
            # The rows wanted are columns here: read the matrix once, and keep it.
            key = f"{lead} {name}"
            if self._whole is None or self._whole[0] != key:
                self._whole = None
                self._whole = (key, self.rows(name, -1, lead, 0, height))
            return np.ascontiguousarray(self._whole[1][:, first : first + count].T)
        itemsize = tensor.numpy.itemsize
        row_bytes = width * itemsize
        data = self.data(name, (lead * height + first) * row_bytes, count * row_bytes)
        return data.view(tensor.numpy).reshape(count, width)

    def data(self, name: str, first: int, count: int) -> np.ndarray:
        piece = np.empty(count, np.uint8)
        self._checkpoint.reader(name).read_into(name, first, piece.data)
        return piece

    def files(self) -> list[Path]:
        return [reader.path for reader in self._checkpoint.files.values()]

    def close(self) -> None:
        self._checkpoint.close()


class _Whole(Source):
    """Sources that read a tensor at a time; the last one is kept."""

    def __init__(self) -> None:
        self.metadata = {}
        self._last: tuple[str, np.ndarray] | None = None

    @abc.abstractmethod
    def _read(self, name: str) -> np.ndarray:
        """The tensor."""

    def _array(self, name: str) -> np.ndarray:
        if self._last is None or self._last[0] != name:
            self._last = None
            tensor = self.tensors[name]
            array = self._read(name)
            if not array.flags.c_contiguous:
                array = np.ascontiguousarray(array)
            if (array.dtype.name, array.shape) != (tensor.dtype, tensor.shape):
                expected = f"{tensor.dtype}{list(tensor.shape)}"
                fail(self.path, name, expected, f"{array.dtype.name}{list(array.shape)}")
            self._last = (name, array)
        return self._last[1]

    def rows(self, name: str, axis: int, lead: int, first: int, count: int) -> np.ndarray:
        array = self._array(name)
        matrix = array.reshape(-1, *array.shape[-2:])[lead]
        if axis == -1:
            return matrix[first : first + count]
        return np.ascontiguousarray(matrix[:, first : first + count].T)

    def data(self, name: str, first: int, count: int) -> np.ndarray:
        return self._array(name).reshape(-1).view(np.uint8)[first : first + count]


class _Npz(_Whole):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.tensors = {}
        try:
            self._handle = open(path, "rb")
        except OSError as error:
            fail(path, None, "a file that can be read", str(error.strerror), "check the path")
        try:
            self._file = np.load(self._handle, allow_pickle=False)
            if not isinstance(self._file, np.lib.npyio.NpzFile):
                fail(path, None, "an .npz file", "an .npy file", _OTHER_WAY)
            for name in self._file.files:
                self.tensors[name] = self._described(name)
        except BaseException as error:
            self._handle.close()
            self._failed(None, error)

    def _failed(self, name: str | None, error: BaseException) -> NoReturn:
        damaged = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
        if isinstance(error, CheckpointError) or not isinstance(error, damaged):
            raise error
        fail(self.path, name, "readable as .npz", f"{type(error).__name__}: {error}"[:160])

    def _described(self, name: str) -> Tensor:
        """Dtype and shape from the member's own header, without its data."""
        with self._file.zip.open(f"{name}.npy") as member:
            version = np.lib.format.read_magic(member)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }.get(version)
            if read is None:
                fail(self.path, name, "an .npy member of version 1 or 2", f"version {version}")
            shape, _, dtype = read(member)
        if numpy_dtype(dtype) is None:
            way_out = "NumPy files lose bfloat16: save float32, or safetensors"
            fail(self.path, name, "of a dtype that safetensors has", str(dtype), way_out)
        return Tensor(name, dtype.name, tuple(shape))

    def _read(self, name: str) -> np.ndarray:
        try:
            return self._file[name]
        except Exception as error:
            self._failed(name, error)

    def files(self) -> list[Path]:
        return [self.path]

    def close(self) -> None:
        self._file.close()
        self._handle.close()


class _Orbax(_Whole):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        try:
            from orbax import checkpoint as orbax
        except ImportError:
            way_out = "pip install 'jax-fp4[checkpoint]'"
            fail(path, None, "read by orbax-checkpoint", "no such package", way_out)
        self._orbax = orbax
        self._handler = orbax.PyTreeCheckpointer()
        try:
            metadata = self._handler.metadata(path.absolute()).item_metadata
            tree = getattr(metadata, "tree", metadata)
        except Exception as error:  # what orbax raises for a damaged folder is not documented
            fail(path, None, "an orbax checkpoint", f"{type(error).__name__}: {error}"[:160])
        self._keys: dict[str, tuple[Any, ...]] = {}
        self._tree = tree
        self.tensors = {}
        self._describe((), tree)

    def _describe(self, keys: tuple[Any, ...], node: Any) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                self._describe((*keys, key), value)
        elif isinstance(node, list | tuple):
            for key, value in enumerate(node):
                self._describe((*keys, key), value)
        elif hasattr(node, "dtype") and hasattr(node, "shape"):
            name = ".".join(map(str, keys))
            dtype = np.dtype(node.dtype)
            if numpy_dtype(dtype) is None:
                fail(self.path, name, "of a dtype that safetensors has", str(dtype), "convert it")
            if name in self.tensors:
                fail(self.path, name, "one tensor", "two of this name", "rename one")
            self.tensors[name] = Tensor(name, dtype.name, tuple(node.shape))
            self._keys[name] = keys

    def _read(self, name: str) -> np.ndarray:
        orbax, keys = self._orbax, self._keys[name]

        def template(node: Any, at: tuple[Any, ...], leaf: Any) -> Any:
            """The tree with ``leaf`` at the wanted place and orbax's placeholder elsewhere."""
            if isinstance(node, dict):
                return {key: template(value, (*at, key), leaf) for key, value in node.items()}
            if isinstance(node, list | tuple):
                return [template(value, (*at, key), leaf) for key, value in enumerate(node)]
            return leaf if at == keys else orbax.PLACEHOLDER

        item = np.empty((0,), self.tensors[name].numpy)
        kind = orbax.RestoreArgs(restore_type=np.ndarray)
        try:
            found = self._handler.restore(
                self.path.absolute(),
                args=orbax.args.PyTreeRestore(
                    item=template(self._tree, (), item),
                    restore_args=template(self._tree, (), kind),
                ),
            )
            for key in keys:
                found = found[key]
        except Exception as error:
            fail(self.path, name, "readable by orbax", f"{type(error).__name__}: {error}"[:160])
        return np.asarray(found)

    def files(self) -> list[Path]:
        return sorted(p for p in self.path.rglob("*") if p.is_file())

    def close(self) -> None:
        self._handler.close()


def open_source(path: Path) -> Source:
    """The source in a file or folder, by what it looks like.

    Raises:
        CheckpointError: it is none, or damaged.
    """
    if path.is_dir():
        if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
            return _Safetensors(path)
        if any((path / name).exists() for name in ("_METADATA", "_CHECKPOINT_METADATA", "default")):
            return _Orbax(path)
        names = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
        fail(path, None, "a folder with safetensors or an orbax checkpoint", names, _OTHER_WAY)
    if path.suffix == ".npz":
        return _Npz(path)
    if path.suffix == ".safetensors":
        return _Safetensors(path)
    got = path.name if path.exists() else "no such file"
    fail(path, None, "a .safetensors or .npz file or a folder", got, _OTHER_WAY)
