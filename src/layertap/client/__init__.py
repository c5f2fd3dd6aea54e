"""A client for servers of layertap: request, wait, fetch, verify, delete. `HiddenStatesClient` blocks, the other one awaits.

    client = HiddenStatesClient("http://127.0.0.1:8000", api_key="...")
    answer = client.complete("The quick brown fox", max_tokens=8, kv_transfer_params={"include_output_tokens": True})
    states = client.fetch(answer["choices"][0])  # {"hidden_states": [tokens, layers, hidden], "token_ids": [tokens]}, checked

What is fetched is checked by its checksums, always. What is safe to repeat is repeated: reading, freeing, and requests that the
server refused unread (429, 503) or that never reached it. A request that may have been generated is never sent twice; if it carries
a `tag`, `find` tells what became of it.
"""

from layertap.client.blocking import HiddenStatesClient
from layertap.client.errors import ServerError
from layertap.client.waiting import AsyncHiddenStatesClient

__all__ = ["AsyncHiddenStatesClient", "HiddenStatesClient", "ServerError"]
