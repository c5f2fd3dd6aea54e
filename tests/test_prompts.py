import numpy as np
import pytest
from model_info import INFO

from layertap.errors import PromptError
from layertap.prompts import PromptReader, as_prompt_list


@pytest.mark.parametrize("given", [b"abc", bytearray(b"abc"), memoryview(b"abc"), {7, 8}, frozenset({7})])
def test_bytes_and_sets_are_no_token_ids(given):
    reader = PromptReader(INFO, None)
    for prompt in (given, {"prompt_token_ids": given}, {"prompt": given}):
        with pytest.raises(PromptError, match="expected"):
            reader.read(prompt)
    with pytest.raises(PromptError, match="expected text, token ids, a dict or a list of them"):
        as_prompt_list(given)


@pytest.mark.parametrize("given", [[7, 8], (7, 8), range(7, 9), np.array([7, 8]), iter([7, 8])])
def test_every_ordered_collection_of_ids_is_a_prompt(given):
    assert PromptReader(INFO, None).read(given).token_ids == [7, 8]
