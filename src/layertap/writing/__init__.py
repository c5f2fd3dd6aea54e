"""From rows to finished samples: bounded memory, writer threads, and the `Capture` that an engine's tap talks to."""
