from __future__ import annotations

from dataclasses import fields

import pytest

from shoal.errors import LayoutError
from shoal.layout import BUILT, Layout, Offload

READ = {
    "dp=1": {},
    "dp=4": {"dp": 4},
    "dp=-1": {"dp": -1},
    "tp=4": {"tp": 4, "tp_kind": "1d", "tp_grid": (4,), "tp_form": "gather"},
    "tp=2:1d-sp": {"tp": 2, "tp_kind": "1d-sp", "tp_grid": (2,)},
    "tp=4:2d": {"tp": 4, "tp_kind": "2d", "tp_grid": (2, 2)},
    "tp=9:2d{form=loop}": {"tp": 9, "tp_kind": "2d", "tp_grid": (3, 3), "tp_form": "loop"},
    "tp=4:2.5d": {"tp": 4, "tp_kind": "2.5d", "tp_grid": (2, 2, 1)},
    "tp=8:2.5d": {"tp": 8, "tp_kind": "2.5d", "tp_grid": (2, 2, 2)},
    "tp=16:2.5d": {"tp": 16, "tp_kind": "2.5d", "tp_grid": (4, 4, 1)},
    "tp=16:2.5d/4": {"tp": 16, "tp_kind": "2.5d", "tp_grid": (2, 2, 4)},
    "tp=64:2.5d": {"tp": 64, "tp_kind": "2.5d", "tp_grid": (4, 4, 4)},
    "tp=27:3d": {"tp": 27, "tp_kind": "3d", "tp_grid": (3, 3, 3)},
    "tp=8:4x1x2": {"tp": 8, "tp_kind": "AxBxC", "tp_grid": (4, 1, 2)},
    "pp=2": {"pp": 2, "schedule": "1f1b", "chunks": 1, "stages": 2},
    "pp=2:gpipe": {"pp": 2, "schedule": "gpipe", "chunks": 1},
    "pp=3{layers=4/2/2}": {"pp": 3, "stage_layers": (4, 2, 2)},
    "pp=2:interleaved,mb=4": {"pp": 2, "schedule": "interleaved", "chunks": 2, "stages": 4, "mb": 4},
    "pp=2:breadth-first/3": {"pp": 2, "schedule": "breadth-first", "chunks": 3, "stages": 6},
    "pp=2:zb-v": {"pp": 2, "schedule": "zb-v", "chunks": 2},
    "pp=2:list/2{layers=1/2/3/2}": {"pp": 2, "schedule": "list", "chunks": 2, "stage_layers": (1, 2, 3, 2)},
    "pp=4:list{times=10/12.5/.5/0}": {"pp": 4, "schedule": "list", "list_times": (10, 12.5, 0.5, 0)},
    "pp=4:list{memory=3.5}": {"pp": 4, "schedule": "list", "list_memory": 3.5},
    "pp=2:list{memory=3;layers=1/2}": {"pp": 2, "schedule": "list", "list_memory": 3, "stage_layers": (1, 2)},
    "cp=4": {"cp": 4, "cp_kind": "ring", "cp_grid": (1, 4)},
    "cp=4:gather": {"cp": 4, "cp_kind": "gather", "cp_grid": (1, 4)},
    "cp=4:ulysses": {"cp": 4, "cp_kind": "ulysses", "cp_grid": (4, 1)},
    "cp=8:4x2": {"cp": 8, "cp_kind": "UxR", "cp_grid": (4, 2)},
    "dp=4,ep=2,etp=2": {"dp": 4, "ep": 2, "etp": 2},
    "dp=4,zero=3": {"dp": 4, "zero": 3, "zero_group": None},
    "dp=4,zero=3/2": {"dp": 4, "zero": 3, "zero_group": 2},
    "dp=4,zero=1{gather=int8}": {"dp": 4, "zero": 1, "int8_gather": True},
    "dp=4,zero=3/2{keep=step;reduce=int8}": {
        "dp": 4,
        "zero": 3,
        "zero_group": 2,
        "keep_params": True,
        "int8_reduce": True,
    },
    "sync=server": {"sync": "server", "servers": 1, "stale": 0},
    "dp=2,sync=server/2{stale=1}": {"dp": 2, "sync": "server", "servers": 2, "stale": 1},
    "sync=server{reduce=sum;stale=1}": {"sync": "server", "servers": 1, "stale": 1, "reduce": "sum"},
    "recompute=selective": {"recompute": "selective", "recompute_stages": None},
    "pp=4,recompute=full{stages=0/2}": {"pp": 4, "recompute": "full", "recompute_stages": (0, 2)},
    "offload=optimizer:cpu@0.5+params:nvme": {"offload": (Offload("optimizer", "cpu", 0.5), Offload("params", "nvme"))},
    "dtype=bf16": {"dtype": "bf16"},
    "auto": {"auto": True},
}


