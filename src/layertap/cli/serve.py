"""`layertap serve`: a model behind an OpenAI-compatible API, with its hidden states."""

import logging
import os
from typing import Annotated, Any, Literal

import typer

from layertap.cli.reporting import errors_explained, parse_bytes, quiet_libraries

_MODEL, _STORE, _HTTP, _VLLM = "Model and engine", "Hidden states", "HTTP", "vLLM's documented flags"
_NEEDLESS = ("--no-enable-chunked-prefill", "--enable-chunked-prefill")
"""Part of vLLM's documented command; rows are the same either way here."""
API_KEY_ENV = "LAYERTAP_API_KEY"


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder, hub id or GGUF file.", show_default=False)],
    layers: Annotated[
        str | None,
        typer.Option(
            help="Taken by default: ids (2,18,33; -1 is the last block's output) or a preset. Default eagle3.",
            rich_help_panel=_STORE,
            show_default=False,
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage", "--shared-storage-path", help="Folder of the files. Default /tmp.", rich_help_panel=_STORE
        ),
    ] = None,
    handover: Annotated[
        str | None,
        typer.Option(
            help="How clients get a file: path (shared file system), http, or s3://bucket/folder. Default path.",
            rich_help_panel=_STORE,
            show_default=False,
        ),
    ] = None,
    ttl_seconds: Annotated[
        str | None,
        typer.Option(help="Files older than this go; none keeps them. Default 3600.", rich_help_panel=_STORE),
    ] = None,
    max_storage_bytes: Annotated[
        str | None, typer.Option(help="Quota of the storage, such as 200GiB.", rich_help_panel=_STORE)
    ] = None,
    min_free_bytes: Annotated[
        str | None, typer.Option(help="Left free on its file system. Default 1GiB.", rich_help_panel=_STORE)
    ] = None,
    max_bytes_in_flight: Annotated[
        str | None, typer.Option(help="Rows in memory at most. Default a sixteenth of memory.", rich_help_panel=_STORE)
    ] = None,
    prefix_rows_bytes: Annotated[
        str | None,
        typer.Option(
            help="With --engine vllm: memory for rows of cached blocks, so that prompts with a known beginning read the prefix "
            "cache. Default none.",
            rich_help_panel=_STORE,
        ),
    ] = None,
    save_dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "fp8_e4m3"] | None,
        typer.Option(help="Dtype of the saved rows; default the compute dtype.", rich_help_panel=_STORE),
    ] = None,
    capture_by_default: Annotated[
        bool | None,
        typer.Option(help="Take states unless a request says otherwise. Default yes.", rich_help_panel=_STORE),
    ] = None,
    allow_custom_save_path: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder inside which clients may name paths (again for more), or true for anywhere.",
            rich_help_panel=_STORE,
        ),
    ] = None,
    num_writer_threads: Annotated[
        int | None, typer.Option(help="Threads that write files. Default 8.", rich_help_panel=_STORE)
    ] = None,
    use_synchronization_lock: Annotated[
        bool | None, typer.Option(help="Lock files let readers wait. Default yes.", rich_help_panel=_STORE)
    ] = None,
    fsync: Annotated[
        bool | None, typer.Option(help="Sync each file before it is published. Default no.", rich_help_panel=_STORE)
    ] = None,
    weights_version: Annotated[
        str | None, typer.Option(help="Said in each file's metadata.", rich_help_panel=_STORE)
    ] = None,
    spot_check: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="One sequence with rows in so many is computed again and compared; 0: none. Default 1000, with --engine vllm 0.",
            rich_help_panel=_STORE,
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="0.0.0.0 is reached from other machines.", rich_help_panel=_HTTP)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", rich_help_panel=_HTTP)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Asked of every request but /health (again for more); or ${API_KEY_ENV}.", rich_help_panel=_HTTP
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Default the model as given (again for more).", rich_help_panel=_HTTP)
    ] = None,
    allow_delete: Annotated[
        bool, typer.Option("--allow-delete", help="Clients may free their files.", rich_help_panel=_HTTP)
    ] = False,
    allow_weight_updates: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder of checkpoints that POST /v1/weights may load (again for more).", rich_help_panel=_HTTP
        ),
    ] = None,
    max_logprobs: Annotated[int, typer.Option(help="The most per token.", rich_help_panel=_HTTP)] = 20,
    max_body_bytes: Annotated[str, typer.Option(help="Larger requests are refused.", rich_help_panel=_HTTP)] = "32MiB",
    max_running: Annotated[
        int, typer.Option(help="Sequences that may run or wait; more get a 429.", rich_help_panel=_HTTP)
    ] = 4096,
    engine: Annotated[Literal["transformers", "vllm"], typer.Option(rich_help_panel=_MODEL)] = "transformers",
    dtype: Annotated[
        str | None, typer.Option(help="Compute dtype; default chosen for the machine.", rich_help_panel=_MODEL)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, cuda:1, ...; default a GPU if there is one.", rich_help_panel=_MODEL),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="The most tokens of a sequence.", rich_help_panel=_MODEL)
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Of the hub.", rich_help_panel=_MODEL)] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Where it isn't the model's own.", rich_help_panel=_MODEL)
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Code of the checkpoint may run.", rich_help_panel=_MODEL)
    ] = False,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences generated at once.", rich_help_panel=_MODEL)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one forward.", rich_help_panel=_MODEL)
    ] = None,
    speculative_config: Annotated[
        str | None, typer.Option(help="JSON; layers are read from it.", rich_help_panel=_VLLM)
    ] = None,
    kv_transfer_config: Annotated[
        str | None, typer.Option(help="JSON; the connector and its options.", rich_help_panel=_VLLM)
    ] = None,
) -> None:
    """Serve a model with OpenAI's API; hidden states come with every answer.

    SIGTERM finishes what is running and publishes it. With --engine vllm this runs vLLM's own server with layertap in it, and every
    other option goes to vLLM as it is.

    Example: layertap serve Qwen/Qwen3-8B --layers eagle3 --storage /dev/shm/hs
    """
    store = {
        "shared_storage_path": None if storage is None else os.path.abspath(storage),
        "handover": handover,
        "max_storage_bytes": None if max_storage_bytes is None else parse_bytes(max_storage_bytes),
        "min_free_bytes": None if min_free_bytes is None else parse_bytes(min_free_bytes),
        "max_bytes_in_flight": None if max_bytes_in_flight is None else parse_bytes(max_bytes_in_flight),
        "prefix_rows_bytes": None if prefix_rows_bytes is None else parse_bytes(prefix_rows_bytes),
        "save_dtype": save_dtype,
        "capture_by_default": capture_by_default,
        "allow_custom_save_path": _custom_paths(allow_custom_save_path),
        "num_writer_threads": num_writer_threads,
        "use_synchronization_lock": use_synchronization_lock,
        "fsync": fsync,
    }
    given: dict[str, Any] = {name: value for name, value in store.items() if value is not None}
    if ttl_seconds is not None:
        given["ttl_seconds"] = _seconds(ttl_seconds)
    engine_options = {
        "dtype": dtype,
        "device": device,
        "max_model_len": max_model_len,
        "revision": revision,
        "tokenizer": tokenizer,
        "trust_remote_code": trust_remote_code or None,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "spot_check": spot_check,
    }
    keys = tuple(api_key or ()) or tuple(key for key in [os.environ.get(API_KEY_ENV, "")] if key)
    quiet_libraries()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "ContinuousBatchingLogger"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    with errors_explained():
        from layertap.serving.launch import ServeOptions, parse_json
        from layertap.serving.settings import ServerSettings

        options = ServeOptions(
            model=model,
            host=host,
            port=port,
            layers=layers,
            store=given,
            speculative_config=parse_json("--speculative-config", speculative_config),
            kv_transfer_config=parse_json("--kv-transfer-config", kv_transfer_config),
            engine_options={name: value for name, value in engine_options.items() if value is not None},
            weights_version=weights_version,
            settings=ServerSettings(
                served_model_names=tuple(served_model_name or ()),
                api_keys=keys,
                allow_delete=allow_delete,
                allow_weight_updates=tuple(os.path.abspath(folder) for folder in allow_weight_updates or ()),
                max_body_bytes=parse_bytes(max_body_bytes),
                max_logprobs=max_logprobs,
                max_running=max_running,
            ),
        )
        if engine == "vllm":
            from layertap.serving.vllm_command import exec_vllm

            exec_vllm(options, list(context.args))
        if unknown := [word for word in context.args if word not in _NEEDLESS]:
            raise typer.BadParameter(f"no such option: {unknown[0]} (with --engine vllm it would go to vLLM)")
        from layertap.serving.launch import serve as run

        run(options)


def _custom_paths(given: list[str] | None) -> bool | list[str] | None:
    if not given:
        return None
    if given in (["true"], ["false"]):
        return given == ["true"]
    return [os.path.abspath(folder) for folder in given]


def _seconds(text: str) -> float | None:
    if text.lower() in ("none", "null"):
        return None
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"--ttl-seconds: expected a number of seconds or none, got {text!r}") from None
