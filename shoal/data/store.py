"""The token store: a corpus as one memory-mapped array of token ids, with the bounds of its documents.

A folder of four or five files, numbers little endian:

    tokens.bin      uint16 when the vocabulary fits, else uint32; the documents one after another
    documents.bin   int64, where each document starts, and at last the number of tokens
    counts.bin      uint8 a token, 1 where it counts in the loss and 0 elsewhere; absent where all count
    tokenizer.json  the tokenizer that made it, byte for byte
    meta.json       counts, vocabulary, and the size and CRC-32 of each of the others
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.data import megatron
from shoal.errors import DataError, setting

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

TOKENS, DOCUMENTS, COUNTS = "tokens.bin", "documents.bin", "counts.bin"
TOKENIZER: Literal["tokenizer.json"] = "tokenizer.json"
_CHUNK = 1 << 24


class FileMeta(BaseModel):
    """One file of a store: its size in bytes and its CRC-32."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    size: int
    crc32: int


class Meta(BaseModel):
    """``meta.json``. Keys that came later are left out where they say nothing, so that fingerprints stay."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal["shoal tokens"] = "shoal tokens"
    version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    tokens: int
    documents: int
    vocab: int
    end_of_document: int
    tokenizer: Literal["tokenizer.json"] = TOKENIZER
    tokenizer_sha256: str
    files: dict[str, FileMeta]
    counted: int | None = None
    template: str | None = None


@dataclass(frozen=True, eq=False)
class TokenStore:
    """A corpus of tokens, opened read-only.

    ``tokens``     1-D, memory-mapped, of an integer dtype
    ``documents``  int64 [D+1], where each document starts, then the number of tokens
    ``counts``     uint8 [tokens], memory-mapped, 1 where a token counts in the loss; None where all do
    ``vocab``      entries of the tokenizer (one more than its largest id); None for Megatron
    ``eod``        the id of the token that ends each document; None for Megatron
    ``fingerprint``  16 hex digits that identify the content
    """

    path: Path
    tokens: NDArray[np.integer[Any]]
    documents: NDArray[np.int64]
    counts: NDArray[np.uint8] | None
    vocab: int | None
    eod: int | None
    fingerprint: str
    tokenizer_path: Path | None
    _meta: Meta | None

    @staticmethod
    def open(path: Path) -> TokenStore:
        """Open a store, or Megatron's ``.bin``/``.idx`` pair named with or without its suffix.

        Raises DataError when there is neither, and when a file is missing, malformed or not of the recorded
        size. Contents are not read: see ``verify``.
        """
        if (path / "meta.json").is_file():
            return _open(path, _read_meta(path / "meta.json"))
        if not megatron.index_path(path).is_file():
            wanted = "a folder with meta.json (made by `shoal data`) or Megatron's .bin and .idx"
            raise DataError(f"{path}: no token store here; expected {wanted}")
        pair = megatron.read(path)
        return TokenStore(path, pair.tokens, pair.documents, None, None, None, pair.fingerprint, None, None)

    def __len__(self) -> int:
        """Tokens in the store."""
        return len(self.tokens)

    @property
    def n_counted(self) -> int:
        """Tokens that count in the loss."""
        return len(self) if self._meta is None or self._meta.counted is None else self._meta.counted

    @property
    def template(self) -> str | None:
        """The name of the template that wrote its conversations; None where it holds none."""
        return None if self._meta is None else self._meta.template

    def as_json(self) -> dict[str, Any]:
        """What it holds, for scripts; None for what it does not record."""
        return {
            "path": str(self.path),
            "tokens": len(self),
            "documents": len(self.documents) - 1,
            "vocabulary": self.vocab,
            "tokens_that_count": self.n_counted,
            "template": self.template,
            "fingerprint": self.fingerprint,
        }

    def verify(self, progress: Progress | None = None) -> None:
        """Read every file and compare its CRC-32, at about 1 GB/s. Raises DataError naming one that differs.

        Megatron's format records no checksum: its index was checked when it was opened, and there is no more
        to do.
        """
        if self._meta is None:
            return
        done, total = 0, sum(file.size for file in self._meta.files.values())
        for name, recorded in self._meta.files.items():
            crc = 0
            with (self.path / name).open("rb") as file:
                while chunk := file.read(_CHUNK):
                    crc = zlib.crc32(chunk, crc)
                    done += len(chunk)
                    if progress:
                        progress(done, total)
            if crc != recorded.crc32:
                found = f"CRC-32 is {crc:08x}, expected {recorded.crc32:08x}"
                raise DataError(f"{self.path / name}: {found}; the file is damaged, make the store again")

    def check_vocab(self, model_vocab: int) -> None:
        """Raise DataError when the store may hold a token that a model of ``model_vocab`` entries lacks.

        Megatron's format does not record the vocabulary: its largest token is looked for, which reads the
        whole file.
        """
        entries = self.vocab
        if entries is None:
            step = _CHUNK // self.tokens.itemsize
            parts = [self.tokens[at : at + step] for at in range(0, len(self), step)]
            if (lowest := min(int(part.min()) for part in parts)) < 0:
                raise DataError(f"{self.path}: holds the token {lowest}; tokens are 0 and more")
            entries = 1 + max(int(part.max()) for part in parts)
        if entries > model_vocab:
            problem = f"the tokens of {self.path} need {entries} entries"
            raise DataError(setting("model.vocab", model_vocab, problem, f"at least {entries}"))


def kept_tokenizer(stores: Iterable[TokenStore]) -> Path | None:
    """The tokenizer of the first of the stores that keeps one; None where none does."""
    return next((store.tokenizer_path for store in stores if store.tokenizer_path is not None), None)


def _read_meta(path: Path) -> Meta:
    try:
        meta = Meta.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path}: not the description of a token store: {where} {first['msg']}") from None
    sizes = {name: file.size for name, file in meta.files.items()}
    counted = {
        TOKENS: meta.tokens * np.dtype(meta.dtype).itemsize,
        DOCUMENTS: 8 * (meta.documents + 1),
        **({} if meta.counted is None else {COUNTS: meta.tokens}),
    }
    if meta.tokens < 1 or sizes != {**counted, meta.tokenizer: sizes.get(meta.tokenizer)}:
        raise DataError(f"{path}: its counts and the sizes of its files contradict; make the store again")
    return meta


def _open(path: Path, meta: Meta) -> TokenStore:
    for name, recorded in meta.files.items():
        file = path / name
        if not file.is_file():
            raise DataError(f"{file}: missing; make the store again")
        if (size := file.stat().st_size) != recorded.size:
            raise DataError(
                f"{file}: {size} bytes, expected {recorded.size}; truncated or changed, make the store again"
            )
    return TokenStore(
        path=path,
        tokens=np.memmap(path / TOKENS, np.dtype(meta.dtype).newbyteorder("<"), "r"),
        documents=np.memmap(path / DOCUMENTS, "<i8", "r"),
        counts=None if meta.counted is None else np.memmap(path / COUNTS, np.uint8, "r"),
        vocab=meta.vocab,
        eod=meta.end_of_document,
        fingerprint=sha256(meta.model_dump_json(exclude_none=True).encode()).hexdigest()[:16],
        tokenizer_path=path / meta.tokenizer,
        _meta=meta,
    )
