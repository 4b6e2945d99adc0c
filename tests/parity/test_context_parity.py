"""Context parallelism computes what one process computes: every kind, beside every other parallelism, at lengths that
nothing divides, in documents and windows; and verify names the faults that it is prone to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from families import FAMILIES, config
from test_grids_parity import agrees, exact
from torch import Tensor

from shoal.config import load
from shoal.context import blocks as blocks_module
from shoal.context import ring as ring_module
from shoal.context.blocks import Result, attend, attend_backward
from shoal.data.corpus import Corpus
from shoal.data.tokenize import byte_tokenizer, tokenize
from shoal.errors import LayoutError
from shoal.layout import Layout
from shoal.layout.kinds import SCHEDULES
from shoal.train.pool import Pool
from shoal.train.setup import fit
from shoal.train.verify import verify

pytestmark = pytest.mark.parity

RUNS = Path(__file__).parents[2] / "runs"

LINES = (
    "cp=2:ring",
    "cp=4:ring",
    "cp=4:ulysses",
    "cp=4:2x2",
    "cp=2:gather",
    "dp=2,cp=2,tp=2",
    "cp=2:ring,pp=2:1f1b,mb=4,zero=1",
    "cp=2:ring,tp=4:2d",
    "cp=2,tp=2:1d-sp",
    "cp=2,zero=3",
)
OTHERS = (
    "cp=3:ring",
    "cp=3:gather,zero=2",
    "cp=6:3x2",
    "cp=6:2x3",
    "cp=2:2x1,tp=3",
    "cp=3:ulysses,tp=2:1d-sp,zero=3",
    "cp=2,tp=4:1x2x2",
    "cp=2,tp=4:2d{form=loop}",
    "cp=3:ulysses,tp=2:2x1x1",
    "cp=4:2x2,tp=2:2.5d/2,zero=3",
    "dp=2,cp=2,zero=2/2",
    "dp=2,cp=2,zero=3/2,mb=2",
    "dp=2,cp=2,sync=server",
    "dp=2,cp=2:gather,sync=server/2{stale=1}",
    "cp=2,recompute=selective",
    "cp=2:ulysses,recompute=full,zero=3",
    "cp=2,offload=activations:cpu",
    "cp=2,zero=1,offload=optimizer:cpu+grads:cpu",
    "cp=2,zero=3,offload=params:cpu,recompute=full",
)


@pytest.fixture(scope="module")
def sixteen() -> Iterator[Pool]:
    with Pool(16) as workers:
        yield workers


@pytest.mark.parametrize("length", [63, 61, 32])
@pytest.mark.parametrize("line", LINES)
def test_the_run_file_agrees(line: str, length: int, eight: Pool) -> None:
    """Two query heads for each of keys and values; dropout, labels masked unequally, and clipping that acts."""
    agrees(verify(load(RUNS / "tiny.toml", [f"data.seq_len={length}", "data.batch=8"]), exact(line), eight))


@pytest.mark.parametrize("line", [*(line for line in LINES if line != "cp=4:ulysses"), *OTHERS])
def test_odd_sizes_agree(line: str, eight: Pool) -> None:
    """A feed-forward of 50 and a vocabulary of 259, and an embedding that is the head's too."""
    settings = ("model.tied=true", "data.seq_len=29", "data.batch=8", "model.layers=3")
    agrees(verify(load(RUNS / "tiny6.toml", settings), exact(line), eight, steps=3))


@pytest.mark.parametrize("line", ["cp=2", "cp=4:ulysses", "cp=4:2x2", "cp=2,tp=2", "cp=2:gather,tp=4:2d"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_agrees(family: str, line: str, eight: Pool) -> None:
    """Norms of heads, biases, learned positions, windows, and one head of keys and values for all ranks."""
    agrees(verify(config(family, tied=family == "gemma"), exact(line), eight, steps=3))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "1f1b"])
