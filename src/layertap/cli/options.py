"""Options that several commands have, declared once: the same word means the same thing everywhere."""

from typing import Annotated, Literal

import typer

from layertap.serving.settings import KEY_ENV

ROWS, INPUT, MODEL, HTTP = "Hidden states", "Input", "Model and engine", "HTTP"
"""Panels of the help."""

Model = Annotated[str, typer.Argument(help="Folder, hub id or GGUF file.", show_default=False)]

Layers = Annotated[
    str,
    typer.Option(
        help="Layer ids (2,18,33; -1 is the last block's output) or a preset (eagle3, dflash, all, last).",
        rich_help_panel=ROWS,
        show_default=False,
    ),
]
SaveDtype = Annotated[
    Literal["float32", "bfloat16", "float16", "fp8_e4m3"] | None,
    typer.Option(help="Dtype of the saved rows; default the compute dtype.", rich_help_panel=ROWS),
]
Positions = Annotated[
    Literal["all", "trained"],
    typer.Option(
        help="trained: only the rows of the tokens in the loss mask, and the row before each turn.",
        rich_help_panel=ROWS,
    ),
]

Limit = Annotated[int | None, typer.Option(help="Only the first so many records.", rich_help_panel=INPUT)]
InputFormat = Annotated[
    Literal["jsonl", "json", "parquet", "text"] | None,
    typer.Option(help="Default: by the file's suffix.", rich_help_panel=INPUT),
]
Field = Annotated[
    Literal["prompt", "prompt_token_ids", "messages", "conversations"] | None,
    typer.Option(help="What to read where a record has several.", rich_help_panel=INPUT),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        help='Further variables of the chat template, as JSON: {"enable_thinking": false}.',
        rich_help_panel=INPUT,
        show_default=False,
    ),
]

EngineName = Annotated[
    Literal["transformers", "vllm"], typer.Option(help="Which engine computes the rows.", rich_help_panel=MODEL)
]
Dtype = Annotated[
    str | None, typer.Option(help="Compute dtype; default chosen for the machine.", rich_help_panel=MODEL)
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, ...; default a GPU if there is one.", rich_help_panel=MODEL),
]
Revision = Annotated[str | None, typer.Option(help="Of the hub.", rich_help_panel=MODEL)]
Tokenizer = Annotated[str | None, typer.Option(help="Where it isn't the model's own.", rich_help_panel=MODEL)]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Code of the checkpoint may run.", rich_help_panel=MODEL)
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="The most tokens of a sequence; longer prompts fail.", rich_help_panel=MODEL)
]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Most tokens of one forward.", rich_help_panel=MODEL)]

Host = Annotated[str, typer.Option(help="0.0.0.0 is reached from other machines.", rich_help_panel=HTTP)]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=HTTP)]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(help=f"Asked of every request but /health (again for more); or ${KEY_ENV}.", rich_help_panel=HTTP),
]
AllowDelete = Annotated[
    bool, typer.Option("--allow-delete", help="Clients may free their files.", rich_help_panel=HTTP)
]

AsJson = Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary; errors are still said.")]
