from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal.data.store import TokenStore
from shoal.data.store_writer import write_store
from shoal.data.tokenize import byte_tokenizer
from shoal.errors import DataError

DOCUMENTS = [[1, 2, 3, 256], [4, 256], [5, 6, 7, 8, 9, 256]]
TOKENS = [token for document in DOCUMENTS for token in document]


def make(path: Path, vocab: int = 259, *, overwrite: bool = False) -> TokenStore:
    tokenizer = path.parent / "source.json"
    byte_tokenizer().save(str(tokenizer))
    with write_store(path, tokenizer=tokenizer, vocab=vocab, eod=256, overwrite=overwrite) as writer:
        writer.append(np.array(DOCUMENTS[0] + DOCUMENTS[1][:1]), np.array([4]))
        writer.append(np.array(DOCUMENTS[1][1:]), np.array([1]))
        writer.append(np.array(DOCUMENTS[2][:2]), np.array([], np.int64))
        writer.append(np.array(DOCUMENTS[2][2:]), np.array([4]))
    return TokenStore.open(path)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store = make(tmp_path / "s")
    assert store.tokens.tolist() == TOKENS
    assert store.documents.tolist() == [0, 4, 6, 12]
    assert (len(store), store.vocab, store.eod) == (12, 259, 256)
    assert isinstance(store.tokens, np.memmap)
    assert store.tokenizer_path is not None
    assert store.tokenizer_path.read_bytes() == (tmp_path / "source.json").read_bytes()
    store.verify()


@pytest.mark.parametrize(("vocab", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_the_vocabulary_chooses_the_dtype(tmp_path: Path, vocab: int, dtype: type) -> None:
    store = make(tmp_path / "s", vocab)
    assert store.tokens.dtype == dtype
    assert store.tokens.tolist() == TOKENS


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first, same, other = make(tmp_path / "a"), make(tmp_path / "b"), make(tmp_path / "c", 300)
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert len(first.fingerprint) == 16


def test_verify_reports_its_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    make(tmp_path / "s").verify(lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == calls[0][1]
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "tokenizer.json"])
def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path, name: str) -> None:
    make(tmp_path / "s")
    file = tmp_path / "s" / name
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{name}: {size - 1} bytes, expected {size}"):
        TokenStore.open(tmp_path / "s")


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "tokenizer.json"])
def test_a_flipped_bit_is_found_by_verify(tmp_path: Path, name: str) -> None:
    make(tmp_path / "s")
    file = tmp_path / "s" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: CRC-32 is [0-9a-f]{{8}}, expected"):
        TokenStore.open(tmp_path / "s").verify()


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    make(tmp_path / "s")
    (tmp_path / "s" / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: missing"):
        TokenStore.open(tmp_path / "s")


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.pop("vocab"),
        lambda meta: meta.update(version=2),
        lambda meta: meta.update(dtype="float32"),
        lambda meta: meta.update(tokens=13),
        lambda meta: meta.update(dtype="uint32"),
        lambda meta: meta.update(documents=4),
        lambda meta: meta["files"].pop("tokens.bin"),
        lambda meta: meta["files"].update(other={"size": 1, "crc32": 1}),
        lambda meta: meta.update(tokenizer="../../secret"),
    ],
)
def test_a_description_that_is_wrong_is_refused(tmp_path: Path, change: Callable[[dict], object]) -> None:
    make(tmp_path / "s")
    path = tmp_path / "s" / "meta.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))
    with pytest.raises(DataError, match=r"meta\.json: "):
        TokenStore.open(tmp_path / "s")


def test_a_description_that_is_not_json_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "s")
    (tmp_path / "s" / "meta.json").write_text('{"format":')
    with pytest.raises(DataError, match=r"meta\.json: not the description of a token store"):
        TokenStore.open(tmp_path / "s")


def test_where_there_is_no_store_the_message_says_what_one_is(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "text.txt"):
        with pytest.raises(DataError, match=r"no token store here; expected a folder with meta\.json"):
            TokenStore.open(path)


def test_a_vocabulary_that_is_too_small_is_refused_by_name(tmp_path: Path) -> None:
    store = make(tmp_path / "s")
    store.check_vocab(259)
    store.check_vocab(1000)
    with pytest.raises(DataError, match=r"model\.vocab = 258: .*259 entries; at least 259"):
        store.check_vocab(258)


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    out = tmp_path / "deep" / "s"

    def write_and_fail() -> None:
        with write_store(out, tokenizer=tmp_path / "t.json", vocab=9, eod=0) as writer:
            writer.append(np.array([1, 0]), np.array([2]))
            assert not out.exists()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_and_fail()
    assert list((tmp_path / "deep").iterdir()) == []


