"""Every error that layertap raises on purpose, on one screen.

- LayertapError
  - OptionError (ValueError): an option is unknown, mistyped or can't be honoured
    - LayerError: a layer id that doesn't exist, or stands twice
  - PromptError (ValueError): a prompt that can't be run (empty, too long, ids out of the vocabulary, broken input line)
  - ModelError: a model that can't be loaded
    - UnsupportedModelError: a model whose stream can't be found with certainty
  - EngineError: the engine failed while it ran; the message carries its reason
  - ExtractionError: some prompts of a batch failed; `failures` lists them, the others were delivered
  - TargetExistsError (FileExistsError): the file is there and `overwrite` wasn't asked for
  - StoreFullError (OSError): the store has no room, said before anything is generated
  - HiddenStatesError: a file that can't be delivered to its reader; its subclasses say why
    - MissingError (FileNotFoundError): no file, no writer, no reason on record
    - WriterDiedError: the process that was to publish the file is gone
    - WaitTimeoutError (TimeoutError): the writer still lives, the reader's time is up
    - ForeignError: not a layertap file (nor a file of vLLM's extraction)
    - TornError: a file that is shorter or longer than its header says
    - CorruptError: bytes or metadata don't match their checksum

A caller that already catches the builtin named in brackets needs no change.
"""

from collections.abc import Sequence

__all__ = [
    "CorruptError",
    "EngineError",
    "ExtractionError",
    "ForeignError",
    "HiddenStatesError",
    "LayerError",
    "LayertapError",
    "MissingError",
    "ModelError",
    "OptionError",
    "PromptError",
    "StoreFullError",
    "TargetExistsError",
    "TornError",
    "UnsupportedModelError",
    "WaitTimeoutError",
    "WriterDiedError",
]


class LayertapError(Exception):
    """Base of all errors of layertap."""


class OptionError(LayertapError, ValueError):
    """An option is unknown, has the wrong type, or can't be honoured. The message names it."""


class LayerError(OptionError):
    """A layer id doesn't exist in the model, or stands twice in a list."""


class PromptError(LayertapError, ValueError):
    """A prompt can't be run: empty, too long, ids out of the vocabulary, or a broken line of input."""


class ModelError(LayertapError):
    """A model can't be loaded. The message names the file or the field."""


class UnsupportedModelError(ModelError):
    """The residual stream of a model can't be found with certainty. The message lists the candidates."""


class EngineError(LayertapError):
    """The engine failed while it ran."""


class ExtractionError(LayertapError):
    """Some prompts of a batch failed; all others were delivered.

    Attributes:
        failures: (index of the prompt, reason) in the order of the input.
    """

    def __init__(self, failures: Sequence[tuple[int, str]]) -> None:
        self.failures = list(failures)
        shown = "; ".join(f"prompt {index}: {reason}" for index, reason in self.failures[:5])
        more = f"; and {len(self.failures) - 5} more (see .failures)" if len(self.failures) > 5 else ""
        super().__init__(f"{len(self.failures)} prompt(s) failed, all others were delivered: {shown}{more}")


class TargetExistsError(LayertapError, FileExistsError):
    """The target file exists; `overwrite` would replace it."""


class StoreFullError(LayertapError, OSError):
    """The store has no room for the request."""


class HiddenStatesError(LayertapError):
    """A file of hidden states can't be delivered.

    Attributes:
        reason: what the writer put on record, or what the reader found.
        request_id: the request that the file belonged to, where known.
    """

    def __init__(self, message: str, *, reason: str | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason if reason is not None else message
        self.request_id = request_id


class MissingError(HiddenStatesError, FileNotFoundError):
    """There is no such file, and nobody is writing it."""


class WriterDiedError(HiddenStatesError):
    """The process that was to publish the file ended before it did."""


class WaitTimeoutError(HiddenStatesError, TimeoutError):
    """The file is still being written and the reader's timeout is up."""


class ForeignError(HiddenStatesError):
    """The file isn't a file of hidden states."""


class TornError(HiddenStatesError):
    """The file's length isn't what its header says."""


class CorruptError(HiddenStatesError):
    """The file's content doesn't match its checksum."""
