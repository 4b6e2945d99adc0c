"""What the commands refuse: one message that says what to change, before any process starts or file is written."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from whole_runs import Shoal, make_store, refused, sets, write_run

from shoal.train.pool import Pool


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("text"))


@pytest.fixture
def shoal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shoal:
    return Shoal(capfd, monkeypatch)


@pytest.fixture
def file(store: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path, store)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank may be started: what is refused is refused before."""

    def start(self: Pool) -> None:
        raise AssertionError("a process was to be started")

    monkeypatch.setattr(Pool, "_start", start)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (sets(run__stepps=3), ["run.stepps: unknown key (did you mean 'steps'?)", "known here: ", "seed"]),
        (sets(modle__hidden=3), ["modle: unknown key (did you mean 'model'?)"]),
        (["--set", "run.steps"], ["--set run.steps: write section.key=value, such as --set optimizer.lr=3e-4"]),
        (["--set", "steps=3"], ["--set steps=3: write section.key=value"]),
        (sets(run__steps="many"), ["run.steps = many: input should be a valid integer"]),
        ([*sets(optimizer__name="muon"), "--layout", "offload=optimizer:nvme"],
         ["layout.offload = optimizer:nvme: Muon needs all of its momenta", "use offload=optimizer:cpu"]),
        ([*sets(memory__swap="/no/where"), "--layout", "offload=params:nvme"], ["/no/where: no file can be made here"]),
        (sets(optimizer__rounding="stochastic"), ["optimizer.rounding = stochastic: is for weights in bf16"]),
        (sets(optimizer__name="adam"), ["optimizer.name = adam: input should be 'adamw', 'sgd', 'lion' or 'muon'"]),
        (sets(run__device="tpu"), ["run.device = tpu: input should be 'cpu', 'cuda' or 'auto'"]),
        (["-n", "3"], ["layout.dp = 2: dp·cp·tp·pp = 2 ranks, but the world has 3", "use dp=3 or 2 ranks"]),
        (["--layout", "dp=5"], ["layout.dp = 5: a global batch of 24", "dp·mb = 5·1", "dp=4 or dp=6"]),
        (["--layout", "dp=2,mb=5"], ["a global batch of 24", "dp·mb = 2·5", "mb=4"]),
        (["--layout", "dp=two"], ["layout.dp = two: 'two' is not a whole number", "dp=2"]),
        (["--layout", "recomptue=full"], ["layout.recomptue = full: unknown key (did you mean 'recompute'?)"]),
        (["--layout", "dp=2,sync=server,stale=1"], ["layout.stale = 1: is an option of sync",
                                                    "use sync=server{stale=1}"]),
        (["--layout", "dp=2,auto"], ["auto chooses dp itself", "use auto"]),
        (["--layout", "cp=4:ulysses"], ["layout.cp = 4:ulysses: 6 attention heads do not divide over",
                                        "4 Ulysses ranks", "use cp=3:ulysses or cp=6:ulysses"]),
        (["--layout", "tp=4:3d"], ["layout.tp = 4:3d", "use tp=1:3d or tp=8:3d"]),
        (["--layout", "dp=2,sync=server/3"], ["layout.sync = server/3: servers are replicas, of which there are 2",
                                              "use sync=server/2"]),
        (["--layout", "dp=2,sync=server,offload=optimizer:cpu"], ["servers keep what they take in",
                                                                  "sync=allreduce"]),
        (["--layout", "zero=3,offload=grads:nvme"], ["layout.offload = grads:nvme: gradients add up in memory",
                                                     "use offload=grads:cpu"]),
        (["--layout", "tp=4"], ["layout.tp = 4: 6 attention heads do not divide over 4 ranks", "use tp=3 or tp=6"]),
        (["--layout", "tp=4:1d-sp"], ["layout.tp = 4:1d-sp: 6 attention heads", "use tp=3:1d-sp or tp=6:1d-sp"]),
        (["--layout", "pp=4"], ["layout.pp = 4: 4 stages are more than the model's 3 layers", "use pp=3"]),
        (["--layout", "pp=2{layers=2/2}"], ["layers sum to 4, but the model has 3", "use pp=2{layers=2/1}"]),
        (["--layout", "pp=2{layers=3}"], ["layers needs 2 numbers from 1, one a stage"]),
        (["--layout", "dp=2,zero=2/3"], ["layout.zero = 2/3: the group does not divide dp·cp = 2", "use zero=2/2"]),
        (["--layout", "pp=2,recompute=full{stages=2}"], ["stages are 0 to 1, ascending, each once"]),
        (["--layout", "dp=2,tp=2", "-n", "2"], ["dp·cp·tp·pp = 4 ranks, but the world has 2", "use dp=1 or 4 ranks"]),
        (sets(model__vocab=100), ["model.vocab = 100: the tokens of", "need 259 entries", "at least 259"]),
        (sets(data__path="/no/where"), ["data.path = /no/where: there is no token store", "shoal data TEXT /no/where"]),
        (sets(data__seq_len=300_000), ["data.seq_len = 300000: a sample takes 300001 tokens", "at most 200000"]),
        (sets(data__validation=0.00001), ["data.validation = 1e-05: keeps none of", "at least"]),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("no_processes")
