"""Server-sent events as bytes: cutting a stream into events, wherever its chunks end."""


class EventSplitter:
    """Collects bytes until an event is complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes, done: bool = False) -> list[bytes]:
        """Add bytes; returns the complete events, each with the empty line behind it, and with `done` also what is left."""
        parts = (self._rest + data).split(b"\n\n")
        self._rest = parts.pop()
        events = [part + b"\n\n" for part in parts]
        if done and self._rest:
            events.append(self._rest)
            self._rest = b""
        return events