def test_every_schedule_agrees(name: str, eight: Pool) -> None:
    """The asynchronous ones with their recurrence."""
    for line in (
        f"cp=2,pp=2:{name},mb=4",
        f"cp=2:ulysses,pp=2:{name},mb=4,zero=1",
        f"cp=2,tp=2:1d-sp,pp=2:{name},mb=4",
    ):
        settings = ("data.seq_len=13", "data.batch=8", "model.layers=4")
        report = verify(load(RUNS / "tiny.toml", settings), exact(line), eight, steps=4)
        if exact(line).asynchronous:  # of which weights are compared, after drains
            assert report.agree, report.faults
            assert report.drift < 1e-12
        else:
            agrees(report)


@pytest.mark.parametrize("line", ["cp=2,tp=8:3d", "cp=2:ulysses,tp=8:2.5d", "cp=4:2x2,pp=2,dp=2,mb=2,zero=1"])
def test_sixteen_ranks_agree(line: str, sixteen: Pool) -> None:
    settings = ("data.seq_len=21", "data.batch=8", "model.layers=3")
    agrees(verify(load(RUNS / "tiny.toml", settings), exact(line), sixteen, steps=2))


@pytest.mark.parametrize("name", ["sgd", "lion", "muon"])
@pytest.mark.parametrize("line", ["cp=2", "cp=4:2x2,zero=2", "cp=2,tp=2:1d-sp,zero=3"])
def test_every_optimizer_agrees(line: str, name: str, eight: Pool) -> None:
    settings = (f"optimizer.name={name}", "optimizer.lr=3e-3", "model.layers=3", "data.seq_len=21", "data.batch=8")
    agrees(verify(load(RUNS / "tiny6.toml", settings), exact(line), eight, steps=3))


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store of many short documents."""
    folder = tmp_path_factory.mktemp("documents")
    text = folder / "text.txt"
    text.write_text("\n\n".join("word " * (number % 23 + 1) for number in range(400)))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    tokenize(Corpus.find(text, separator="\n\n"), folder / "tokenizer.json", folder / "store")
    return folder / "store"


@pytest.mark.parametrize(("packing", "window"), [("stream", ()), ("documents", ("model.window=7",))])
@pytest.mark.parametrize("line", [*(line for line in LINES if line != "cp=4:ulysses"), "cp=3:ulysses"])
def test_documents_kept_apart_agree(
    line: str, packing: str, window: tuple[str, ...], documents: Path, eight: Pool
) -> None:
    settings = ["data.source=tokens", f"data.path={documents}", "data.documents=true", f"data.packing={packing}"]
    agrees(verify(load(RUNS / "tiny6.toml", [*settings, "data.seq_len=61", *window]), exact(line), eight, steps=2))


# ---- fewer samples than rows of a grid


@pytest.mark.parametrize(("packing", "window"), [("stream", ()), ("documents", ("model.window=7",))])
@pytest.mark.parametrize(
    "line",
    [
        "tp=4:2d",
        "tp=8:2.5d,zero=3",
        "tp=8:3d",
        "tp=4:1x2x2,pp=2,mb=2",
        "tp=6:3x2x1",
        "tp=8:8x1x1",
        "cp=2,tp=4:2d",
        "cp=2:ulysses,tp=2:2x1x1",
        "cp=2:gather,tp=4:2x2x1",
        "cp=4:2x2,tp=2:1x2x1,recompute=full",
    ],
)
def test_rows_divide_positions_where_there_are_fewer_samples(
    line: str, packing: str, window: tuple[str, ...], documents: Path, eight: Pool
) -> None:
    """A sample or two of 29 positions, by every way in which rows divide them."""
    settings = ["data.source=tokens", f"data.path={documents}", "data.documents=true", f"data.packing={packing}"]
    samples = 2 if "mb=2" in line or "8x1x1" in line else 1
    more = ("data.seq_len=29", f"data.batch={samples}", "model.layers=3", *window)
    agrees(verify(load(RUNS / "tiny6.toml", [*settings, *more]), exact(line), eight, steps=2))


# ---- drawn layouts

REFUSALS = ("attention heads", "hidden size", "a global batch of", "stages are more than the model's", "micro-batches")


def drawn(random: Random) -> tuple[str, int]:
    u, r, tp = (random.choice([1, 2, 3]) for _ in range(3))
    kind = random.choice(["ring", "gather", "ulysses", f"{u}x{r}"])
    cp = u * r if "x" in kind else random.choice([2, 3, 4])
    tp_kind = random.choice(["1d", "1d-sp", f"{tp}x1x1", f"1x{tp}x1"])
    dp, pp, zero = random.choice([1, 2]), random.choice([1, 1, 2]), random.choice([0, 1, 2, 3])
    schedule = random.choice(["1f1b", "gpipe", "zb-h1", "interleaved"])
    mb, recompute = random.choice([1, 2, 4]), random.choice(["none", "selective", "full"])
    line = f"dp={dp},cp={cp}:{kind},tp={tp}:{tp_kind},pp={pp}:{schedule},mb={mb},zero={zero},recompute={recompute}"
    return line, dp * cp * tp * pp


@pytest.mark.parametrize("seed", range(40))
def test_a_drawn_layout_agrees(seed: int, sixteen: Pool) -> None:
    random = Random(seed)
    line, ranks = drawn(random)
    while ranks > 16:
        line, ranks = drawn(random)
    settings = ["data.batch=8", f"data.seq_len={random.randint(1, 40)}", "model.layers=4", "model.kv_heads=3"]
    if random.random() < 0.4:
        settings.append(f"model.window={random.randint(1, 30)}")
    read = load(RUNS / "tiny6.toml", settings)
    try:
        fit(read, exact(line), ranks)
    except LayoutError as error:
        refused = str(error)
    else:
        agrees(verify(read, exact(line), sixteen, steps=2))
        return
    assert any(reason in refused for reason in REFUSALS), refused


# ---- planted faults


def a_block_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A ring does not merge what it finds among another rank's keys that all its queries see."""

    def forgetful(*arguments: Any) -> None:
        block = arguments[2]
        if block.kind != "full":
            attend(*arguments)

    patch.setattr(ring_module, "attend", forgetful)


