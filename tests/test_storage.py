"""Where tensors lie, and whether anything is behind them."""

from __future__ import annotations

import torch

from shoal.storage import same_place, stands_in
from shoal.train.stand_ins import StandIns


def test_two_views_lie_in_one_place_where_they_begin_at_the_same_element_of_one_storage() -> None:
    for made in (torch.zeros(12), _stand_in()):
        assert same_place(made, made.view(3, 4))
        assert same_place(made[4:], made, 4)
        assert not same_place(made[4:], made)
        assert not same_place(made.clone(), made)


def test_a_stand_in_says_that_it_is_on_a_device_and_has_nothing_there() -> None:
    made = _stand_in()
    assert made.device == torch.device("cpu")
    assert stands_in(made)
    assert not stands_in(torch.zeros(12))


def _stand_in() -> torch.Tensor:
    with StandIns():
        return torch.zeros(12)