@pytest.mark.parametrize("line", READ)
def test_a_line_sets_the_fields_it_names_and_no_others(line: str) -> None:
    layout, default = Layout.parse(line), Layout()
    assert {name: getattr(layout, name) for name in READ[line]} == READ[line]
    changed = {f.name for f in fields(Layout) if getattr(layout, f.name) != getattr(default, f.name)}
    assert changed <= READ[line].keys()


@pytest.mark.parametrize(
    ("line", "canonical"),
    [
        ("dp=1,tp=1,pp=1:1f1b,zero=0,sync=allreduce,mb=1,recompute=none,dtype=float32", "dp=1"),
        ("mb=4, zero=1 ,pp=2:1f1b,tp=2:1d , dp=2", "dp=2,tp=2,pp=2,zero=1,mb=4"),
        ("tp=8:2.5d/2{form=gather}", "tp=8:2.5d"),
        ("pp=2:zb-v/2", "pp=2:zb-v"),
        ("pp=2:interleaved/1,mb=2", "pp=2:interleaved/1,mb=2"),
        (
            "pp=4:list/1{ memory = 3.0 ; times=10.50/1e1/.5/00; layers=4/3/3/2 }",
            "pp=4:list{layers=4/3/3/2;times=10.5/10/0.5/0;memory=3}",
        ),
        ("sync=server/1{stale=0;reduce=mean}", "sync=server"),
        ("sync=server{reduce=max; stale=2}", "sync=server{stale=2;reduce=max}"),
        ("offload=params:nvme@1.0+optimizer:cpu@.5", "offload=optimizer:cpu@0.5+params:nvme"),
        ("auto,dp=2", "dp=2,auto"),
    ],
)
def test_the_printed_line_is_canonical(line: str, canonical: str) -> None:
    assert str(Layout.parse(line)) == canonical


def test_a_table_reads_as_the_line_with_the_same_keys() -> None:
    table = {"dp": 2, "tp": "4:2d", "pp": "2:list{times=3/4/2/0;memory=1.5}", "zero": "3/2", "mb": 4, "auto": True}
    line = "dp=2,tp=4:2d,pp=2:list{times=3/4/2/0;memory=1.5},zero=3/2,mb=4,auto"
    assert Layout.from_table(table) == Layout.parse(line)
    assert Layout.from_table({"auto": False}) == Layout.from_table({}) == Layout()


