"""Text in pieces: a document of any length is read, and handed on, a bounded part at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import DataError

_BLOCK_BYTES = 1 << 20
PIECE_CHARS = 1 << 18


@dataclass(frozen=True)
class Piece:
    """A part of one document.

    ``text``           is encoded as it stands: the name of a special token in it is ordinary text
    ``ends_document``  whether the document ends with it
    ``bytes_read``     bytes of the corpus read so far
    ``then``           name of the special token that follows the text, if one does
    ``counts``         whether its tokens, ``then`` included, count in the loss
    """

    text: str
    ends_document: bool
    bytes_read: int
    then: str | None = None
    counts: bool = True


Cut = tuple[str, bool, int]
"""The text of a piece, whether it ends its document, and the bytes of its file read so far."""


def text_file(path: Path, separator: str | None, limit: int) -> Iterator[Cut]:
    """A text file in pieces: one document, or with ``separator`` what lies between its occurrences.

    Documents of nothing but white space are left out. Raises DataError, naming the byte, for what is not UTF-8.
    """
    buffer, begun, read = "", False, 0
    for block, read in _blocks(path):
        *whole, buffer = (buffer + block).split(separator) if separator else [buffer + block]
        for text in whole:
            if begun or text.strip():
                yield from cut(text, limit, read)
            begun = False
        # What is kept is longer than a separator, half of which may lie in the next block.
        while len(buffer) > 2 * max(limit, len(separator or "")):
            seam = _seam(buffer, 0, limit)
            yield buffer[:seam], False, read
            buffer, begun = buffer[seam:], True
    if begun or buffer.strip():
        yield from cut(buffer, limit, read)


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


def cut(document: str, limit: int, read: int) -> Iterator[Cut]:
    """A document in pieces of at most ``2 * limit`` characters, cut behind a lone line break where there is one.

    There a byte-level BPE with the usual pre-tokenizers cuts as well, so that its tokens are those of the whole text;
    another tokenizer may differ at that one place.
    """
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
