"""`layertap serve`: a model behind an OpenAI-compatible API, with its hidden states."""

import difflib
import logging
import os
from typing import Annotated, Any

import typer

from layertap.cli.options import (
    HTTP,
    MODEL,
    ROWS,
    AllowDelete,
    ApiKey,
    Device,
    Dtype,
    EngineName,
    Host,
    MaxModelLen,
    MaxNumBatchedTokens,
    Model,
    Port,
    Revision,
    SaveDtype,
    Tokenizer,
    TrustRemoteCode,
)
from layertap.cli.reporting import errors_explained, parse_bytes, parse_json, quiet_libraries

_VLLM = "vLLM's documented flags"
_NEEDLESS = ("--no-enable-chunked-prefill", "--enable-chunked-prefill")
"""Part of vLLM's documented command; rows are the same either way here."""


def serve(
    context: typer.Context,
    model: Model,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Taken by default: ids (2,18,33; -1 is the last block's output) or a preset. Default eagle3.",
            rich_help_panel=ROWS,
            show_default=False,
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage", "--shared-storage-path", help="Folder of the files. Default /tmp.", rich_help_panel=ROWS
        ),
    ] = None,
    handover: Annotated[
        str | None,
        typer.Option(
            help="How clients get a file: path (shared file system), http, or s3://bucket/folder. Default path.",
            rich_help_panel=ROWS,
            show_default=False,
        ),
    ] = None,
    ttl_seconds: Annotated[
        str | None,
        typer.Option(help="Files older than this go; none keeps them. Default 3600.", rich_help_panel=ROWS),
    ] = None,
    max_storage_bytes: Annotated[
        str | None, typer.Option(help="Quota of the storage, such as 200GiB.", rich_help_panel=ROWS)
    ] = None,
    min_free_bytes: Annotated[
        str | None, typer.Option(help="Left free on its file system. Default 1GiB.", rich_help_panel=ROWS)
    ] = None,
    max_bytes_in_flight: Annotated[
        str | None, typer.Option(help="Rows in memory at most. Default an eighth of memory.", rich_help_panel=ROWS)
    ] = None,
    prefix_rows_bytes: Annotated[
        str | None,
        typer.Option(
            help="With --engine vllm: memory for rows of cached blocks, so that prompts with a known beginning read the prefix "
            "cache. Default none.",
            rich_help_panel=ROWS,
        ),
    ] = None,
    save_dtype: SaveDtype = None,
    capture_by_default: Annotated[
        bool | None,
        typer.Option(help="Take states unless a request says otherwise. Default yes.", rich_help_panel=ROWS),
    ] = None,
    allow_custom_save_path: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder inside which clients may name paths (again for more), or true for anywhere.",
            rich_help_panel=ROWS,
        ),
    ] = None,
    num_writer_threads: Annotated[
        int | None, typer.Option(help="Threads that write files. Default 8.", rich_help_panel=ROWS)
    ] = None,
    num_writer_processes: Annotated[
        int | None,
        typer.Option(
            help="With --engine vllm on a GPU: processes that share these threads. Default by the number of cores.",
            rich_help_panel=ROWS,
        ),
    ] = None,
    use_synchronization_lock: Annotated[
        bool | None, typer.Option(help="Lock files let readers wait. Default yes.", rich_help_panel=ROWS)
    ] = None,
    fsync: Annotated[
        bool | None, typer.Option(help="Sync each file before it is published. Default no.", rich_help_panel=ROWS)
    ] = None,
    weights_version: Annotated[
        str | None, typer.Option(help="Said in each file's metadata.", rich_help_panel=ROWS)
    ] = None,
    spot_check: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="One sequence with rows in so many is computed again and compared; 0: none. Default 1000, with --engine vllm 0.",
            rich_help_panel=ROWS,
            show_default=False,
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Default the model as given (again for more).", rich_help_panel=HTTP)
    ] = None,
    allow_delete: AllowDelete = False,
    allow_weight_updates: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder of checkpoints that POST /v1/weights may load (again for more).", rich_help_panel=HTTP
        ),
    ] = None,
    max_logprobs: Annotated[int, typer.Option(help="The most per token.", rich_help_panel=HTTP)] = 20,
    max_body_bytes: Annotated[str, typer.Option(help="Larger requests are refused.", rich_help_panel=HTTP)] = "32MiB",
    max_running: Annotated[
        int, typer.Option(help="Sequences that may run or wait; more get a 429.", rich_help_panel=HTTP)
    ] = 4096,
    engine: EngineName = "transformers",
    dtype: Dtype = None,
    device: Device = None,
    max_model_len: MaxModelLen = None,
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: TrustRemoteCode = False,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences generated at once.", rich_help_panel=MODEL)
    ] = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
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
        **_sizes(
            max_storage_bytes=max_storage_bytes,
            min_free_bytes=min_free_bytes,
            max_bytes_in_flight=max_bytes_in_flight,
            prefix_rows_bytes=prefix_rows_bytes,
        ),
        "save_dtype": save_dtype,
        "capture_by_default": capture_by_default,
        "allow_custom_save_path": _custom_paths(allow_custom_save_path),
        "num_writer_threads": num_writer_threads,
        "num_writer_processes": num_writer_processes,
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
    quiet_libraries()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "ContinuousBatchingLogger"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    with errors_explained():
        from layertap.serving.launch import ServeOptions
        from layertap.serving.settings import ServerSettings, api_keys

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
                api_keys=api_keys(api_key),
                allow_delete=allow_delete,
                allow_weight_updates=tuple(os.path.abspath(folder) for folder in allow_weight_updates or ()),
                max_body_bytes=parse_bytes(max_body_bytes, "--max-body-bytes"),
                max_logprobs=max_logprobs,
                max_running=max_running,
            ),
        )
        if engine == "vllm":
            from layertap.serving.vllm_command import exec_vllm

            exec_vllm(options, list(context.args))
        if unknown := [word for word in context.args if word not in _NEEDLESS]:
            known = [word for param in context.command.params for word in param.opts if word.startswith("--")]
            near = difflib.get_close_matches(unknown[0].replace("_", "-"), known, n=1)
            hint = f"did you mean {near[0]}?" if near else "with --engine vllm it would go to vLLM"
            raise typer.BadParameter(f"no such option: {unknown[0]} ({hint})")
        from layertap.serving.launch import serve as run

        run(options)


def _custom_paths(given: list[str] | None) -> bool | list[str] | None:
    if not given:
        return None
    if given in (["true"], ["false"]):
        return given == ["true"]
    return [os.path.abspath(folder) for folder in given]


def _sizes(**given: str | None) -> dict[str, int | None]:
    """Options that are sizes, in bytes, by their names."""
    return {
        name: None if text is None else parse_bytes(text, f"--{name.replace('_', '-')}") for name, text in given.items()
    }


def _seconds(text: str) -> float | None:
    if text.lower() in ("none", "null"):
        return None
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(
            f"expected a number of seconds or none, got {text!r}", param_hint="--ttl-seconds"
        ) from None
