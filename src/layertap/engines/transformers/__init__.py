"""The embedded engine: transformers in the caller's process. Extraction and generation share weights and tap."""