def test_an_empty_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    with (
        pytest.raises(DataError, match="no text"),
        write_store(tmp_path / "s", tokenizer=tmp_path / "t.json", vocab=9, eod=0),
    ):
        pass
    assert not (tmp_path / "s").exists()


def test_a_store_is_replaced_only_when_asked_and_nothing_else_ever(tmp_path: Path) -> None:
    old = make(tmp_path / "s")
    with pytest.raises(DataError, match="exists already"):
        make(tmp_path / "s")
    assert make(tmp_path / "s", 300, overwrite=True).vocab == 300
    assert old.tokens.tolist() == TOKENS  # a reader of the old one goes on undisturbed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "source.json"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    with pytest.raises(DataError, match="no token store"):
        make(tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years"


# Megatron

SEQUENCES = [
    [11, 12, 13],
    [14],
    [15, 16],
    [17, 18, 19, 20],
]  # documents: the first two, the third, the fourth


def write_megatron(stem: Path, code: int = 8, dtype: str = "<u2", version: int = 1) -> None:
    lengths = [len(sequence) for sequence in SEQUENCES]
    size = np.dtype(dtype).itemsize
    pointers = [sum(lengths[:i]) * size for i in range(len(lengths))]
    bounds = [0, 2, 3, 4]
    stem.with_name(stem.name + ".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", version, code, len(lengths), len(bounds))
        + struct.pack("<4i4q4q", *lengths, *pointers, *bounds)
    )
    stem.with_name(stem.name + ".bin").write_bytes(np.array(list(range(11, 21)), dtype).tobytes())


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
@pytest.mark.parametrize(("code", "dtype"), [(1, "<u1"), (2, "<i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_megatron_is_read_under_any_of_its_names(tmp_path: Path, suffix: str, code: int, dtype: str) -> None:
    write_megatron(tmp_path / "corpus.v1", code, dtype)
    store = TokenStore.open(tmp_path / f"corpus.v1{suffix}")
    assert store.tokens.tolist() == list(range(11, 21))
    assert store.tokens.dtype == np.dtype(dtype)
    assert store.documents.tolist() == [0, 4, 6, 10]
    assert (store.vocab, store.eod, store.tokenizer_path) == (None, None, None)
    store.verify()


def test_megatron_vocabulary_is_found_in_the_tokens(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c")
    store = TokenStore.open(tmp_path / "c")
    store.check_vocab(21)
    with pytest.raises(DataError, match=r"model\.vocab = 20: .*at least 21"):
        store.check_vocab(20)


def test_megatron_fingerprint_follows_the_tokens(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c")
    before = TokenStore.open(tmp_path / "c").fingerprint
    assert before == TokenStore.open(tmp_path / "c").fingerprint
    content = bytearray((tmp_path / "c.bin").read_bytes())
    content[-1] ^= 1
    (tmp_path / "c.bin").write_bytes(content)
    assert TokenStore.open(tmp_path / "c").fingerprint != before


def overwrite(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda stem: overwrite(stem.with_suffix(".idx"), 0, b"X"), "not a Megatron index"),
        (lambda stem: stem.with_suffix(".idx").write_bytes(b"MMIDIDX\x00\x00"), "not a Megatron index"),
        (lambda stem: write_megatron(stem, version=2), "version 2"),
        (lambda stem: write_megatron(stem, code=6, dtype="<f8"), "dtype code 6"),
        (lambda stem: write_megatron(stem, code=99), "dtype code 99"),
        (lambda stem: overwrite(stem.with_suffix(".idx"), 18, struct.pack("<Q", 5)), r"c\.idx: 114 bytes"),
        (lambda stem: overwrite(stem.with_suffix(".idx"), 18, struct.pack("<Q", 0)), "no sequences"),
        (lambda stem: overwrite(stem.with_suffix(".idx"), 34, struct.pack("<i", 2)), "do not follow"),
        (lambda stem: overwrite(stem.with_suffix(".idx"), 106, struct.pack("<q", 3)), "document bounds"),
        (lambda stem: stem.with_suffix(".bin").write_bytes(b"\0" * 19), r"c\.bin: 19 bytes, expected 20"),
        (lambda stem: stem.with_suffix(".bin").unlink(), r"c\.bin: missing"),
    ],
)  # fmt: skip
def test_a_damaged_megatron_file_is_named(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    write_megatron(tmp_path / "c")
    damage(tmp_path / "c")
    with pytest.raises(DataError, match=message):
        TokenStore.open(tmp_path / "c")
