"""Words for failures, from a short list: the label `reason` of the metrics of both engines."""

from layertap.errors import EngineError, HiddenStatesError, LayertapError, TargetExistsError

KINDS = ("aborted", "disk", "engine", "exists", "rows", "other")
"""aborted: the request was; disk: it refused; engine: it failed, or was closed; exists: the path turned out to be another's;
rows: they were wrong or missing."""


def kind_of(error: BaseException) -> str:
    """The word for a failure."""
    if isinstance(error, EngineError):
        return "aborted" if "abort" in str(error) else "engine"
    if isinstance(error, TargetExistsError) or isinstance(error.__cause__, TargetExistsError):
        return "exists"
    if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
        return "disk"
    if isinstance(error, LayertapError) and not isinstance(error, HiddenStatesError):
        return "rows"
    return "other"
