"""Data sets of hidden states: conversations in, shards out, resumed by checksum, read by memory map."""
