"""Tensor parallelism on grids computes what one process computes: every kind, with every family, and layouts drawn over
all that is built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from families import FAMILIES, config
from whole_runs import make_store

from shoal.comm.world import World
from shoal.config import Config, load
from shoal.data.corpus import Corpus
from shoal.data.tokenize import byte_tokenizer, tokenize
from shoal.errors import LayoutError
from shoal.layout import Layout
from shoal.model import loss as loss_module
from shoal.train.pool import Pool
from shoal.train.setup import fit, make_engine, open_data
from shoal.train.verify import Report, verify

pytestmark = pytest.mark.parity

RUNS = Path(__file__).parents[2] / "runs"

LAYOUTS = (
    "tp=4:2d",
    "tp=8:2.5d",
    "tp=8:3d",
    "tp=8:2x2x2",
    "tp=4:1x2x2",
    "tp=4:2x1x2",
    "tp=8:2.5d/2{form=loop}",
    "dp=2,tp=4:2d,zero=2",
    "tp=4:2d,pp=2:1f1b,mb=4",
    "dp=2,tp=4:2d,zero=3,recompute=full",
)
SPECIAL = (
    "tp=4:1x1x4",
    "tp=4:1x4x1",
    "tp=4:4x1x1",
    "tp=1:2d",
    "tp=1:3d",
    "tp=2:2.5d/2",
    "tp=8:2x1x4,zero=3",
    "tp=8:2x4x1,mb=4",
    "dp=2,tp=4:4x1x1,zero=3,recompute=full",
    "dp=2,tp=4:2x1x2,zero=1/2",
    "tp=4:2x2x1,pp=2:1f1b,zero=3,mb=2",
    "tp=4:2d{form=loop},pp=2:gpipe,mb=8,recompute=selective",
    "tp=8:2.5d,zero=3,recompute=selective",
)
"""Grids with sides of one, among which are other parallelisms by another name, and products that share an axis."""


def agrees(report: Report, limit: float = 1e-9) -> None:
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < limit
    assert report.drift < 1e-12
    assert len(report.worst) > 50, "every gradient and every weight is compared"


def exact(line: str) -> Layout:
    return Layout.parse(f"{line},dtype=float64")


# ---- families


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("family", ["llama3", "qwen3", "gpt2"])
def test_a_kind_agrees(family: str, line: str, tied: bool, eight: Pool) -> None:
    """Grouped queries, norms of heads, biases; dropout and unequally masked labels are in all of them."""
    report = verify(config(family, tied=tied), exact(line), eight)
    agrees(report)
    assert report.steps == 5


@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama3", "qwen3", "gpt2"}))
def test_every_other_family_agrees(family: str, line: str, eight: Pool) -> None:
    """Windows, a scaled embedding, norms that scale by one more, and a head of keys and values for all the columns."""
    agrees(verify(config(family, tied=family == "gemma"), exact(line), eight, steps=3))


@pytest.mark.parametrize("family", ["llama3", "gpt2"])
@pytest.mark.parametrize("line", SPECIAL)
def test_a_grid_with_a_side_of_one_agrees(line: str, family: str, eight: Pool) -> None:
    agrees(verify(config(family, tied=True), exact(line), eight, steps=3))


@pytest.mark.parametrize("line", LAYOUTS)
def test_the_z_loss_agrees(line: str, eight: Pool) -> None:
    agrees(verify(config("llama3", z_loss=0.05, tied=True), exact(line), eight, steps=3))


@pytest.mark.parametrize("line", ["tp=4:2d", "tp=8:2.5d", "tp=8:3d", "tp=4:1x1x4", "tp=4:1x4x1", "dp=2,tp=4:2x1x2"])
def test_a_loss_that_is_made_in_many_chunks_agrees(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks as small as they get, the last of them smaller still."""
    monkeypatch.setattr(loss_module, "CHUNK", 0)
    with Pool(Layout.parse(line).ranks) as forked_with_it:
        for tied in (False, True):
            agrees(verify(config("llama3", z_loss=0.05, tied=tied), exact(line), forked_with_it, steps=2))


