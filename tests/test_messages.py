"""Each error that README.md and docs/ tell of, provoked as a first-time user would: it names what is wrong, and what to do.

The tables hold: what is done, the error (or status, or exit code), and words that its message must have.
"""

import json
import shutil
import socket
import sys

import httpx
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from layertap import (
    LLM,
    CorruptError,
    ExtractionError,
    ForeignError,
    HiddenStatesError,
    LayerError,
    MissingError,
    ModelError,
    OptionError,
    PromptError,
    SamplingParams,
    StoreFullError,
    TargetExistsError,
    TornError,
    UnsupportedModelError,
    WaitTimeoutError,
    WriterDiedError,
    load_hidden_states,
)
from layertap.cli.app import make_app
from layertap.files.locks import WriterLock
from layertap.serving.server import run_background
from layertap.serving.settings import ServerSettings
from layertap.testing import zoo

LOUD = 77  # its stream doesn't fit into float16
PROMPT = {"prompt_token_ids": [40, 41, 42]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the store, the model and the files of bad prompts are."""
    return tmp_path_factory.mktemp("messages")


@pytest.fixture(scope="module")
def model(folder):
    checkpoint = zoo.save("llama", folder)
    (folder / "afile").touch()
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.embed_tokens.weight"][LOUD] *= 1e6
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


@pytest.fixture(scope="module")
def llm(model, folder):
    extra = {
        "shared_storage_path": str(folder / "store"),
        "min_free_bytes": 0,
        "max_storage_bytes": 2_000_000,
        "allow_custom_save_path": [str(folder / "store")],
    }
    config = {"kv_connector": "HiddenStatesConnector", "kv_connector_extra_config": extra}
    with LLM(model, layers=[1, 3], dtype="float32", kv_transfer_config=config) as made:
        yield made


def generate(llm, prompt=PROMPT, max_tokens=1, n=1, **transfer):
    params = SamplingParams(max_tokens=max_tokens, n=n, extra_args={"kv_transfer_params": transfer})
    return llm.generate([prompt], params, use_tqdm=False)[0].kv_transfer_params["hidden_states_path"]


def twice(llm, folder):
    path = str(folder / "store" / "twice.safetensors")
    for _ in range(2):
        generate(llm, hidden_states_path=path)


CALLS = {
    "unknown option": (lambda m, f: generate(m, include_output_token=True), OptionError, "'include_output_tokens'"),
    "wrong type": (
        lambda m, f: generate(m, include_output_tokens="yes"),
        OptionError,
        "include_output_tokens|true or false",
    ),
    "no such layer": (lambda m, f: generate(m, layers=[9]), LayerError, "layer 9|0 (the embeddings) to 4"),
    "layer stands twice": (lambda m, f: m.extract([PROMPT], layers=[1, 1]), LayerError, "layer 1|twice"),
    "preset too deep": (lambda m, f: m.extract([PROMPT], layers="eagle3"), LayerError, "eagle3|4 blocks|name the ids"),
    "unknown preset": (lambda m, f: m.extract([PROMPT], layers="eagle"), LayerError, "'eagle3'|presets:"),
    "output of extract": (
        lambda m, f: m.extract([PROMPT], positions="output"),
        OptionError,
        "positions|generates nothing",
    ),
    "positions outside": (lambda m, f: generate(m, positions=[0, 99]), OptionError, "positions|has rows 0 to"),
    "save_dtype": (lambda m, f: generate(m, save_dtype="bf16"), OptionError, "save_dtype|'bfloat16'"),
    "bad tag": (lambda m, f: generate(m, tag="../x"), OptionError, "tag|letters, digits"),
    "file exists": (twice, TargetExistsError, "twice.safetensors|overwrite"),
    "store full": (
        lambda m, f: generate(m, max_tokens=400, n=8, layers="all", include_output_tokens=True),
        StoreFullError,
        "max_storage_bytes",
    ),
    "empty prompt": (lambda m, f: list(m.extract([[1, 2], [], [3]])), ExtractionError, "prompt 1: |empty"),
    "too long": (lambda m, f: generate(m, {"prompt_token_ids": [40] * 99_999}), PromptError, "prompt 0: |99999|length"),
    "no such token": (
        lambda m, f: generate(m, {"prompt_token_ids": [10**6]}),
        PromptError,
        "prompt 0: |1000000|vocabulary",
    ),
    "overflow": (
        lambda m, f: list(m.extract([[40, LOUD]], save_dtype="float16")),
        ExtractionError,
        "position 1, layer 1|take bfloat16 or float32",
    ),
    "sampling": (
        lambda m, f: m.generate([PROMPT], {"structured_outputs": {"regex": "a"}}),
        OptionError,
        "structured_outputs|engine='vllm'",
    ),
    "several processes": (
        lambda m, f: LLM(f / "llama", tensor_parallel_size=2),
        OptionError,
        "tensor_parallel_size|engine='vllm'",
    ),
    "engine option": (lambda m, f: LLM(f / "llama", dtyp="float32"), OptionError, "dtyp|'dtype'"),
    "a file for a storage": (
        lambda m, f: LLM(f / "llama", storage=f / "afile"),
        OptionError,
        "storage: |afile is a file",
    ),
    "a file for rows": (
        lambda m, f: m.extract([PROMPT], storage=f / "afile"),
        OptionError,
        "storage: |afile is a file",
    ),
    "text for messages": (lambda m, f: m.chat("hello"), PromptError, "messages: |generate() takes text"),
    "half a layer": (lambda m, f: m.extract([PROMPT], layers="1.5"), LayerError, "'1.5' is neither an id nor a preset"),
    "no length": (lambda m, f: LLM(f / "llama", max_model_len=0), OptionError, "max_model_len|at least 1, got 0"),
    "engine": (lambda m, f: LLM(f / "llama", engine="hf"), OptionError, "engine|'transformers' or 'vllm'"),
    "dtype": (lambda m, f: LLM(f / "llama", dtype="int3"), OptionError, "dtype|'int3'|bfloat16"),
    "no model": (lambda m, f: LLM(f / "nothing"), ModelError, "nothing|no such folder"),
    "adapter": (lambda m, f: m.generate([PROMPT], lora_request=object()), OptionError, "lora_request|engine='vllm'"),
    "encoder-decoder": (lambda m, f: LLM(zoo.save("t5", f)), UnsupportedModelError, "t5|encoder-decoder"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_be_honoured_says_why_and_what_to_do(name, llm, folder):
    provoke, error, words = CALLS[name]
    with pytest.raises(error) as caught:
        provoke(llm, folder)
    for word in words.split("|"):
        assert word in str(caught.value)


FILES = {
    "missing": (lambda p: p.unlink(), MissingError, "nobody is writing it"),
    "torn": (lambda p: p.write_bytes(p.read_bytes()[:-9]), TornError, "bytes"),
    "foreign": (lambda p: p.write_bytes(b"text" * 3000), ForeignError, "not a safetensors file"),
    "corrupt": (lambda p: p.write_bytes(p.read_bytes()[:-9] + b"\1" * 9), CorruptError, "checksum"),
    "dead writer": (
        lambda p: (p.unlink(), p.with_name(p.name + ".lock").write_text("{}")),
        WriterDiedError,
        "ended before",
    ),
    "failed": (
        lambda p: (p.unlink(), p.with_name(p.name + ".error").write_text('{"reason": "disk full", "request_id": "r"}')),
        HiddenStatesError,
        "disk full|request r",
    ),
}


@pytest.fixture
def file(llm, tmp_path):
    path = generate(llm)
    load_hidden_states(path)  # it is there when this returns
    shutil.copy(path, tmp_path / "some.safetensors")
    return tmp_path / "some.safetensors"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_delivered_is_named_with_the_reason(name, file):
    spoil, error, words = FILES[name]
    spoil(file)
    with pytest.raises(error) as caught:
        load_hidden_states(file, timeout=1)
    for word in ("some.safetensors", *words.split("|")):
        assert word in str(caught.value)


def test_a_reader_whose_time_is_up_is_told_that_the_writer_lives(tmp_path):
    lock = WriterLock(tmp_path / "slow.safetensors", "r")
    with pytest.raises(WaitTimeoutError, match=r"slow\.safetensors.*a longer timeout may help"):
        load_hidden_states(tmp_path / "slow.safetensors", timeout=0.01)
    lock.remove()


ROWS = {
    "good.jsonl": [{"prompt": "one of the prompts"}, {"prompt": "another one"}],
    "other.jsonl": [{"prompt": "something else"}, {"prompt": "altogether"}],
    "both.jsonl": [{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}],
}
COMMANDS = {
    "no input": ("extract MODEL none.jsonl --layers all --out a", 1, "none.jsonl|no such input file"),
    "empty input": ("extract MODEL empty.jsonl --layers all --out a", 1, "empty.jsonl: holds no prompts"),
    "no weights": ("extract hollow good.jsonl --layers all --out a", 1, "can't load the weights of hollow"),
    "a file for a folder": (
        "extract MODEL good.jsonl --layers all --out good.jsonl",
        2,
        "good.jsonl|a file is in its place",
    ),
    "no size": ("serve MODEL --max-storage-bytes much", 2, "--max-storage-bytes|such as 2GiB"),
    "no seconds": ("serve MODEL --ttl-seconds long", 2, "--ttl-seconds|seconds or none"),
    "no such port": ("serve MODEL --layers 1 --port 99999", 2, "--port|65535"),
    "misspelt": ("serve MODEL --api-ke x", 2, "--api-ke|did you mean --api-key?"),
    "fewer than no samples": ("verify states --sample -1", 2, "--sample"),
    "no tokenizer": ("inspect states --tokenizer full", 2, "tokenizer: can't read that of full"),
    "no such layer": ("extract MODEL good.jsonl --layers 9 --out b", 2, "layer 9|0 (the embeddings) to 4"),
    "two fields": ("extract MODEL both.jsonl --layers all --out c", 3, "both.jsonl line 1|prompt, messages|`field`"),
    "other layers": ("extract MODEL good.jsonl --layers 1 --out states", 2, "layers|states"),
    "other input": ("extract MODEL other.jsonl --layers all --out states", 2, "states|input"),
    "export into a full folder": ("export states full --format numpy", 2, "full|new or empty"),
    "no masks": ("export states masks --format speculators", 2, "loss mask"),
    "not a set": ("verify full", 1, "full"),
    "no such share": ("extract MODEL good.jsonl --layers all --out d --shard 4/4", 2, "shard|from 0 to n - 1|0/4"),
    "shared prefixes in files": (
        "extract MODEL good.jsonl --layers all --out e --share-prefixes --layout files",
        2,
        "share_prefixes|take 'shards'",
    ),
    "shared prefixes of answers": (
        "extract MODEL good.jsonl --layers all --out e --share-prefixes --regenerate",
        2,
        "share_prefixes|leave regenerate out",
    ),
    "Ray in files": ("extract MODEL good.jsonl --layers all --out f --ray --layout files", 2, "layout|only 'shards'"),
    "Ray's devices": (
        "extract MODEL good.jsonl --layers all --out f --ray --device cuda:1",
        2,
        "device|say 'cuda' or nothing",
    ),
    "no actors": ("extract MODEL good.jsonl --layers all --out f --ray --ray-actors 0", 2, "ray_actors|at least 1"),
    "device of vLLM": ("serve MODEL --engine vllm --device cpu", 2, "device|CUDA_VISIBLE_DEVICES"),
    "weights of vLLM": ("serve MODEL --engine vllm --weights-version 3", 2, "weights_version|--engine vllm"),
    "examining vLLM on a device": ("doctor MODEL --engine vllm --device cpu", 2, "device|vLLM runs on the device"),
    "two samples": ("verify states --sample 2 --recompute 1%", 2, "--sample and --recompute"),
}


@pytest.fixture(scope="module")
def command(model, folder):
    def run(words):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setenv("TQDM_DISABLE", "1")
            patch.setattr(sys, "argv", ["layertap", *words.split()])
            return CliRunner().invoke(make_app(), words.replace("MODEL", str(model)).split())

    for name, rows in ROWS.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "empty.jsonl").touch()
    shutil.copytree(model, folder / "hollow", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "full").mkdir()
    (folder / "full" / "a").write_text("something")
    made = run("extract MODEL good.jsonl --layers all --out states")
    assert made.exit_code == 0, made.output
    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_cannot_be_run_says_why_and_has_its_exit_code(name, command):
    words, code, said = COMMANDS[name]
    done = command(words)
    output = " ".join(done.output.split())  # lines break where the terminal ends
    assert done.exit_code == code, output
    for word in said.split("|"):
        assert word in output


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded(command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = command(f"serve MODEL --port {taken.getsockname()[1]}")
    assert done.exit_code == 2
    assert "give another port (0 takes a free one)" in " ".join(done.output.split())


SERVED = {
    "unknown field": ("POST", "completions", {"temprature": 1}, 400, "temprature|temperature"),
    "no body": ("POST", "completions", None, 400, "the body is missing|application/json"),
    "response_format": ("POST", "completions", {"response_format": {"type": "json_object"}}, 400, "response_format"),
    "suffix": ("POST", "completions", {"suffix": "x"}, 400, "suffix"),
    "best_of": ("POST", "completions", {"best_of": 3}, 400, "best_of"),
    "capture option": ("POST", "completions", {"kv_transfer_params": {"layer": [1]}}, 400, "layer|'layers'"),
    "model": ("POST", "completions", {"model": "other"}, 404, "other|served: tiny"),
    "file exists": (
        "POST",
        "completions",
        {"kv_transfer_params": {"hidden_states_path": "PATH"}},
        409,
        "served.safetensors|overwrite",
    ),
    "too large": ("POST", "completions", {"prompt": "x" * 9000}, 413, "--max-body-bytes|4096"),
    "full": (
        "POST",
        "completions",
        {"max_tokens": 400, "n": 8, "kv_transfer_params": {"include_output_tokens": True, "layers": "all"}},
        507,
        "max_storage_bytes",
    ),
    "unknown file": ("GET", "hidden_states/none", None, 404, "unknown, expired, deleted"),
    "deleting": ("DELETE", "hidden_states/served", None, 403, "--allow-delete"),
    "weights": ("POST", "weights", {"path": "/x", "version": "2"}, 403, "--allow-weight-updates"),
}


@pytest.fixture(scope="module")
def server(llm):
    settings = ServerSettings(served_model_names=("tiny",), api_keys=("key",), max_body_bytes=4096, max_running=8)
    with run_background(llm._front, settings) as up, httpx.Client(base_url=f"{up.url}/v1", timeout=60) as http:
        yield http


def ask(server, method, route, body, key="key"):
    if body is not None and route == "completions":
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 1, **body}
    return server.request(method, f"/{route}", json=body, headers={"Authorization": f"Bearer {key}"} if key else {})


@pytest.mark.parametrize("name", SERVED)
def test_a_request_that_cannot_be_answered_has_its_status_and_says_why(name, server, folder):
    method, route, body, status, words = SERVED[name]
    if name == "file exists":
        body = {"kv_transfer_params": {"hidden_states_path": str(folder / "store" / "served.safetensors")}}
        assert ask(server, method, route, body).status_code == 200
        load_hidden_states(folder / "store" / "served.safetensors")
    answer = ask(server, method, route, body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == status, message
    for word in words.split("|"):
        assert word in message


def test_a_server_that_is_busy_says_so_and_when_to_try_again(llm):
    with run_background(llm._front, ServerSettings(served_model_names=("tiny",), max_running=1)) as up:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
        up.state.num_running = 1  # as while another request runs
        answer = httpx.post(f"{up.url}/v1/completions", json=body, timeout=60)
        up.state.num_running = 0
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "1 sequences run or wait, at most 1 may; try again later" in answer.json()["error"]["message"]


@pytest.mark.parametrize("key", [None, "other"])
def test_a_request_without_the_key_says_how_it_is_given(key, server):
    answer = ask(server, "GET", "models", None, key)
    assert answer.status_code == 401
    assert "Authorization: Bearer" in answer.json()["error"]["message"]


def test_a_file_that_failed_is_gone_with_the_reason(server):
    body = {"prompt": [40, LOUD], "kv_transfer_params": {"save_dtype": "float16"}}
    handle = ask(server, "POST", "completions", body).json()["kv_transfer_params"]
    answer = ask(server, "GET", f"hidden_states/{handle['hidden_states_id']}?wait=30", None)
    assert answer.status_code == 410
    assert "position 1, layer 1 (float16 ends at 65504: take bfloat16 or float32)" in answer.json()["error"]["message"]
