"""Tokenise a corpus into a token store, in parallel processes; and the tokenizers to do it with."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from shoal.comm.process import die_with
from shoal.data.chat import CHATML, LLAMA_3, Template, find_template, plain
from shoal.data.corpus import Corpus
from shoal.data.pieces import Piece
from shoal.data.store import Progress, TokenStore
from shoal.data.store_writer import check_free, write_store
from shoal.errors import DataError, nearest, setting

END_OF_DOCUMENT = "<|endoftext|>"

_TASK_CHARS = 1 << 20
# A process takes a second or more to start: it is worth that for a few seconds of work.
_WORKER_BYTES = 1 << 23
# Training buffers 256 pieces at a time: smaller ones bound its memory.
_TRAINING_PIECE_CHARS = 1 << 16


def byte_tokenizer() -> Tokenizer:
    """Byte-level without merges, 259 entries: the bytes, ``<|endoftext|>``, ``<|bos|>``, ``<|pad|>``."""
    alphabet = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = _byte_level(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.add_special_tokens([AddedToken(name) for name in (END_OF_DOCUMENT, "<|bos|>", "<|pad|>")])
    return tokenizer


def train_tokenizer(corpus: Corpus, vocab: int, template: str | None = None) -> Tokenizer:
    """Byte-level BPE of ``vocab`` entries: ``<|endoftext|>`` (id 0), the 256 bytes, and merges learned.

    For conversations the control tokens of ``template`` (default: chatml) come behind ``<|endoftext|>``. The same
    corpus gives the same tokenizer; a small one may give fewer entries. Raises DataError when ``vocab`` is too small
    for bytes and special tokens, for a template that is not known or that the corpus has no use for, and what
    ``Corpus.pieces`` raises.
    """
    _refuse_template(corpus, template)
    writes = find_template(template or CHATML.name, lambda _: True, END_OF_DOCUMENT)
    special = [END_OF_DOCUMENT]
    if corpus.kind == "chat":
        special = list(dict.fromkeys([*special, *writes.tokens]))
    if vocab < 256 + len(special):
        problem = f"too few for the 256 bytes and {', '.join(special)}"
        raise DataError(setting("data.tokenizer_vocab", vocab, problem, f"at least {256 + len(special)}"))
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (piece.text for piece in corpus.pieces(_TRAINING_PIECE_CHARS, writes))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def own_ends(tokenizer: Tokenizer) -> dict[str, int]:
    """The tokens that end a text of a model that was trained here, with their ids: that of documents and, after it,
    that of a turn, where the tokenizer knows one."""
    ids = {token: tokenizer.token_to_id(token) for token in (END_OF_DOCUMENT, CHATML.end, LLAMA_3.end)}
    return {token: found for token, found in ids.items() if found is not None}


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json``. Raises DataError when it is missing or cannot be read."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; name a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{path}: not a tokenizer.json of the `tokenizers` library ({error})") from None


def check_tokenizer(store: TokenStore, known: Path, key: str, whose: str = "") -> None:
    """Raise DataError, which names the setting ``key``, where the tokens of ``store`` are of another tokenizer than the
    tokenizer.json ``known``: one with other entries, for how it divides text into them does not change what they are.
    A store that keeps no tokenizer may be of any. ``whose`` says more of ``known``."""
    path = store.tokenizer_path
    if path is None or path.read_bytes() == known.read_bytes():
        return
    if load_tokenizer(path).get_vocab() != load_tokenizer(known).get_vocab():
        problem = f"made by another tokenizer than {known}{whose}"
        raise DataError(setting(key, store.path, problem, f"make it again with shoal data ... --tokenizer {known}"))


def tokenize(
    corpus: Corpus,
    tokenizer: Path,
    out: Path,
    *,
    end_of_document: str | int = END_OF_DOCUMENT,
    template: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> TokenStore:
    """Write the tokens of ``corpus`` to a store at ``out``, with a loss mask where it is not plain text.

    ``tokenizer``        a tokenizer.json; here it neither adds tokens of its own nor truncates nor pads, and in a
                         text the name of a special token, or of one that ends documents or messages, is ordinary text
    ``end_of_document``  name or id of one of its tokens, which follows each document; conversations end with the token
                         of their template
    ``template``         name of the one that writes conversations; default: what the tokenizer has the tokens of
    ``workers``          processes at most (default: one a CPU; one means this process, with the tokenizer's
                         threads); the store is the same, byte for byte, for any number
    ``progress``         called as the work proceeds with (bytes done, bytes in all)

    Raises DataError when ``out`` exists and may not be overwritten, for a bad tokenizer, template or end of document,
    for a tokenizer that makes a control token of a message's text, for what ``Corpus.pieces`` refuses, and when no
    token would count; nothing is left at ``out`` then.
    """
    check_free(out, overwrite=overwrite)
    loaded = load_tokenizer(tokenizer)
    vocab = 1 + max(loaded.get_vocab().values())
    writes = _template(corpus, loaded, template, end_of_document, tokenizer)
    eod = _token_id(loaded, end_of_document if writes is None else writes.end, tokenizer)
    control = {name: _token_id(loaded, name, tokenizer) for name in (writes.tokens if writes else ())}
    encode = _Encode(tokenizer.resolve(), tokenizer.stat().st_mtime_ns, eod, control)
    _check_text_stays_text(encode.encoder, control, tokenizer)
    workers = min(workers or os.cpu_count() or 1, 1 + corpus.size // _WORKER_BYTES)
    name = writes.name if writes is not None and corpus.kind == "chat" else None
    with write_store(
        out, tokenizer=tokenizer, vocab=vocab, eod=eod, masked=writes is not None, template=name, overwrite=overwrite
    ) as writer:
        for part in _map_in_order(encode, _tasks(corpus.pieces(template=writes)), workers):
            writer.append(part.tokens, part.ends, part.counts)
            if progress:
                progress(part.bytes_read, corpus.size)
    if progress:
        progress(corpus.size, corpus.size)
    return TokenStore.open(out)


def _template(
    corpus: Corpus, tokenizer: Tokenizer, name: str | None, end_of_document: str | int, path: Path
) -> Template | None:
    """What writes the documents of a corpus that is not plain text."""
    _refuse_template(corpus, name)
    if corpus.kind == "text":
        return None

    def has(token: str) -> bool:
        return tokenizer.token_to_id(token) is not None

    end = end_of_document
    if isinstance(end, int):
        end = str(tokenizer.id_to_token(_token_id(tokenizer, end, path)))
    return find_template(name, has, end) if corpus.kind == "chat" else plain(end)


def _refuse_template(corpus: Corpus, name: str | None) -> None:
    if name is not None and corpus.kind != "chat":
        what = "plain text has" if corpus.kind == "text" else "prompts and completions have"
        raise DataError(setting("--template", name, f"{what} no conversations to write", "leave it out"))


def _check_text_stays_text(encoder: Tokenizer, control: Mapping[str, int], path: Path) -> None:
    """Raise DataError where ``encoder`` makes a control token of text, so that a message could forge a turn: the token
    is in the vocabulary of its model, not only among the added ones."""
    for name, token in control.items():
        for words in (encoder.decode([token], skip_special_tokens=False), name):
            texts = (words, f"x{words}x", f"\n{words}\n")
            if any(token in encoder.encode(text, add_special_tokens=False).ids for text in texts):
                problem = f"the text {words!r} in a message would become the control token {name} and forge a turn"
                legal = f"keep {name} among added_tokens alone, or choose another --template or --end-of-document"
                raise DataError(f"{path}: {problem}; {legal}")


@dataclass(frozen=True)
class _Encoded:
    """``tokens`` of some pieces, which of them count [tokens], the ``ends`` of documents among them, and the bytes of
    the corpus read up to there."""

    tokens: NDArray[np.uint32]
    counts: NDArray[np.bool_]
    ends: NDArray[np.int64]
    bytes_read: int


@dataclass(frozen=True)
class _Encode:
    """Turns pieces into tokens; ``control`` maps the names of control tokens to their ids."""

    tokenizer: Path
    modified_ns: int
    eod: int
    control: dict[str, int]

    @property
    def encoder(self) -> Tokenizer:
        return _encoder(self.tokenizer, self.modified_ns, frozenset((self.eod, *self.control.values())))

    def __call__(self, pieces: list[Piece]) -> _Encoded:
        arrays, ends, at = [], [], 0
        encodings = self.encoder.encode_batch_fast([piece.text for piece in pieces], add_special_tokens=False)
        for piece, encoding in zip(pieces, encodings, strict=True):
            ids = encoding.ids
            if piece.then is not None:
                ids = [*ids, self.control[piece.then]]
            elif piece.ends_document:
                ids = [*ids, self.eod]
            arrays.append(np.array(ids, np.uint32))
            at += len(ids)
            if piece.ends_document:
                ends.append(at)
        counts = np.repeat([piece.counts for piece in pieces], [len(ids) for ids in arrays])
        return _Encoded(np.concatenate(arrays), counts, np.array(ends, np.int64), pieces[-1].bytes_read)


@lru_cache(maxsize=1)
def _encoder(path: Path, modified_ns: int, control: frozenset[int]) -> Tokenizer:
    """The tokenizer as a plain function of the text, loaded once a process, and again if the file changed."""
    tokenizer = load_tokenizer(path)
    # What is special is not looked for in text, and not every file says so of all control tokens.
    added = tokenizer.get_added_tokens_decoder()
    tokenizer.add_special_tokens([token.content for id_, token in added.items() if id_ in control])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _tasks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    task: list[Piece] = []
    size = 0
    for piece in pieces:
        task.append(piece)
        size += len(piece.text)
        if size >= _TASK_CHARS:
            yield task
            task, size = [], 0
    if task:
        yield task


def _map_in_order(
    work: Callable[[list[Piece]], _Encoded], tasks: Iterable[list[Piece]], workers: int
) -> Iterator[_Encoded]:
    """``map`` over processes, few tasks in memory at a time (``Executor.map`` would take them all)."""
    if workers == 1:
        yield from map(work, tasks)
        return
    pending: deque[Future[_Encoded]] = deque()
    # Spawned, not forked: the threads that torch and the tokenizer may have started do not survive a fork.
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start, initargs=(os.getpid(),)) as pool:
        try:
            for task in tasks:
                pending.append(pool.submit(work, task))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise DataError("a tokenising process was killed, likely for want of memory; use fewer workers") from None
        finally:
            for future in pending:
                future.cancel()


def _start(parent: int) -> None:
    """In a worker: the processes are the parallelism, threads within each would only contend."""
    die_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _token_id(tokenizer: Tokenizer, token: str | int, path: Path) -> int:
    """The id of ``token``, which is its name or already its id."""
    found = tokenizer.token_to_id(token) if isinstance(token, str) else token
    if found is None or found < 0 or tokenizer.id_to_token(found) is None:
        special = [added.content for added in tokenizer.get_added_tokens_decoder().values()]
        examples = f"such as {', '.join(special[:8])}{nearest(str(token), special)}" if special else "by its id"
        problem = f"no such token in {path}"
        raise DataError(setting("end_of_document", token, problem, f"name one that it has, {examples}"))
    return found


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's encoding).

    Printable characters of Latin-1 stand for themselves, the other bytes, in order, for the characters from
    256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(code) for code in range(256, 512))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]