@pytest.mark.parametrize("line", ["tp=4", "tp=4:2d{form=loop}", "tp=8:2.5d", "tp=8:2x2x2,zero=3", "tp=4:4x1x1"])
@pytest.mark.parametrize("ffn", [1, 3])
def test_ranks_without_a_column_of_the_feed_forward_agree(ffn: int, line: str, eight: Pool) -> None:
    for family in ("llama3", "gpt2"):
        agrees(verify(config(family, ffn=ffn), exact(line), eight, steps=2))


# ---- the run files


@pytest.mark.parametrize(
    ("run", "line", "tied"),
    [
        *(("tiny", line, False) for line in LAYOUTS),
        *(("tiny6", line, tied) for line in ("tp=6:1x2x3", "tp=4:2d") for tied in (False, True)),
    ],
)
def test_the_run_files_agree(run: str, line: str, tied: bool, eight: Pool) -> None:
    """The second with blocks that are uneven: a feed-forward of 50 and a vocabulary of 259."""
    agrees(verify(load(RUNS / f"{run}.toml", [f"model.tied={str(tied).lower()}"]), exact(line), eight))


@pytest.mark.parametrize("line", ["tp=6:1x2x3", "tp=4:2d", "tp=8:3d", "tp=8:2.5d{form=loop}", "tp=6:3x2x1"])
def test_samples_and_positions_that_do_not_divide_agree(line: str, eight: Pool) -> None:
    """Five samples of seventeen tokens, and one sample of seven."""
    for batch, length in ((5, 17), (1, 7)):
        settings = (f"data.batch={batch}", f"data.seq_len={length}", "model.layers=3")
        agrees(verify(load(RUNS / "tiny6.toml", settings), exact(line), eight, steps=2))


@pytest.mark.parametrize("name", ["sgd", "lion", "muon"])
@pytest.mark.parametrize("line", ["tp=4:2d", "tp=8:2.5d,zero=2", "tp=8:3d", "dp=2,tp=4:2x1x2,zero=3", "tp=6:1x2x3"])
def test_every_optimizer_agrees(line: str, name: str, eight: Pool) -> None:
    settings = (f"optimizer.name={name}", "optimizer.lr=3e-3", "model.tied=true", "model.layers=3")
    agrees(verify(load(RUNS / "tiny6.toml", settings), exact(line), eight))


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
@pytest.mark.parametrize("line", ["tp=4:2d", "tp=8:2.5d,zero=3", "tp=8:3d", "tp=4:1x2x2,pp=2,mb=4", "tp=6:3x2x1"])
def test_documents_kept_apart_agree(
    line: str, packing: str, window: tuple[str, ...], documents: Path, eight: Pool
) -> None:
    """Masks and positions are then of every sample by itself."""
    settings = ["data.source=tokens", f"data.path={documents}", "data.documents=true", f"data.packing={packing}"]
    config = load(RUNS / "tiny6.toml", [*settings, *window])
    agrees(verify(config, exact(line), eight, steps=2))


# ---- drawn layouts

REFUSALS = (
    "attention heads",
    "hidden size",
    "a global batch of",
    "stages are more than the model's",
    "the group does not divide",
)
"""What a layout of the drawn kinds may be refused for."""


@pytest.fixture(scope="module")
def sixteen() -> Iterator[Pool]:
    with Pool(16) as workers:
        yield workers


def drawn_grid(random: Random) -> tuple[int, str]:
    """The ranks and the name of a kind of tensor parallelism, of the right shape."""
    side, depth = random.choice([1, 2, 2, 2, 3, 4]), random.choice([1, 2, 3, 4])
    form = random.choice(["", "{form=loop}"])
    match random.choice(["1d", "1d-sp", "2d", "2.5d", "3d", "AxBxC", "AxBxC"]):
        case "2d":
            return side**2, f"2d{form}"
        case "2.5d":
            return depth * side**2, f"2.5d/{depth}{form}"
        case "3d":
            return side**3, "3d"
        case "AxBxC":
            a, b, c = (random.choice([1, 1, 2, 2, 3, 4]) for _ in range(3))
            return a * b * c, f"{a}x{b}x{c}"
        case kind:
            return side * depth, kind


