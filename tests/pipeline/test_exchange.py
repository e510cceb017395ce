"""Values between ranks whose forms nobody knows yet, taken in another order than they are sent."""

from __future__ import annotations

import pytest
import torch

from pipeline import run_local
from pipeline.exchange import Crossing, Forms, Inbox, ShapeTable, send_value, value_from
from pipeline.links.protocol import LANE_F
from pipeline.mesh import make_mesh
from pipeline.shapes import entering

CPU = torch.device("cpu")
CROSSINGS = [Crossing(1, 0), Crossing(1, 1), Crossing(1, 2)]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_values_of_unknown_form_are_found_whatever_is_needed_first(order: tuple[int, ...], depth: int) -> None:
    def worker() -> list[list[float]]:
        link = make_mesh(device="cpu").link
        forms = Forms(ShapeTable(), [0, 1, 2])
        if link.rank == 0:
            values = [entering(torch.full((2 + n,), float(n))) for n in range(3)]
            pending = [send_value(link, 1, at, v, forms, CPU) for at, v in zip(CROSSINGS, values, strict=True)]
            for transfer in (one for each in pending for one in each):
                transfer.wait()
            return []
        inbox = Inbox(link, 0, LANE_F, CROSSINGS, depth, CPU)
        inbox.open(forms)
        found = {}
        for number in order:
            form, tensors = inbox.take(CROSSINGS[number])
            assert form is not None
            found[number] = value_from(form, tensors).leaves[0].tolist()
        return [found[number] for number in range(3)]

    assert run_local(worker, 2)[1] == [[0.0] * 2, [1.0] * 3, [2.0] * 4]