def keys_doubled(patch: pytest.MonkeyPatch) -> None:
    def doubled(*arguments: Any) -> None:
        dkv: Tensor = arguments[-1]
        before = dkv[0].clone()
        attend_backward(*arguments)
        dkv[0] += dkv[0] - before

    patch.setattr(ring_module, "attend_backward", doubled)


def merged_without_weights(patch: pytest.MonkeyPatch) -> None:
    """The mean of two blocks, whatever they summed up."""
    merge = Result.merge

    def even(self: Result, at: Any, out: Tensor, lse: Tensor) -> None:
        known = self.lse[at].isfinite()
        merge(self, at, out, lse.where(~known, self.lse[at]))

    patch.setattr(blocks_module.Result, "merge", even)


def gradients_stay(patch: pytest.MonkeyPatch) -> None:
    """Those of a rank's keys that other ranks have found never come home."""
    home = ring_module.Homeward.arrived

    def lost(self: ring_module.Homeward) -> Tensor | None:
        found = home(self)
        return None if found is None else found.zero_()

    patch.setattr(ring_module.Homeward, "arrived", lost)


FAULTS = [
    (a_block_forgotten, "cp=2", "loss differs", "."),
    (keys_doubled, "cp=2", "gradient blocks.0.attn.k.weight differs", r"attn\.|attn_norm|embed"),
    (merged_without_weights, "cp=4:2x2", "loss differs", "."),
    (gradients_stay, "cp=4", "gradient blocks.0.attn.v.weight differs", r"attn\.|attn_norm|embed"),
]


@pytest.mark.parametrize(("plant", "line", "named", "guilty"), FAULTS)
def test_a_planted_fault_is_caught_and_named(
    plant: Any, line: str, named: str, guilty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a model of one layer, where what is wrong reaches nothing but what comes before it."""
    plant(monkeypatch)
    read = load(RUNS / "tiny6.toml", ("model.layers=1", "data.seq_len=16", "data.batch=4"))
    with Pool(Layout.parse(line).ranks) as with_it:
        report = verify(read, exact(line), with_it, steps=1)
    assert not report.agree
    assert any(said.startswith(named) for said in report.faults), report.faults
    gradients = [said for said in report.faults if said.startswith("gradient ")]
    assert gradients
    assert all(re.search(guilty, said) for said in gradients), gradients
