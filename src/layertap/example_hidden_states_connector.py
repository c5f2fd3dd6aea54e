"""vLLM's module of this name, so that its documented example runs with only the imports changed."""

from layertap.files.read import cleanup_hidden_states, load_hidden_states

__all__ = ["cleanup_hidden_states", "load_hidden_states"]
