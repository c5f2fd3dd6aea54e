"""Runs zoo models on vLLM's CPU build and compares every row with the float32 oracle.

`python tests/conformance/vllm_zoo.py [NAME ...]` prints one JSON line a model: ok, refused by layertap (with its reason), or not
run by vLLM (with vLLM's). Each model gets a forked process of its own, so that one that ends vLLM doesn't end the others.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engines" / "vllm"))

import checkpoints
import running

_SECONDS = 240


def try_model(name: str, folder: Path) -> dict[str, Any]:
    """One engine, eight requests: mixed lengths, chunks of 64 tokens, generated tokens' rows, all layers."""
    from layertap.errors import LayertapError

    checkpoint = checkpoints.save(name, folder)
    storage = folder / "states"
    model = running.load_oracle(name, checkpoint)  # first: vLLM's Transformers backend changes transformers' classes
    try:
        with running.running(checkpoint, storage, model_impl="auto") as llm:
            core = llm.llm_engine.engine_core.engine_core
            architecture = type(core.model_executor.driver_worker.worker.get_model()).__name__
            asked = running.prompts([1, 9, 30, 70, 100, 40, 64, 65], seed=5)
            outputs = llm.generate(asked, running.params(6, include_output_tokens=True), use_tqdm=False)
            wrong = [reason for output in outputs if (reason := compare(model, output))]
    except LayertapError as exc:
        return {"status": "refused", "reason": str(exc)}
    if not wrong:
        return {"status": "ok", "architecture": architecture}
    # vLLM may compute another model than transformers; then its own tokens follow from the rows that it saved
    own = all(follows_from_saved_rows(model, output) for output in outputs)
    return {"status": "vLLM differs" if own else "wrong", "architecture": architecture, "reason": wrong[0]}


def compare(model: Any, output: Any) -> str | None:
    """What is wrong with a request's file, or None."""
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    try:
        running.check_file(model, output.kv_transfer_params["hidden_states_path"], tokens[:-1])
    except AssertionError as exc:
        return str(exc)[:300]
    return None


def follows_from_saved_rows(model: Any, output: Any) -> bool:
    """Whether the generated tokens are what the model's own norm and head make of the saved last rows (near ties aside)."""
    import torch

    from layertap import load_hidden_states
    from layertap.capture.blocks import find_blocks

    rows = load_hidden_states(output.kv_transfer_params["hidden_states_path"])["hidden_states"][:, -1]
    prompt, generated = list(output.prompt_token_ids), list(output.outputs[0].token_ids)

    def replace(_block: Any, _args: Any, out: Any) -> Any:
        return (rows[None], *out[1:]) if isinstance(out, tuple) else rows[None]

    hook = find_blocks(model).blocks[-1].register_forward_hook(replace)
    try:
        with torch.no_grad():
            logits = (
                model(torch.tensor([[*prompt, *generated][:-1]]), use_cache=False).logits[0, len(prompt) - 1 :].float()
            )
    finally:
        hook.remove()
    chosen = logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
    return bool((logits.max(dim=1).values - chosen < 1e-2 * logits.std(dim=1)).all())


def run_in_fork(name: str, folder: Path) -> dict[str, Any]:
    """`try_model` in a child; what it says, or how it died."""
    report = folder / f"{name}.json"
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        sink = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        try:
            found = try_model(name, folder)
        except BaseException as exc:  # noqa: BLE001 - reported
            traceback.print_exc()
            last = str(exc).strip().splitlines() or [type(exc).__name__]
            found = {"status": "not run", "reason": f"{type(exc).__name__}: {last[0]}"[:300]}
        report.write_text(json.dumps(found))
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() - began > _SECONDS:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return {"status": "not run", "reason": f"took more than {_SECONDS} s"}
        time.sleep(0.1)
    if not report.exists():
        return {"status": "not run", "reason": "the process died"}
    found = json.loads(report.read_text())
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def main(names: list[str]) -> None:
    running.set_environment()
    os.environ["OMP_NUM_THREADS"] = "1"
    import transformers  # noqa: F401 - warm before the forks
    import vllm  # noqa: F401
    from vllm import LLM  # noqa: F401
    from vllm.model_executor.models import registry

    from layertap.testing import zoo

    registry._run_in_subprocess = lambda function: function()  # each model has a process of its own anyway

    folder = Path(os.environ.get("LAYERTAP_ZOO_FOLDER") or tempfile.mkdtemp(prefix="layertap-zoo-"))
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or sorted(zoo.CASES):
        print(json.dumps({"name": name, **run_in_fork(name, folder)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
