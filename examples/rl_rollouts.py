"""A loop of reinforcement learning in small: groups of rollouts with their hidden states, and new weights in between.

Each step asks a server for a group of 8 rollouts per prompt, gets tokens, log probabilities and the states of exactly those tokens
(recomputed states are not the same states), computes an advantage within the group, and then a trainer would make a step. Here the
"trainer" only shifts the weights a little and saves them, and the server is told to load them. No request runs on a mixture: each
file says the version of the weights that made it.

The server: layertap serve MODEL --layers 1,2,4 --storage /dev/shm/hs --allow-delete --allow-weight-updates CHECKPOINTS

Run as: python examples/rl_rollouts.py URL MODEL CHECKPOINTS
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from layertap.client import HiddenStatesClient

GROUP = 8
PROMPTS = ["The sum of two and three is", "A short poem about the sea:"]


@dataclass
class Rollout:
    """One answer with everything that a trainer needs of it."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    states: torch.Tensor  # [prompt and output tokens but the last, layers, hidden]
    version: str


def roll_out(client: HiddenStatesClient, prompt: str) -> list[Rollout]:
    """A group of answers to one prompt."""
    answer = client.complete(
        prompt,
        n=GROUP,
        max_tokens=12,
        logprobs=0,
        ignore_eos=True,
        return_token_ids=True,
        kv_transfer_params={"include_output_tokens": True},
    )
    group = []
    for choice in answer["choices"]:
        loaded = client.fetch_raw(choice)
        tokens = choice["prompt_token_ids"] + choice["token_ids"]
        assert loaded.token_ids.tolist() == tokens[:-1], "the file isn't of this rollout"
        group.append(
            Rollout(
                prompt_ids=choice["prompt_token_ids"],
                output_ids=choice["token_ids"],
                logprobs=choice["logprobs"]["token_logprobs"],
                states=client.fetch(choice)["hidden_states"],
                version=loaded.info.facts.get("weights_version", "as loaded"),
            )
        )
        client.delete(choice)
    return group


def advantages(group: list[Rollout]) -> torch.Tensor:
    """Rewards against the group's mean; the reward here is how many different tokens an answer has."""
    rewards = torch.tensor([float(len(set(rollout.output_ids))) for rollout in group])
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def train_step(model: torch.nn.Module, rollouts: list[Rollout], weights: torch.Tensor) -> None:
    """Where a trainer's step would be."""
    del rollouts, weights
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def main(url: str, model_name: str, checkpoints: str, steps: int = 3) -> None:
    """The loop."""
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    with HiddenStatesClient(url) as client:
        for step in range(steps):
            groups = [roll_out(client, prompt) for prompt in PROMPTS]
            rollouts = [rollout for group in groups for rollout in group]
            versions = {rollout.version for rollout in rollouts}
            print(
                f"step {step}: {len(rollouts)} rollouts, weights {', '.join(versions)}, "
                f"mean logprob {sum(sum(r.logprobs) for r in rollouts) / sum(len(r.logprobs) for r in rollouts):.4f}, "
                f"states {tuple(rollouts[0].states.shape)}"
            )
            train_step(model, rollouts, torch.cat([advantages(group) for group in groups]))
            folder = Path(checkpoints) / f"step-{step + 1}"
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            client.update_weights(folder, version=f"step-{step + 1}")


if __name__ == "__main__":
    main(*sys.argv[1:4])
