"""Train a small EAGLE-3-like draft head on a model's hidden states, on the CPU, and watch its loss fall.

    python examples/train_eagle3_cpu.py                         # a tiny random model, made on the spot
    python examples/train_eagle3_cpu.py MODEL chats.jsonl       # a model and chats of yours

The head sees, at position t, the states of three layers at t and the embedding of token t + 1, and guesses token t + 2,
which the model itself would predict from its last state at t + 1. It is trained where that token is in the loss mask.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from layertap import LLM
from layertap.datasets.extraction import RunOptions, extract_dataset
from layertap.datasets.inputs import open_input
from layertap.datasets.loader import HiddenStatesStream

EPOCHS = 4


class DraftHead(nn.Module):
    """Three states and the next token's embedding to one attention block, and on to the vocabulary."""

    def __init__(self, num_states: int, hidden_size: int, vocab_size: int, width: int = 32) -> None:
        super().__init__()
        self.fuse = nn.Linear(num_states * hidden_size, width)
        self.embed = nn.Embedding(vocab_size, width)
        self.join = nn.Linear(2 * width, width)
        self.block = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(width, vocab_size)

    def forward(self, states: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """Guess from states [tokens, num_states * hidden] and next_ids [tokens]; returns logits [tokens, vocab]."""
        x = self.join(torch.cat([self.fuse(states), self.embed(next_ids)], dim=-1))
        causal = nn.Transformer.generate_square_subsequent_mask(len(x))
        return self.head(self.block(x[None], src_mask=causal, is_causal=True)[0])


def write_chats(path: Path) -> None:
    """A few chats with something to learn."""
    with path.open("w") as file:
        for number in range(50):
            first, second = number % 10, number // 10
            messages = [
                {"role": "user", "content": f"What is {first} plus {second}?"},
                {"role": "assistant", "content": f"{first} plus {second} is {first + second}. Anything else?"},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def train(states_folder: Path, vocab_size: int) -> list[float]:
    """Train a head on a data set; returns the mean loss of each epoch."""
    torch.manual_seed(0)
    stream = HiddenStatesStream(states_folder, seed=0)
    head = DraftHead(len(stream.data.layers), stream.data.hidden_size, vocab_size)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3)
    losses = []
    for epoch in range(EPOCHS):
        stream.set_epoch(epoch)
        total, count = 0.0, 0
        for item in stream:
            ids, mask = item["token_ids"], item["loss_mask"]
            if mask is None or not mask[2:].any():
                continue
            logits = head(item["hidden_states"][:-2].float().flatten(1), ids[1:-1])
            loss = nn.functional.cross_entropy(logits[mask[2:]], ids[2:][mask[2:]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, count = total + loss.item(), count + 1
        losses.append(total / count)
        print(f"epoch {epoch}: loss {losses[-1]:.3f} over {count} chats")
    return losses


def main() -> None:
    """Extract and train."""
    with tempfile.TemporaryDirectory() as folder:
        states = Path(folder) / "states"
        if len(sys.argv) > 2:
            model, chats = sys.argv[1], Path(sys.argv[2])
        else:
            from layertap.testing import zoo

            model, chats = str(zoo.save("llama", Path(folder) / "llama")), Path(folder) / "chats.jsonl"
            write_chats(chats)
        with LLM(model) as llm:
            deepest = llm.info.num_layers
            layers = sorted({1, deepest // 2, deepest}) if deepest < 6 else "eagle3"
            report = extract_dataset(llm, open_input(chats), states, RunOptions(layers=layers))
            vocab_size = llm.info.vocab_size
        print(f"{report.num_samples} chats, {report.num_tokens} tokens of states")
        losses = train(states, vocab_size)
    if not losses[-1] < losses[0]:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
