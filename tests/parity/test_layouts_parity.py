"""Every layout that is built computes what one process computes: the named ones, and layouts drawn over the grammar."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from shoal.config import Config, load
from shoal.errors import LayoutError
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.setup import fit
from shoal.train.verify import Report, verify

RUNS = Path(__file__).parents[2] / "runs"

NAMED = [
    ("tiny", "dp=4,zero=1"),
    ("tiny", "dp=2,zero=2"),
    ("tiny", "dp=4,zero=3"),
    ("tiny", "dp=4,zero=3/2"),
    ("tiny6", "dp=3,zero=3{keep=step},mb=4"),
    ("tiny", "tp=2"),
    ("tiny", "tp=4:1d-sp"),
    ("tiny", "pp=2:gpipe,mb=4"),
    ("tiny", "pp=4:1f1b,mb=8"),
    ("tiny", "pp=4:1f1b,mb=2"),
    ("tiny", "dp=2,tp=2,zero=3"),
    ("tiny", "dp=2,pp=2:1f1b,zero=1,mb=4"),
    ("tiny", "dp=2,pp=2:1f1b,zero=2,mb=4"),
    ("tiny", "tp=2:1d-sp,pp=2:1f1b,mb=4"),
    ("tiny", "dp=2,tp=2,pp=2:1f1b,zero=1,mb=4"),
    ("tiny", "dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4,recompute=full"),
    ("tiny", "pp=3:1f1b{layers=4/2/2},mb=3"),
    ("tiny6", "tp=3"),
    ("tiny6", "tp=2:1d-sp"),
]

QUICK = [NAMED[number] for number in (3, 7, 10, 13, 14, 15)]
"""One of each kind, and of their products."""

REFUSALS = (
    "attention heads",
    "a global batch of",
    "stages are more than the model's",
    "does not divide dp·cp",
)
"""What a layout of the drawn kinds may be refused for."""


def read(run: str, *more: str) -> Config:
    return load(RUNS / f"{run}.toml", more)


def agrees(report: Report, limit: float = 1e-9) -> None:
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < limit
    assert len(report.worst) > 100, "every gradient and every weight is compared"


@pytest.mark.parametrize(("run", "layout"), QUICK, ids=[layout for _, layout in QUICK])
def test_a_named_layout_agrees(run: str, layout: str, eight: Pool) -> None:
    agrees(verify(read(run), Layout.parse(f"{layout},dtype=float64"), eight, steps=3))


@pytest.mark.parity
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("run", "layout"), NAMED, ids=[layout for _, layout in NAMED])
def test_a_named_layout_agrees_over_five_steps(run: str, layout: str, tied: bool, eight: Pool) -> None:
    report = verify(read(run, f"model.tied={str(tied).lower()}"), Layout.parse(f"{layout},dtype=float64"), eight)
    agrees(report)
    assert report.steps == 5


@pytest.mark.parametrize("layout", ["tp=2:1d-sp,pp=2:1f1b,mb=4"])
def test_a_tied_embedding_and_plain_sgd_agree(layout: str, eight: Pool) -> None:
    sgd = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.clip=0")
    agrees(verify(read("tiny", "model.tied=true", *sgd), Layout.parse(f"{layout},dtype=float64"), eight, steps=3))


@pytest.mark.parity
@pytest.mark.parametrize(("run", "layout"), NAMED, ids=[layout for _, layout in NAMED])
def test_a_named_layout_agrees_in_float32_to_its_precision(run: str, layout: str, eight: Pool) -> None:
    report = verify(read(run), Layout.parse(f"{layout},dtype=float32"), eight)
    assert report.agree, report.faults
    assert max(report.max_rel["loss"], report.max_rel["grad_norm"]) < 2e-5, report.max_rel


def drawn(random: Random) -> tuple[str, str]:
    """A run and a line of up to eight ranks over all that is built, whether it fits or not."""
    run = random.choice(["tiny", "tiny6"])
    while True:
        dp, tp, pp = (random.choice([1, 1, 2, 3, 4, 6]) for _ in range(3))
        if 1 < dp * tp * pp <= 8:
            break
    parts = [f"dp={dp}", f"tp={tp}{random.choice(['', ':1d', ':1d-sp'])}"]
    blocks = {"tiny": 8, "tiny6": 6}[run]
    sizes = ""
    if pp > 1 and random.random() < 0.3:
        cuts = sorted(random.sample(range(1, blocks), pp - 1))
        sizes = "/".join(str(b - a) for a, b in zip([0, *cuts], [*cuts, blocks], strict=True))
    parts.append(f"pp={pp}:{random.choice(['gpipe', '1f1b'])}" + (f"{{layers={sizes}}}" if sizes else ""))
    zero = random.choice([0, 0, 1, 2, 3])
    parts.append(f"zero={zero}" + (f"/{random.choice([1, 2, 3])}" if zero and random.random() < 0.3 else ""))
    parts.append(f"mb={random.choice([1, 2, 3, 4, 6, 8])}")
    recompute = random.choice(["none", "none", "selective", "full"])
    stages = ""
    if recompute != "none" and random.random() < 0.3:
        stages = "{stages=" + "/".join(map(str, sorted(random.sample(range(pp), random.randint(1, pp))))) + "}"
    parts.append(f"recompute={recompute}{stages}")
    return run, ",".join(parts)


def check_drawn(seed: int, count: int, pool: Pool) -> None:
    """``count`` layouts that fit agree; those that do not are refused for a reason that is known."""
    random, agreed = Random(seed), 0
    while agreed < count:
        run, line = drawn(random)
        config = read(
            run, f"model.tied={str(random.random() < 0.5).lower()}", f"data.seq_len={random.choice([32, 13])}"
        )
        try:
            layout = Layout.parse(f"{line},dtype=float64")
            fit(config, layout, layout.ranks)
        except LayoutError as error:
            if not any(reason in str(error) for reason in REFUSALS):
                pytest.fail(f"{run} {line}: {error}")
            continue
        report = verify(config, layout, pool, steps=2)
        assert report.agree, f"{run} {line}: {report.faults}"
        agreed += 1


def test_drawn_layouts_agree(eight: Pool) -> None:
    check_drawn(seed=1, count=3, pool=eight)


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(2, 8))
def test_sixty_drawn_layouts_agree(seed: int, eight: Pool) -> None:
    check_drawn(seed, count=10, pool=eight)
