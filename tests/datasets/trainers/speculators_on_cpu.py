"""`speculators` with its trainer on the CPU, which it leaves to accelerators: `python speculators_on_cpu.py train ...`."""

import torch
from speculators.__main__ import app
from speculators.train import trainer

if __name__ == "__main__":
    trainer.get_local_rank = lambda: "cpu"  # what it moves model and batches to
    torch.accelerator.synchronize = lambda *_args, **_kwargs: None
    app()
