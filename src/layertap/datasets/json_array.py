"""Elements of a file that is one big JSON array, one at a time.

Public ShareGPT sets come as such files, of gigabytes. The window of text that is held grows to the size of one element.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

_CHUNK_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
# An error this far before the end of the window isn't due to the cut: no token but a string is longer.
_CUT_MARGIN = 64


class ArrayBrokenError(ValueError):
    """The text isn't a JSON array from here on."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


class JsonArray:
    """Iterate over the elements of an array; each comes as (line where it starts, value).

    After a syntax error nothing behind it can be trusted, so `ArrayBrokenError` ends the iteration.
    """

    def __init__(self, file: BinaryIO, *, max_element_bytes: int) -> None:
        self._file = file
        self._max = max_element_bytes
        self._decoder = json.JSONDecoder()
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._ended = False
        self._line = 1
        self._column = 1

    def __iter__(self) -> Iterator[tuple[int, object]]:
        if self._next_char() != "[":
            raise self._broken("expected '[' at the start of the array")
        self._advance(self._at + 1)
        if self._next_char() == "]":
            yield from self._finish()
            return
        while True:
            self._next_char()
            line = self._line
            yield line, self._element()
            separator = self._next_char()
            if separator == "]":
                yield from self._finish()
                return
            if separator != ",":
                raise self._broken(f"expected ',' or ']' after an element, got {separator or 'the end of the file'!r}")
            self._advance(self._at + 1)

    def _element(self) -> object:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as exc:
                cut = exc.pos >= len(self._text) - _CUT_MARGIN or exc.msg.startswith("Unterminated string")
                if not cut or not self._read():
                    self._advance(min(exc.pos, len(self._text)))
                    raise self._broken(exc.msg) from None
            except (RecursionError, ValueError) as exc:
                # nesting without end, a number of thousands of digits
                raise self._broken(f"{type(exc).__name__}: {exc}") from None
            else:
                if end < len(self._text) or not self._read():
                    self._advance(end)
                    return value
            if len(self._text) - self._at > self._max:
                raise self._broken(f"an element is longer than {self._max} bytes")

    def _finish(self) -> Iterator[tuple[int, object]]:
        self._advance(self._at + 1)
        if self._next_char():
            raise self._broken("there is something after the end of the array")
        yield from ()

    def _next_char(self) -> str:
        while True:
            match = _SPACE.match(self._text, self._at)
            self._advance(match.end() if match else self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def _read(self) -> bool:
        """Extend the window; by as much again as it holds, so that a long element isn't parsed too often."""
        if self._ended:
            return False
        data = self._file.read(max(_CHUNK_BYTES, len(self._text) - self._at))
        self._ended = not data
        try:
            more = self._utf8.decode(data, final=self._ended)
        except UnicodeDecodeError as exc:
            self._ended = True
            raise self._broken(f"not UTF-8, somewhere behind this place: {exc.reason}") from None
        self._text = self._text[self._at :] + more
        self._at = 0
        return not self._ended or bool(more)

    def _advance(self, to: int) -> None:
        lines = self._text.count("\n", self._at, to)
        if lines:
            self._line += lines
            self._column = to - self._text.rindex("\n", self._at, to)
        else:
            self._column += to - self._at
        self._at = to

    def _broken(self, message: str) -> ArrayBrokenError:
        return ArrayBrokenError(message, self._line, self._column)
