"""Write a token store: streamed to a folder aside, synced, renamed. A half-written one is never seen."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from shoal.data.store import COUNTS, DOCUMENTS, TOKENIZER, TOKENS, FileMeta, Meta
from shoal.errors import DataError


class StoreWriter:
    """What ``write_store`` hands out: takes the tokens in order, and holds none of them."""

    def __init__(self, files: dict[str, _SyncedFile], dtype: np.dtype[Any]) -> None:
        self.n_tokens, self.n_documents, self.n_ended, self.n_counted = 0, 0, 0, 0
        self._tokens, self._documents, self._counts = files[TOKENS], files[DOCUMENTS], files.get(COUNTS)
        self._dtype = dtype
        self._documents.write(np.zeros(1, "<i8").tobytes())

    def append(
        self,
        tokens: NDArray[np.integer[Any]],
        ends: NDArray[np.int64],
        counts: NDArray[np.bool_] | None = None,
    ) -> None:
        """Add ``tokens``; ``ends`` (rising) are the places among them just behind a document's last token, and
        ``counts`` [tokens] says which count in the loss: a store with a mask needs it."""
        if self._counts is not None:
            assert counts is not None
            assert len(counts) == len(tokens)
            self._counts.write(counts.astype(np.uint8).tobytes())
            self.n_counted += int(counts.sum())
        if len(ends):
            self.n_ended = self.n_tokens + int(ends[-1])
        self._tokens.write(tokens.astype(self._dtype, copy=False).tobytes())
        self._documents.write((self.n_tokens + ends).astype("<i8").tobytes())
        self.n_tokens += len(tokens)
        self.n_documents += len(ends)


@contextmanager
def write_store(
    path: Path,
    *,
    tokenizer: Path,
    vocab: int,
    eod: int,
    masked: bool = False,
    template: str | None = None,
    overwrite: bool = False,
) -> Iterator[StoreWriter]:
    """A store at ``path``, published when the block ends without an error; otherwise nothing is left behind.

    ``tokenizer`` is the tokenizer.json to keep with it, ``vocab`` its entries, ``eod`` the id that ends each
    document. With ``masked`` it says of every token whether it counts; ``template`` is what wrote its conversations.

    Raises DataError when ``path`` exists (with ``overwrite``: is not a token store), and when no token was written, or
    none that counts.
    """
    check_free(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.parent / f".{path.name}.{uuid4().hex[:8]}"
    aside.mkdir()
    try:
        dtype = np.dtype("<u2" if vocab <= 2**16 else "<u4")
        with ExitStack() as stack:
            names = (TOKENS, DOCUMENTS, TOKENIZER, *((COUNTS,) if masked else ()))
            files = {name: stack.enter_context(_SyncedFile(aside / name)) for name in names}
            files[TOKENIZER].write(tokenizer.read_bytes())
            writer = StoreWriter(files, dtype)
            yield writer
        if writer.n_tokens == 0:
            raise DataError(f"{path}: nothing to store, the input has no text")
        if masked and writer.n_counted == 0:
            problem = "no token would count in the loss, the input has not one message of the assistant"
            raise DataError(f"{path}: {problem}; see that answers have the role 'assistant'")
        assert writer.n_ended == writer.n_tokens, "tokens behind the end of the last document"
        meta = Meta(
            dtype="uint16" if dtype.itemsize == 2 else "uint32",
            tokens=writer.n_tokens,
            documents=writer.n_documents,
            vocab=vocab,
            end_of_document=eod,
            tokenizer_sha256=sha256((aside / TOKENIZER).read_bytes()).hexdigest(),
            files={name: FileMeta(size=file.size, crc32=file.crc) for name, file in files.items()},
            counted=writer.n_counted if masked else None,
            template=template,
        )
        with _SyncedFile(aside / "meta.json") as file:
            file.write(meta.model_dump_json(indent=2, exclude_none=True).encode() + b"\n")
        _publish(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise DataError when a store cannot be put at ``path``: worth asking before hours of work."""
    if path.exists() and not overwrite:
        raise DataError(f"{path}: exists already; name another folder, or replace it with --overwrite")
    if path.exists() and not (path / "meta.json").is_file():
        raise DataError(f"{path}: exists and is no token store; name another folder, this one is left alone")


def _publish(aside: Path, path: Path) -> None:
    """Rename ``aside`` to ``path``, and see to it that the names survive a power cut."""
    _sync_folder(aside)
    old = aside.with_name(aside.name + ".old")
    if path.exists():
        path.rename(old)
    aside.rename(path)
    _sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _SyncedFile:
    """A new file that counts its bytes and their CRC-32 as it is written, and is on the disk once closed."""

    def __init__(self, path: Path) -> None:
        self.size, self.crc = 0, 0
        self._file = path.open("xb")

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)

    def __enter__(self) -> _SyncedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
