"""A one-dimensional .npy file that grows while its values come."""

import os
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import DTypeLike


class NpyWriter:
    """Appends arrays to a new file, which is a whole .npy file on the disk once the `with` block ended well.

    Args:
        path: must not exist.
        dtype: of the values; arrays are cast to it.
    """

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self._dtype, self._length = np.dtype(dtype), 0
        self._file = path.open("xb")
        self._write_header()
        self._header_bytes = self._file.tell()

    def append(self, values: np.ndarray) -> None:
        """Writes values [n] behind the others."""
        self._file.write(values.astype(self._dtype, copy=False).tobytes())
        self._length += len(values)

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                self._write_header()
                assert self._file.tell() == self._header_bytes, "numpy left no room for the length in the header"
                self._file.flush()
                os.fsync(self._file.fileno())

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
