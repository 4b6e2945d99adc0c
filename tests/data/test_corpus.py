from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import pieces as pieces_module
from shoal.data.corpus import Corpus
from shoal.errors import DataError


def documents(corpus: Corpus, limit: int = 1 << 18) -> list[str]:
    """The documents put together from their pieces."""
    found, begun = [], ""
    for piece in corpus.pieces(limit):
        begun += piece.text
        if piece.ends_document:
            found.append(begun)
            begun = ""
    assert begun == ""
    return found


def test_a_text_file_is_a_document_exactly(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Grüße\r\n\n\nund\tTschüß \n".encode())
    assert documents(Corpus.find(tmp_path / "a.txt")) == ["Grüße\r\n\n\nund\tTschüß \n"]


def test_a_separator_divides_and_blank_documents_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("---one---  \n---two\n---three---")
    assert documents(Corpus.find(tmp_path / "a.txt", separator="---")) == ["one", "two\n", "three"]


def test_jsonl_gives_the_field_of_each_line(tmp_path: Path) -> None:
    lines = [{"text": "one\ntwo", "id": 1}, {"id": 2, "text": "drei ü 🐟"}, {"text": " "}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    assert documents(Corpus.find(tmp_path / "a.jsonl")) == ["one\ntwo", "drei ü 🐟"]
    (tmp_path / "b.jsonl").write_text('{"body": "x"}\n')
    assert documents(Corpus.find(tmp_path / "b.jsonl", field="body")) == ["x"]


def test_a_folder_is_read_in_order_of_path(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b.txt").write_text("last")
    (tmp_path / "b" / "z.txt").write_text("third")
    (tmp_path / "b" / "c.jsonl").write_text('{"text": "second"}')
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "a.bin").write_text("no text")
    corpus = Corpus.find(tmp_path)
    assert documents(corpus) == ["first", "second", "third", "last"]
    assert [piece.bytes_read for piece in corpus.pieces()] == [5, 23, 28, 32]
    assert corpus.size == 32


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text("ab \n-ü", max_size=60), limit=st.integers(1, 8), block=st.integers(1, 9))
def test_pieces_and_blocks_of_any_size_give_the_same_documents(
    tmp_path_factory: pytest.TempPathFactory, text: str, limit: int, block: int
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_bytes(("x" + text).encode())
    (folder / "b.jsonl").write_text(json.dumps({"text": "x" + text}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "_BLOCK_BYTES", block)
        for separator in ("--", "\n\n", None):
            expected = ("x" + text).split(separator) if separator else ["x" + text]
            corpus = Corpus.find(folder / "a.txt", separator=separator)
            assert documents(corpus, limit) == [document for document in expected if document.strip()]
            longest = max(len(piece.text) for piece in corpus.pieces(limit))
            assert longest <= 2 * max(limit, 2)
    assert documents(Corpus.find(folder / "b.jsonl"), limit) == ["x" + text]


def test_a_long_document_is_cut_behind_lone_line_breaks(tmp_path: Path) -> None:
    line = "In the beginning God created the heaven and the earth.\n"
    (tmp_path / "a.txt").write_text(line * 100 + "\n" + line * 100)
    pieces = list(Corpus.find(tmp_path / "a.txt").pieces(limit=500))
    assert len(pieces) > 15
    for piece, following in pairwise(pieces):
        assert piece.text.endswith(".\n")
        assert following.text.startswith("In")
        assert 250 < len(piece.text) <= 500


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', r"a\.jsonl, line 2: not JSON \(.* at character 13\)"),
        (b'["x"]', r"a\.jsonl, line 2: list instead of an object"),
        (b'{"texts": "x", "id": 1}', r"2: no field 'text' \(did you mean 'texts'\?\); there is texts, id"),
        (b'{"text": 5}', r"line 2: field 'text' is int, not a string"),
        (b'{"text": "\xff"}', r"line 2: cannot be read \('utf-8' codec"),
        (b'{"text": "\\ud800"}', r"line 2: field 'text' has half of a surrogate pair"),
        (b"[" * 100_000, r"line 2: (cannot be read|not JSON)"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        documents(Corpus.find(tmp_path))


def test_a_byte_that_is_not_utf8_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "_BLOCK_BYTES", 4)
    (tmp_path / "a.txt").write_bytes("ßßßß".encode() + b"abc\xffdef")
    with pytest.raises(DataError, match=r"a\.txt: byte 11 is not UTF-8 \(invalid start byte\)"):
        documents(Corpus.find(tmp_path))
    (tmp_path / "a.txt").write_bytes(b"abcd\xc3")
    with pytest.raises(DataError, match=r"a\.txt: byte 4 is not UTF-8 \(unexpected end of data\)"):
        documents(Corpus.find(tmp_path))


def test_missing_and_empty_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing: no such file or folder"):
        Corpus.find(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"no \*\.txt, \*\.jsonl, \*\.parquet in"):
        Corpus.find(tmp_path)
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="empty"):
        Corpus.find(tmp_path)
    with pytest.raises(DataError, match=r"data\.separator"):
        Corpus.find(tmp_path, separator="")