SPELLING = [
    ("", "layout = (nothing)", "use one of dp, tp"),
    (",", "layout = (nothing)", "use one of dp, tp"),
    ("dp=2,,tp=2", "layout = dp=2,,tp=2", "a comma stands between two keys; use dp=2,tp=2"),
    ("dp=2, mb=2,", "layout = dp=2, mb=2,", "use dp=2,mb=2"),
    (",pp=2{layers=4/4}", "layout = ,pp=2{layers=4/4}", "use pp=2{layers=4/4}"),
    ("zeros=1", "layout.zeros = 1", "did you mean 'zero'"),
    ("dp", "layout = dp", "use dp=2"),
    ("auto=true", "layout = auto=true", "use auto"),
    ("dp=2,dp=3", "layout.dp = 3", "keep one dp=2"),
    ("dp=two", "layout.dp = two", "'two' is not a whole number"),
    ("dp=2.0", "layout.dp = 2.0", "not a whole number"),
    ("dp=1_0", "layout.dp = 1_0", "not a whole number"),
    ("dp=9999999", "layout.dp = 9999999", "at most six digits"),
    ("dp=", "layout.dp = ", "not of the form N"),
    ("dp=0", "layout.dp = 0", "use dp=1"),
    ("dp=-2", "layout.dp = -2", "use dp=1"),
    ("mb=0", "layout.mb = 0", "use mb=1"),
    ("tp=-4", "layout.tp = -4", "use tp=1"),
    ("tp=4:2dd", "layout.tp = 4:2dd", "did you mean '2d'"),
    ("tp=4:AxBxC", "layout.tp = 4:AxBxC", "use tp=4:1x1x4"),
    ("cp=4:UxR", "layout.cp = 4:UxR", "use cp=4:1x4"),
    ("tp=0:0x2x2", "layout.tp = 0:0x2x2", "use tp=4:2x2x1"),
    ("tp=-1:2d{form=loop}", "layout.tp = -1:2d{form=loop}", "use tp=1:2d{form=loop}"),
    ("tp=0:2.5d/2", "layout.tp = 0:2.5d/2", "use tp=2:2.5d/2"),
    ("pp=0:list/3{memory=2}", "layout.pp = 0:list/3{memory=2}", "use pp=1:list/3{memory=2}"),
    ("cp=0:ulysses", "layout.cp = 0:ulysses", "use cp=1:ulysses"),
    ("tp=4:2d/2", "layout.tp = 4:2d/2", "only 2.5d has a depth; use tp=4:2d"),
    ("tp=8:2.5d/0", "layout.tp = 8:2.5d/0", "sizes start at 1; use tp=8:2.5d"),
    ("tp=8/2", "layout.tp = 8/2", "not of the form"),
    ("tp=4:2d{form=fast}", "layout.tp = 4:2d{form=fast}", "use one of gather, loop"),
    ("tp=4:2d{from=loop}", "layout.tp = 4:2d{from=loop}", "{form=gather|loop}"),
    ("tp=4:2d{form=loop", "layout.tp = 4:2d{form=loop", "not of the form"),
    ("pp=2:1f1", "layout.pp = 2:1f1", "did you mean '1f1b'"),
    ("pp=4/2", "layout.pp = 4/2", "not of the form N[:SCHEDULE[/V]]"),
    ("pp=2:interleaved/0,mb=2", "layout.pp = 2:interleaved/0", "sizes start at 1"),
    ("pp=2{layers=4,4}", "layout.pp = 2{layers=4,4}", "'4,4' is not a whole number"),
    ("pp=2:list{times=1/x/1/0}", "layout.pp = 2:list{times=1/x/1/0}", "'x' is not a number such as 12 or 3.5; use for"),
    ("pp=2:list{times=1/-1/1/0}", "layout.pp = 2:list{times=1/-1/1/0}", "'-1' is not a number"),
    ("pp=2:list{memory=inf}", "layout.pp = 2:list{memory=inf}", "'inf' is not a number"),
    ("pp=2:list{memory=2;memory=3}", "layout.pp = 2:list{memory=2;memory=3}", "memory is given twice"),
    ("pp=2:list{memory=2;}", "layout.pp = 2:list{memory=2;}", "{layers=9/8/8/7;times=F/I/W/C;memory=M}"),
    ("dp=2,sync=server,stale=1", "layout.stale = 1", "use sync=server{stale=1}"),
    ("stale=1,sync=server/2{reduce=sum}", "layout.stale = 1", "use sync=server/2{reduce=sum;stale=1}"),
    ("dp=2,zero=3,reduce=int8", "layout.reduce = int8", "is an option of zero, and stands in its braces; use zero=3{"),
    ("memory=2", "layout.memory = 2", "use pp=2:1f1b{memory=2}"),
    ("stages=0/1", "layout.stages = 0/1", "use recompute=full{stages=0/1}"),
    ("sync=server;stale=1", "layout.sync = server;stale=1", "not of the form allreduce|server[/N][{stale=S;"),
    ("pp=2:list{memory}", "layout.pp = 2:list{memory}", "not of the form"),
    ("pp=2:list{time=1/1/1/0}", "layout.pp = 2:list{time=1/1/1/0}", "not of the form"),
    ("tp=4:2d{layers=2/2}", "layout.tp = 4:2d{layers=2/2}", "{form=gather|loop}"),
    ("cp=2:rings", "layout.cp = 2:rings", "did you mean 'ring'"),
    ("zero=4", "layout.zero = 4", "use zero=3"),
    ("zero=3{gather=int4}", "layout.zero = 3{gather=int4}", "gather=int8"),
    ("zero=3{keep=pass}", "layout.zero = 3{keep=pass}", "keep=step"),
    ("zero=1/0", "layout.zero = 1/0", "sizes start at 1"),
    ("sync=severs", "layout.sync = severs", "did you mean 'server'"),
    ("sync=server/0", "layout.sync = server/0", "sizes start at 1"),
    ("sync=server{reduce=most}", "layout.sync = server{reduce=most}", "use one of mean, sum, max"),
    ("sync=server{stale=-1}", "layout.sync = server{stale=-1}", "staleness at 0"),
    ("recompute=some", "layout.recompute = some", "use one of none, selective, full"),
    ("pp=2,recompute=full{stages=1/0}", "layout.recompute = full{stages=1/0}", "full{stages=0/1}"),
    ("offload=params", "layout.offload = params", "WHAT:WHERE"),
    ("offload=param:cpu", "layout.offload = param:cpu", "did you mean 'params'"),
    ("offload=params:gpu", "layout.offload = params:gpu", "did you mean 'cpu'"),
    ("offload=params:cpu@0", "layout.offload = params:cpu@0.0", "use offload=params:cpu@0.5"),
    ("offload=params:cpu@1.5", "layout.offload = params:cpu@1.5", "use offload=params:cpu@0.5"),
    ("offload=params:cpu@1e", "layout.offload = params:cpu@1e", "WHAT:WHERE[@F]"),
    ("offload=params:cpu+params:nvme", "layout.offload = params:cpu+params:nvme", "given twice"),
    ("dtype=fp32", "layout.dtype = fp32", "use one of float64, float32, bf16, fp16"),
]


