"""The vLLM engine: a plugin of stock vLLM and a store-only connector. See `plugin` for where it begins."""
