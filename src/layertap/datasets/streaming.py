"""Train while a server produces: the records of an input, sent to a server ahead of the training loop and taken in order.

    from layertap.datasets import stream

    for item in stream("http://127.0.0.1:8000", "chats.jsonl", tokenizer="Qwen/Qwen3-8B", max_ahead=16):
        item["hidden_states"], item["token_ids"], item["loss_mask"]

At most `max_ahead` samples are asked for and not yet taken, in all their stages together: that bounds the memory here and the
files there. Each sample is fetched, checked against its checksums and against what was asked, and its file deleted, before
it is yielded. What fails is an error, or is counted where that is allowed; nothing is left out in silence.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils.data import IterableDataset, get_worker_info

from layertap.capture.layers import LayersLike
from layertap.capture.spans import Spans
from layertap.client.blocking import HiddenStatesClient
from layertap.client.errors import ServerError
from layertap.client.protocol import as_tensors
from layertap.datasets.conversations import parse_row, source_hash
from layertap.datasets.inputs import BrokenRecord, InputFile, InputRecord, Record, open_input
from layertap.datasets.loader import current_rank
from layertap.datasets.reader import DatasetItem
from layertap.datasets.tokenizing import RecordTokenizer
from layertap.engines.base import ModelInfo
from layertap.errors import HiddenStatesError, LayertapError, OptionError, PromptError
from layertap.prompts import Prompt

logger = logging.getLogger(__name__)

Source: TypeAlias = str | Path | InputFile | Iterable[Mapping[str, Any]]


def stream(server: str, source: Source, **options: Any) -> "ServerStream":
    """Make a stream of samples that a server computes; the arguments are those of ServerStream.

    Raises:
        OptionError: an option that can't be.
        PromptError: there is no such input file.
    """
    return ServerStream(server, source, **options)


class ServerStream(IterableDataset[DatasetItem]):
    """Iterable over the samples of an input, in its order; each iteration asks for all of them again.

    Ranks and the workers of a `DataLoader` take turns in the input, and each of them looks ahead for itself.

    Args:
        server: base URL, without `/v1`.
        source: an input file as `layertap extract` takes it, or rows like those of a JSONL file.
        tokenizer: the model's: a folder, a hub id, or one of transformers. Needed for texts and chats; token ids go without.
        layers: as in a request; None: the server's.
        max_ahead: samples that are asked for and not yet taken, at most.
        max_tokens: let the model answer with so many tokens at most; the rows of the answer come behind those of the prompt
            (but for the last token's, which was never an input), and the answer is what is trained. None: the rows of the
            prompt alone.
        sampling: further fields of the request's body (temperature, seed, ...), with max_tokens.
        save_dtype: as in a request.
        loss_mask: find the trained tokens of chats.
        chat_template_kwargs: further variables of the chat template.
        max_failures: so many records may fail; they are logged and kept in `failures`. One more ends the iteration.
        api_key: of the server.
        timeout: seconds that one request may take.
        rank, num_ranks: of this process; default torch.distributed's, or torchrun's, or 0 of 1.
        connect: makes the client; for tests and special transports.

    Attributes:
        failures: (index, reason) of the last iteration in this process.
    """

    def __init__(
        self,
        server: str,
        source: Source,
        *,
        tokenizer: Any = None,
        layers: LayersLike | None = None,
        max_ahead: int = 8,
        max_tokens: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        save_dtype: str | None = None,
        loss_mask: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_failures: int = 0,
        api_key: str | None = None,
        timeout: float = 600.0,
        rank: int | None = None,
        num_ranks: int | None = None,
        connect: Callable[[], HiddenStatesClient] | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("max_ahead", max_ahead, 1),
            ("max_tokens", max_tokens, 1),
            ("max_failures", max_failures, 0),
        ):
            if value is not None and value < least:
                raise OptionError(f"{name}: expected at least {least}, got {value}")
        if sampling and max_tokens is None:
            raise OptionError("sampling: is for answers of the model; give max_tokens, too")
        if (rank is None) != (num_ranks is None):
            raise OptionError("rank and num_ranks: give both or none")
        self.rank, self.num_ranks = current_rank() if rank is None or num_ranks is None else (rank, num_ranks)
        if not 0 <= self.rank < self.num_ranks:
            raise OptionError(f"rank: {self.rank} is not one of {self.num_ranks} ranks")
        self.max_ahead = max_ahead
        self.failures: list[tuple[int, str]] = []
        self._connect = connect or _Connect(server, api_key, timeout)
        self._source = open_input(source) if isinstance(source, str | Path) else source
        self._tokenizer = tokenizer
        self._loss_mask = loss_mask
        self._template_kwargs = chat_template_kwargs
        self._max_failures = max_failures
        self._timeout = timeout
        self._answers = max_tokens is not None
        wanted = {
            "capture": True,
            "layers": layers,
            "save_dtype": save_dtype,
            "include_output_tokens": self._answers or None,
        }
        self._body: dict[str, Any] = {
            **(sampling or {}),
            "max_tokens": max_tokens or 1,
            "kv_transfer_params": {name: value for name, value in wanted.items() if value is not None},
        }

    def __iter__(self) -> Iterator[DatasetItem]:
        self.failures = []
        stopped = threading.Event()
        with (
            self._connect() as client,
            ThreadPoolExecutor(self.max_ahead, thread_name_prefix="layertap-stream") as pool,
        ):
            reader = self._reader(client)
            records = self._records()
            ahead: deque[tuple[Record, Future[DatasetItem]]] = deque()

            def ask(count: int) -> None:
                for record in islice(records, count):
                    ahead.append((record, pool.submit(self._sample, client, reader, record, stopped)))

            try:
                ask(self.max_ahead)
                while ahead:
                    record, sample = ahead.popleft()
                    try:
                        item = sample.result()
                    except OptionError:
                        raise
                    except LayertapError as exc:
                        self._fail(record, exc)
                        item = None
                    # the next is asked for when this one is done with here, so that no more than max_ahead are about
                    if item is not None:
                        yield item
                    ask(1)
            finally:
                stopped.set()
                for _, sample in ahead:
                    sample.cancel()

    def _fail(self, record: Record, exc: LayertapError) -> None:
        self.failures.append((record.index, f"{record.where}: {exc}"))
        if len(self.failures) > self._max_failures:
            raise HiddenStatesError(
                f"{len(self.failures)} of the records failed, {self._max_failures} may; the last: {record.where}: {exc}"
            ) from exc
        logger.warning("%s failed: %s", record.where, exc)

    def _reader(self, client: HiddenStatesClient) -> RecordTokenizer:
        """What tokenizes records here, so that masks fit the rows; limits are the server's."""
        served = client.models()[0]
        tokenizer = self._tokenizer
        if isinstance(tokenizer, str | Path):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        ends = getattr(tokenizer, "eos_token_id", None)
        info = ModelInfo(
            model=str(served["id"]),
            revision=None,
            num_layers=0,
            hidden_size=0,
            vocab_size=2**31 if tokenizer is None else len(tokenizer),
            max_model_len=int(served.get("max_model_len") or 2**31 - 1),
            dtype="",
            device="",
            engine="",
            engine_version="",
            eos_token_ids=() if ends is None else (ends,),
        )
        return RecordTokenizer(
            info,
            tokenizer,
            add_generation_prompt=self._answers,
            loss_mask=self._loss_mask and not self._answers,
            template_kwargs=self._template_kwargs,
        )

    def _records(self) -> Iterator[Record]:
        worker = get_worker_info()
        turn, turns = self.rank, self.num_ranks
        if worker is not None:
            turn, turns = self.rank + self.num_ranks * worker.id, self.num_ranks * worker.num_workers
        records = self._source if isinstance(self._source, InputFile) else _as_records(self._source)
        return islice(records, turn, None, turns)

    def _sample(
        self, client: HiddenStatesClient, reader: RecordTokenizer, record: Record, stopped: threading.Event
    ) -> DatasetItem:
        if isinstance(record, BrokenRecord):
            raise record.error
        prompt, mask = (reader.prompt(record.prompt, room=1), None) if self._answers else reader.read(record)
        answer = client.complete(prompt.token_ids, **self._body)
        handle = answer["choices"][0]
        try:
            if stopped.is_set():
                raise HiddenStatesError("nobody waits for it any more")
            loaded = client.fetch_raw(handle, timeout=self._timeout)
        finally:
            _free(client, handle)
        info = loaded.info
        self._compare(prompt, loaded.token_ids.tolist())
        tensors = as_tensors(loaded)
        count, first = len(loaded.token_ids), len(prompt.token_ids)
        if self._answers:
            mask = ((first, count),) if self._loss_mask else None
        item = DatasetItem(
            index=record.index,
            hidden_states=tensors["hidden_states"],
            token_ids=tensors["token_ids"],
            prompt_len=first,
            loss_mask=None if mask is None else _as_mask(mask, count),
            positions=torch.arange(info.first_position, info.first_position + count),
        )
        if "hidden_states_scale" in tensors:
            item["hidden_states_scale"] = tensors["hidden_states_scale"]
        return item

    def _compare(self, prompt: Prompt, token_ids: list[int]) -> None:
        asked = prompt.token_ids
        right = token_ids[: len(asked)] == asked and (self._answers or len(token_ids) == len(asked))
        if not right:
            raise HiddenStatesError(
                f"the server's file holds other tokens than were asked for ({len(token_ids)}, for a prompt of {len(asked)})"
            )


class _Connect:
    """Makes clients; can be sent to worker processes."""

    def __init__(self, server: str, api_key: str | None, timeout: float) -> None:
        self._server, self._api_key, self._timeout = server, api_key, timeout

    def __call__(self) -> HiddenStatesClient:
        return HiddenStatesClient(self._server, api_key=self._api_key, timeout=self._timeout)


def _free(client: HiddenStatesClient, handle: Mapping[str, Any]) -> None:
    try:
        client.delete(handle)
    except ServerError as exc:
        if exc.status != 403:
            raise
        raise OptionError(
            "server: it doesn't let clients free their files, which would pile up there; start it with --allow-delete"
        ) from exc


def _as_records(rows: Iterable[Mapping[str, Any]]) -> Iterator[Record]:
    for index, row in enumerate(rows):
        where = f"record {index}"
        try:
            prompt = parse_row(row)
        except PromptError as exc:
            yield BrokenRecord(index=index, where=where, error=exc, source_hash="")
            continue
        yield InputRecord(index=index, where=where, prompt=prompt, source_hash=source_hash(prompt))


def _as_mask(spans: Spans, count: int) -> torch.Tensor:
    mask = torch.zeros(count, dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = True
    return mask