@pytest.mark.parametrize(("line", "start", "part"), SPELLING)
def test_a_misspelt_line_is_refused_with_its_setting_value_and_remedy(line: str, start: str, part: str) -> None:
    with pytest.raises(LayoutError) as error:
        Layout.parse(line)
    message = str(error.value)
    assert message.startswith(f"{start}: ")
    assert part in message


def test_an_unknown_key_is_offered_what_is_built() -> None:
    for read in (lambda: Layout.parse("x=1"), lambda: Layout.from_table({"x": 1})):
        with pytest.raises(
            LayoutError, match=r"^layout\.x = 1: unknown key; use one of (.*), as in dp=2,tp=4:2d$"
        ) as error:
            read()
        offered = str(error.value).partition("use one of ")[2].removesuffix(", as in dp=2,tp=4:2d")
        assert sorted(offered.split(", ")) == sorted(["dp", "mb", *BUILT])


def test_what_is_not_built_is_called_so_where_it_is_also_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(BUILT, "ep", raising=False)
    with pytest.raises(LayoutError, match=r"ep·etp = 2 does not divide") as error:
        Layout.parse("ep=2")
    assert error.value.__notes__ == ["and expert parallelism is not built yet"]


@pytest.mark.parametrize(
    ("table", "start"),
    [
        ({"dq": 2}, "layout.dq = 2: unknown key (did you mean 'dp'?)"),
        ({"sync": "server", "stale": 1}, "layout.stale = 1: is an option of sync, and stands in its braces; use sync="),
        ({"dp": 2.0}, "layout.dp = 2.0: is not of the form N"),
        ({"dp": True}, "layout.dp = True: is not of the form N"),
        ({"tp": {"size": 2}}, "layout.tp = {'size': 2}: is not of the form"),
        ({"auto": "yes"}, "layout.auto = yes: is not a truth value"),
    ],
)
def test_a_table_with_a_wrong_key_or_type_is_refused(table: dict[str, object], start: str) -> None:
    with pytest.raises(LayoutError) as error:
        Layout.from_table(table)
    assert str(error.value).startswith(start)
