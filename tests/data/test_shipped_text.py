from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from shoal.data.corpus import Corpus

FOLDER = Path(__file__).parents[2] / "data"


def test_the_shipped_text_is_the_one_its_readme_describes() -> None:
    text = (FOLDER / "kjv.txt").read_bytes()
    readme = (FOLDER / "README.md").read_text()
    assert sha256(text).hexdigest() in readme
    assert f"{len(text):,} characters" in readme


def test_the_shipped_text_has_every_chapter_and_verse() -> None:
    pieces = list(Corpus.find(FOLDER / "kjv.txt", separator="\n\n\n").pieces())
    assert all(piece.ends_document for piece in pieces)
    chapters = [piece.text.strip().split("\n") for piece in pieces]
    assert len(chapters) == 1_189
    assert sum(len(chapter) - 1 for chapter in chapters) == 31_102
    assert len({title for title, *_ in chapters}) == 1_189
    assert (chapters[0][0], chapters[-1][0]) == ("Genesis 1", "Revelation 22")
    assert all(verse and verse == verse.strip() for chapter in chapters for verse in chapter)