def test_train_refuses(shoal: Shoal, file: Path, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    refused(shoal("train", file, *arguments), *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.usefixtures("no_processes")
def test_a_run_file_that_cannot_be_read_is_refused(shoal: Shoal, tmp_path: Path, command: str) -> None:
    refused(shoal(command, tmp_path / "no.toml"), f"run file {tmp_path / 'no.toml'}: there is no such file")
    refused(shoal(command, tmp_path), "there is no such file")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[run\nsteps = 3", encoding="utf-8")
    refused(shoal(command, wrong), f"run file {wrong}: not valid TOML", "line 1")
    wrong.write_bytes(b"\xff\xfe")
    refused(shoal(command, wrong), f"run file {wrong}: not valid TOML")
    wrong.write_text("[run]\nstepps = 3\n", encoding="utf-8")
    refused(
        shoal(command, wrong),
        "run.stepps: unknown key (did you mean 'steps'?)",
        "run.steps: missing; the run file must set it",
        "model: missing",
    )


@pytest.mark.usefixtures("no_processes")
def test_a_damaged_token_store_is_refused(shoal: Shoal, store: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.store"
    shutil.copytree(store, bad)
    file, tokens = write_run(tmp_path, bad), bad / "tokens.bin"
    contents = bytearray(tokens.read_bytes())
    contents[1000] ^= 4
    tokens.write_bytes(contents)
    for command in ("train", "verify"):
        refused(shoal(command, file, "--layout", "dp=2"), f"{tokens}: CRC-32 is", "make the store again")
    tokens.write_bytes(contents[:-1])
    refused(shoal("train", file), f"{tokens}: 400001 bytes, expected 400002", "truncated")
    tokens.unlink()
    refused(shoal("train", file), f"{tokens}: missing")
    (bad / "meta.json").write_text("{}", encoding="utf-8")
    refused(shoal("train", file), f"{bad / 'meta.json'}: not the description of a token store")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_processes")
def test_a_tracker_that_is_not_installed_is_refused(
    shoal: Shoal, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.train.metrics.find_spec", lambda name: None if name == "wandb" else find_spec(name))
    result = shoal("train", file, *sets(log__wandb="true"))
    refused(result, "log.wandb = true: the package wandb is not installed", "pip install 'shoal[wandb]'", "= false")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_processes")
def test_a_folder_that_cannot_be_written_is_refused(shoal: Shoal, file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("", encoding="utf-8")
    refused(shoal("train", file), f"run.folder = {tmp_path / 'out'}: ", "cannot be written: ")


def test_an_error_that_a_rank_finds_is_one_message(
    shoal: Shoal, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token store goes away between the checks and the ranks."""
    kept, start = tmp_path / "kept.store", Pool._start
    shutil.copytree(store, kept)

    def lose(self: Pool) -> None:
        if kept.exists():
            shutil.rmtree(kept)
        start(self)

    monkeypatch.setattr(Pool, "_start", lose)
    refused(shoal("train", write_run(tmp_path, kept)), f"{kept}: no token store here")


@pytest.mark.usefixtures("no_processes")
def test_verify_refuses_what_train_refuses(shoal: Shoal, file: Path) -> None:
    refused(shoal("verify", file, "--layout", "auto,mb=2"), "auto chooses mb itself", "use auto")
    refused(shoal("verify", file, "--layout", "pp=4"), "layout.pp = 4", "the model's 3 layers")
    refused(shoal("verify", file, "--layout", "tp=4"), "layout.tp = 4", "6 attention heads")
    refused(shoal("verify", file, "--layout", "dp=7"), "a global batch of 24")
    refused(shoal("verify", file, *sets(model__vocab=100)), "model.vocab = 100", "at least 259")
