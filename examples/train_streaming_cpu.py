"""Train the draft head of train_eagle3_cpu.py while a server produces its states: no data set on disk.

    python examples/train_streaming_cpu.py                              # serves a tiny random model itself
    python examples/train_streaming_cpu.py URL MODEL chats.jsonl        # layertap serve MODEL --layers eagle3+last --allow-delete

MODEL gives the tokenizer here: chats are tokenized on this side, so that loss masks fit the rows.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from train_eagle3_cpu import DraftHead, write_chats

from layertap.datasets import stream

EPOCHS = 4


@contextmanager
def served(model: Path, storage: Path) -> Iterator[str]:
    """Run `layertap serve`; yields its address."""
    command = [sys.executable, "-c", "from layertap.cli import main; main()", "serve", str(model), "--layers", "0,2,-1"]
    command += ["--shared-storage-path", str(storage), "--allow-delete", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if " serving " in line:
                break
        else:
            raise SystemExit("the server didn't start")
        yield line.split()[-1]
    finally:
        process.terminate()
        process.communicate()


def train(url: str, model: str, chats: Path) -> list[float]:
    """Train a head on a stream; returns the mean loss of each epoch."""
    samples = stream(url, chats, tokenizer=model, max_ahead=16)
    torch.manual_seed(0)
    head: DraftHead | None = None
    losses = []
    for epoch in range(EPOCHS):
        total, count = 0.0, 0
        for item in samples:  # another iteration asks for all of them again
            states, ids, mask = item["hidden_states"], item["token_ids"], item["loss_mask"]
            if mask is None or not mask[2:].any():
                continue
            if head is None:
                head = DraftHead(states.shape[1], states.shape[2], vocab_size(model))
                optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3)
            logits = head(states[:-2].float().flatten(1), ids[1:-1])
            loss = nn.functional.cross_entropy(logits[mask[2:]], ids[2:][mask[2:]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, count = total + loss.item(), count + 1
        losses.append(total / count)
        print(f"epoch {epoch}: loss {losses[-1]:.3f} over {count} chats")
    return losses


def vocab_size(model: str) -> int:
    """As the model's configuration has it."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)


def main() -> None:
    """Serve, where no server is given, and train."""
    if len(sys.argv) > 3:
        losses = train(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        from layertap.testing import zoo

        with tempfile.TemporaryDirectory() as folder:
            model, chats = zoo.save("llama", folder), Path(folder) / "chats.jsonl"
            write_chats(chats)
            with served(model, Path(folder) / "storage") as url:
                losses = train(url, str(model), chats)
    if not losses[-1] < losses[0]:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
