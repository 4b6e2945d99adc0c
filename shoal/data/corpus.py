"""A corpus on disk as a stream of pieces of documents, in an order and cut that depend on the files alone."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import DataError, nearest, setting

_BLOCK_BYTES = 1 << 20
PIECE_CHARS = 1 << 18


@dataclass(frozen=True)
class Piece:
    """Text of one document, whether the document ends with it, and the bytes of the corpus read so far."""

    text: str
    ends_document: bool
    bytes_read: int


@dataclass(frozen=True)
class Corpus:
    """Files of documents. Make one with ``Corpus.find``.

    In JSONL (``*.jsonl``) each line is an object, and its ``field`` a document. Any other file is text: a
    document a file, or with ``separator`` what lies between its occurrences. Documents of nothing but white
    space are left out.
    """

    files: tuple[Path, ...]
    size: int
    field: str = "text"
    separator: str | None = None

    @staticmethod
    def find(path: Path, *, field: str = "text", separator: str | None = None) -> Corpus:
        """The corpus in a file, or in all ``*.txt`` and ``*.jsonl`` in and under a folder, sorted by path.

        ``size`` is in bytes. Raises DataError when there is no such file, or not one byte in them.
        """
        if separator == "":
            raise DataError(setting("data.separator", "''", "separates nothing", "leave it out, or give a text"))
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = sorted(
                (file for file in path.rglob("*") if file.suffix.lower() in (".txt", ".jsonl") and file.is_file()),
                key=lambda file: file.relative_to(path).parts,
            )
        else:
            raise DataError(f"{path}: no such file or folder; name a text, a .jsonl, or a folder of them")
        if not files:
            raise DataError(f"{path}: no *.txt or *.jsonl in this folder")
        size = sum(file.stat().st_size for file in files)
        if size == 0:
            raise DataError(f"{path}: empty; name a text with something in it")
        return Corpus(tuple(files), size, field, separator)

    def pieces(self, limit: int = PIECE_CHARS) -> Iterator[Piece]:
        """Every document, those over ``2 * limit`` characters in several pieces, so that memory is bounded.

        A cut falls behind a lone line break where there is one. There a byte-level BPE with the usual
        pre-tokenizers cuts as well, so that its tokens are those of the whole text; another tokenizer may
        differ at that one place. Raises DataError, naming file and line or byte, for what is not UTF-8, not
        JSON, or lacks the field.
        """
        before = 0
        for file in self.files:
            is_jsonl = file.suffix.lower() == ".jsonl"
            cuts = _jsonl(file, self.field, limit) if is_jsonl else _text(file, self.separator, limit)
            for text, ends, read in cuts:
                yield Piece(text, ends, before + read)
            before += file.stat().st_size


_Cut = tuple[str, bool, int]


def _text(path: Path, separator: str | None, limit: int) -> Iterator[_Cut]:
    buffer, begun, read = "", False, 0
    for block, read in _blocks(path):
        *whole, buffer = (buffer + block).split(separator) if separator else [buffer + block]
        for text in whole:
            if begun or text.strip():
                yield from _pieces(text, limit, read)
            begun = False
        # What is kept is longer than a separator, half of which may lie in the next block.
        while len(buffer) > 2 * max(limit, len(separator or "")):
            seam = _seam(buffer, 0, limit)
            yield buffer[:seam], False, read
            buffer, begun = buffer[seam:], True
    if begun or buffer.strip():
        yield from _pieces(buffer, limit, read)


def _blocks(path: Path) -> Iterator[tuple[str, int]]:
    """Blocks of decoded text, each with the bytes read up to its end."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    read = 0
    with path.open("rb") as file:
        more = True
        while more:
            raw = file.read(_BLOCK_BYTES)
            read, more = read + len(raw), bool(raw)
            try:
                text = decoder.decode(raw, final=not more)
            except UnicodeDecodeError as error:
                at = read - len(error.object) + error.start
                problem = f"byte {at} is not UTF-8 ({error.reason})"
                raise DataError(f"{path}: {problem}; convert the file to UTF-8") from None
            yield text, read


def _jsonl(path: Path, field: str, limit: int) -> Iterator[_Cut]:
    read = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            read += len(line)
            if line.isspace():
                continue
            text = _document(line, field, f"{path}, line {number}")
            if text.strip():
                yield from _pieces(text, limit, read)


def _document(line: bytes, field: str, where: str) -> str:
    """The document in one line of JSONL."""
    try:
        record = json.loads(line.decode("utf-8-sig").rstrip())
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at character {error.pos + 1}"
        raise DataError(f"{where}: not JSON ({problem}); each line must be one object") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: cannot be read ({error}); each line must be one JSON object in UTF-8") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: {type(record).__name__} instead of an object with a field '{field}'")
    if field not in record:
        has = ", ".join(record) or "none"
        raise DataError(f"{where}: no field '{field}'{nearest(field, record)}; the line has {has}")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field '{field}' is {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: field '{field}' has half of a surrogate pair, which is no text") from None
    return text


def _pieces(document: str, limit: int, read: int) -> Iterator[_Cut]:
    start = 0
    while len(document) - start > 2 * limit:
        seam = _seam(document, start, limit)
        yield document[start:seam], False, read
        start = seam
    yield document[start:], True, read


def _seam(text: str, start: int, limit: int) -> int:
    """Where to cut ``text`` in (start, start + limit]: behind the last lone line break of the second half."""
    end = start + limit
    while (at := text.rfind("\n", start + limit // 2, end)) > start:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
        end = at
    return start + limit
