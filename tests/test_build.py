"""What cannot be built of a layout."""

from __future__ import annotations

import pytest

from shoal.build import check_optimizers
from shoal.errors import LayoutError
from shoal.layout import Layout


@pytest.mark.parametrize(("line", "other"), [("pp=4:pipedream,mb=3", "2bw"), ("pp=4:pipedream-vertical,mb=2", "1f1b")])
def test_where_stages_update_alone_muon_is_refused_for_what_admits_as_many_micro_batches(line: str, other: str) -> None:
    with pytest.raises(LayoutError, match=f"Muon's ranks work together, .*; use pp=4:{other}, or another optimizer"):
        check_optimizers(Layout.parse(line), {"muon", "adamw"})
    legal = Layout.parse(line.replace(Layout.parse(line).schedule, other))
    check_optimizers(legal, {"muon", "adamw"})
