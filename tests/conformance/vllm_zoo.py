"""Runs zoo models on vLLM's CPU build and compares every row with the float32 oracle.

`python tests/conformance/vllm_zoo.py [NAME ...]` prints one JSON line a model:

- ok: every row equals the oracle's;
- vLLM differs: rows don't, but vLLM's own tokens follow from them: it computes another model than transformers does;
- wrong: neither;
- refused by layertap, or not run by vLLM's CPU build: with the reason.

vLLM and the oracle run in forked processes of their own: a model that ends vLLM doesn't end the others, and vLLM's Transformers
backend changes transformers' classes.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engines" / "vllm"))

import checkpoints
import running

_SECONDS = 240
_LENGTHS = [1, 9, 30, 70, 100, 40, 64, 65]


def generate(name: str, folder: Path) -> dict[str, Any]:
    """One engine, eight requests: mixed lengths, chunks of 64 tokens, generated tokens' rows, all layers."""
    from layertap.errors import LayertapError

    try:
        checkpoint, told = checkpoints.save(name, folder), checkpoints.ONLY_VLLM.get(name, {})
        with running.running(checkpoint, folder / "states", model_impl="auto", hf_overrides=told) as llm:
            core = llm.llm_engine.engine_core.engine_core
            architecture = type(core.model_executor.driver_worker.worker.get_model()).__name__
            sampling = running.params(6, include_output_tokens=True)
            outputs = llm.generate(running.prompts(_LENGTHS, seed=5), sampling, use_tqdm=False)
    except LayertapError as exc:
        return {"status": "refused", "reason": str(exc)}
    requests = [
        {
            "prompt": list(output.prompt_token_ids),
            "generated": list(output.outputs[0].token_ids),
            "path": output.kv_transfer_params["hidden_states_path"],
        }
        for output in outputs
    ]
    return {"status": "generated", "architecture": architecture, "requests": requests}


def verify(name: str, folder: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Every file against the oracle."""
    from layertap.testing import zoo

    model = running.load_oracle(name, checkpoints.save(name, folder))
    requests = [SimpleNamespace(**request) for request in found.pop("requests")]
    attention = zoo.case(name).attention
    wrong = [reason for request in requests if (reason := compare(model, request, attention))]
    if not wrong:
        return {**found, "status": "ok"}
    own = all(follows_from_saved_rows(model, request) for request in requests)
    return {**found, "status": "vLLM differs" if own else "wrong", "reason": wrong[0]}


def compare(model: Any, request: Any, attention: str) -> str | None:
    """What is wrong with a request's file, or None."""
    try:
        running.check_file(model, request.path, [*request.prompt, *request.generated][:-1], attention=attention)
    except AssertionError as exc:
        return str(exc)[:300]
    return None


def follows_from_saved_rows(model: Any, request: Any) -> bool:
    """Whether the generated tokens are what the model's own norm and head make of the saved last rows (near ties aside)."""
    import torch

    from layertap import load_hidden_states
    from layertap.capture.blocks import find_blocks

    rows = load_hidden_states(request.path)["hidden_states"][:, -1]
    tokens = torch.tensor([[*request.prompt, *request.generated][:-1]])

    def replace(_block: Any, _args: Any, out: Any) -> Any:
        return (rows[None], *out[1:]) if isinstance(out, tuple) else rows[None]

    hook = find_blocks(model).blocks[-1].register_forward_hook(replace)
    try:
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[0, len(request.prompt) - 1 :].float()
    finally:
        hook.remove()
    chosen = logits.gather(1, torch.tensor(request.generated)[:, None])[:, 0]
    return bool((logits.max(dim=1).values - chosen < 1e-2 * logits.std(dim=1)).all())


def in_fork(what: Callable[[], dict[str, Any]], name: str, folder: Path) -> dict[str, Any]:
    """`what()` in a child; what it returns, or how it died."""
    report = folder / f"{name}.json"
    report.unlink(missing_ok=True)
    deadline = time.monotonic() + _SECONDS
    child = os.fork()
    if child == 0:
        sink = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        try:
            found = what()
        except BaseException as exc:  # noqa: BLE001 - reported
            traceback.print_exc()
            lines = str(exc).strip().splitlines() or [""]
            found = {"status": "not run", "reason": f"{type(exc).__name__}: {' '.join(lines[:2])}"[:300]}
        report.write_text(json.dumps(found))
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return {"status": "not run", "reason": f"took more than {_SECONDS} s"}
        time.sleep(0.05)
    return dict(json.loads(report.read_text())) if report.exists() else {"status": "not run", "reason": "it died"}


def try_model(name: str, folder: Path) -> dict[str, Any]:
    """Generate, then verify."""
    began = time.monotonic()
    found = in_fork(lambda: generate(name, folder), name, folder)
    if found["status"] == "generated":
        found = in_fork(lambda: verify(name, folder, found), name, folder)
    return {"name": name, **found, "seconds": round(time.monotonic() - began, 1)}


def prepare() -> None:
    """Import what is slow once, before the forks."""
    running.set_environment()
    os.environ["OMP_NUM_THREADS"] = "1"
    import transformers  # noqa: F401
    import vllm  # noqa: F401
    from vllm import LLM  # noqa: F401
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # each model has a process of its own anyway


def main(names: list[str]) -> None:
    prepare()
    from layertap.testing import zoo

    folder = Path(os.environ.get("LAYERTAP_ZOO_FOLDER") or tempfile.mkdtemp(prefix="layertap-zoo-"))
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or sorted(zoo.CASES):
        print(json.dumps(try_model(name, folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
