"""The contract: what can be asked for and what that means. Imports nothing heavy, except blocks.py, which needs torch."""