def drawn(random: Random) -> str:
    """A line of two to sixteen ranks over all that is built, whether it fits or not."""
    while True:
        dp, pp = (random.choice([1, 1, 1, 2, 2, 3, 4]) for _ in range(2))
        tp, kind = drawn_grid(random)
        if 1 < dp * tp * pp <= 16:
            break
    parts = [f"dp={dp}", f"tp={tp}:{kind}", f"pp={pp}:{random.choice(['gpipe', '1f1b'])}"]
    zero = random.choice([0, 0, 1, 2, 3])
    parts.append(f"zero={zero}" + (f"/{random.choice([1, 2, 3])}" if zero and random.random() < 0.3 else ""))
    parts.append(f"mb={random.choice([1, 2, 3, 4, 6])}")
    parts.append(f"recompute={random.choice(['none', 'none', 'selective', 'full'])}")
    return ",".join(parts)


def drawn_config(random: Random) -> Config:
    """A small model of any family, with sizes that a grid may not divide, on batches that it may not divide."""
    family = random.choice(sorted(FAMILIES))
    heads = random.choice([4, 6, 12])
    sizes: dict[str, Any] = {"heads": heads, "head_dim": 4, "layers": random.choice([2, 3, 4])}
    # Grouped queries, unless the family's heads of keys and values are one, or as many as the queries'.
    sizes["kv_heads"] = {1: 1, 2: heads // 2, 4: heads}[config(family).model.kv_heads]
    sizes |= {"hidden": random.choice([24, 36]), "ffn": random.choice([27, 32]), "tied": random.random() < 0.5}
    made = config(family, **sizes)
    data = {"batch": random.choice([12, 24, 8]), "seq_len": random.choice([13, 16, 5])}
    return made.model_copy(update={"data": made.data.model_copy(update=data)})


@pytest.mark.parametrize("seed", range(6))
def test_sixty_drawn_layouts_agree(seed: int, sixteen: Pool) -> None:
    """Ten that fit; those that do not are refused for a reason that is known."""
    random, agreed = Random(seed), 0
    while agreed < 10:
        line, run = drawn(random), drawn_config(random)
        told = f"{line} of {run.model.model_dump(exclude_defaults=True)}, {run.data.batch}·{run.data.seq_len}"
        try:
            layout = exact(line)
            fit(run, layout, layout.ranks)
        except LayoutError as error:
            if not any(reason in str(error) for reason in REFUSALS):
                pytest.fail(f"{told}: {error}")
            continue
        report = verify(run, layout, sixteen, steps=2)
        assert report.agree, f"{told}: {report.faults}"
        agreed += 1


# ---- half precision

STEPS = 200


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A small model of the Bible's first letters."""
    store = make_store(tmp_path_factory.mktemp("text"), size=100_000)
    settings = (
        *("model.layers=2", "model.vocab=259", "model.hidden=48", "model.ffn=100", "model.heads=4", "model.kv_heads=2"),
        *("data.source=tokens", f"data.path={store}", "data.seq_len=32", "data.batch=8", "data.validation=0.1"),
        *("model.dropout=0", "optimizer.lr=3e-3", f"run.steps={STEPS}"),
    )
    return load(RUNS / "tiny.toml", settings)


def validation_loss(world: World, run: Config, line: str) -> tuple[float, int]:
    """After all steps, over the first batches of the validation split; and how many steps were skipped."""
    engine = make_engine(run, Layout.parse(line), world)
    train, validation = open_data(run), open_data(run, "validation")
    for step in range(STEPS):
        engine.step(train.batch(step, engine.mesh.coords["dp"], engine.layout.dp))
    summed = [engine.evaluate(validation.batch(step, engine.mesh.coords["dp"], engine.layout.dp)) for step in range(8)]
    return sum(loss for loss, _ in summed) / sum(weight for _, weight in summed), engine.skipped


@pytest.fixture(scope="module")
def in_float32(text: Config, eight: Pool) -> float:
    ((loss, _),) = eight.run(validation_loss, text, "dp=1,dtype=float32", ranks=1)
    assert loss < 3.0, "it has learned something"
    return loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("line", ["tp=4:2d", "tp=8:3d"])
def test_half_precision_reaches_the_validation_loss_of_float32(
    line: str, dtype: str, text: Config, in_float32: float, eight: Pool
) -> None:
    (first, *others) = eight.run(validation_loss, text, f"{line},dtype={dtype}", ranks=Layout.parse(line).ranks)
    assert all(other == first for other in others)
    loss, skipped = first
    assert loss == pytest.approx(in_float32, rel=0.01)
    assert skipped <= (5 if dtype == "fp16" else 0)
