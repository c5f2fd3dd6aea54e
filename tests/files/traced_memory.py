"""Memory that some work takes at most, by Python's own count."""

import tracemalloc


def peak_bytes(work, enough):
    """The peak of `work()`, less than `enough` if one of three runs is.

    A table of the interpreter that happens to grow meanwhile (with many modules such a step is some MiB) doesn't do it again at
    once; what the work itself takes, it takes each time.
    """
    peaks = []
    while len(peaks) < 3 and not any(peak < enough for peak in peaks):
        tracemalloc.start()
        try:
            work()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return min(peaks)
