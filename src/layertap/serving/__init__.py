"""The OpenAI-compatible server of the embedded engine, the hand-over of files over HTTP, and vLLM's middleware."""
