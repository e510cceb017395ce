"""A process that stands still in the middle of a step is named within the timeout, with what it does and who waits."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, initialize
from pipeline.errors import LinkError
from tests.pipeline.processes import run_processes

TIMEOUT = 3.0


class Standing(nn.Module):
    """Stops its process in a forward, the how-manieth is given, after it has told who it is."""

    def __init__(self, path: str, when: int) -> None:
        super().__init__()
        self.path = Path(path)
        self.left = when

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            self.path.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return x


def worker(path: str, link: str) -> tuple[str, float]:
    """What this rank was told, and how long it had waited."""
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(Standing, path, 7), LayerSpec(nn.Linear, 4, 4)]
    config = {"partition": [0, 1, 2, 3], "schedule": "1f1b", "micro_batches": 4, "timeout": TIMEOUT, "link": link}
    engine = initialize(
        PipelineModule(layers, functional.mse_loss),
        config={**config, "device": "cpu"},
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    item = (torch.ones(2, 4), torch.ones(2, 4))
    engine.train_batch([item] * 4)
    started = time.monotonic()
    try:
        engine.train_batch([item] * 4)
    except LinkError as error:
        waited = time.monotonic() - started
        if engine.mesh.rank == 0:
            time.sleep(1.5)  # until the others have told it too
            os.kill(int(Path(path).read_text()), signal.SIGCONT)
        return "\n".join([str(error), *error.__notes__]), waited
    return "", 0.0


@pytest.mark.parametrize("link", ["shm", "gloo"])
def test_a_stopped_rank_is_named_with_its_action_and_who_waits(tmp_path: Path, link: str) -> None:
    told = run_processes(worker, 3, str(tmp_path / "process"), link)
    for rank in (0, 2):
        text, waited = told[rank]
        assert "rank 1 is in 1F2 since" in text
        assert "rank 1 holds up rank" in text
        assert f"rank {rank} waits in" in text
        assert TIMEOUT <= waited < 3 * TIMEOUT
    texts = [told[rank][0] for rank in (0, 2)]  # for whoever tells it later the other has left
    assert any("rank 1 holds up ranks 0, 2" in text for text in texts)
