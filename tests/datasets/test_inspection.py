import numpy as np
import pytest
import torch
from dataset_cases import make_sample, write_dataset

from layertap.datasets.inspection import norms, peaks, similarities, to_float32, token_texts, view_file, view_sample
from layertap.datasets.recompute import compare
from layertap.errors import OptionError
from layertap.testing.tokenizer import byte_tokenizer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_raw_rows_become_the_numbers_that_torch_reads(dtype):
    values = torch.randn(5, 3, 8).to(getattr(torch, dtype))
    raw = values.view(torch.uint8).numpy()
    assert np.array_equal(to_float32(raw, dtype), values.float().numpy())


def test_norms_and_similarities_are_those_of_torch():
    rows = np.random.default_rng(0).standard_normal((6, 4, 16)).astype(np.float32)
    tensor = torch.from_numpy(rows)
    np.testing.assert_allclose(norms(rows), tensor.norm(dim=-1), rtol=1e-5)
    expected = torch.cosine_similarity(tensor[:, :-1], tensor[:, 1:], dim=-1)
    np.testing.assert_allclose(similarities(rows), expected, atol=1e-6)
    assert similarities(rows[:, :1]).shape == (6, 0)


def test_the_massive_activation_is_found_where_it_was_put():
    rows = np.random.default_rng(0).standard_normal((20, 3, 64)).astype(np.float32)
    rows[7, 2, 33] = -900
    rows[7, 1, 33] = -500
    rows[0, 1, 5] = 300
    first, second, third = peaks(rows, 3)
    assert (first.token, first.slot, first.dimension, first.value) == (7, 2, 33, -900)
    assert (second.token, second.slot, second.dimension, second.value) == (0, 1, 5, 300)
    assert first.times_median == pytest.approx(900 / np.median(np.abs(rows[:, 2])), rel=1e-5)
    assert third.times_median < 10


def test_rows_of_zeros_are_no_division_by_zero():
    zeros = np.zeros((2, 2, 4), np.float32)
    assert np.isfinite(similarities(zeros)).all()
    assert [peak.times_median for peak in peaks(zeros, 2)] == [0, 0]


def test_samples_are_the_same_seen_in_a_set_and_as_a_file(folder):
    write_dataset(folder, [3, 1], layout="files")
    inside = view_sample(folder, 0)
    alone = view_file(folder / "samples" / "000000" / "000000001.safetensors")
    assert np.array_equal(inside.rows, alone.rows)
    assert np.array_equal(inside.rows.reshape(len(inside.rows), -1), make_sample(1).rows.view(np.float32))
    assert inside.layers == alone.layers == (0, 3)
    assert (inside.model, inside.revision) == (alone.model, alone.revision) == ("org/tiny", "abc")
    with pytest.raises(OptionError, match="sample: 2 of a data set of 2"):
        view_sample(folder, 2)


def test_tokens_are_spelled_only_where_a_tokenizer_is_at_hand(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("the sea")["input_ids"]
    assert "".join(token_texts(ids, None, str(tmp_path), None)) == "the sea"
    assert "".join(token_texts(ids, str(tmp_path), "org/tiny", None)) == "the sea"
    assert token_texts(tokenizer("\u6d77")["input_ids"][:1], str(tmp_path), "", None)[0].startswith("#")
    assert token_texts(ids, None, "org/no-such-model-here", None) is None
    assert token_texts(ids, None, str(tmp_path / "nothing" / "here"), None) is None


def test_a_comparison_finds_the_worst_row_and_holds_it_against_the_coarser_dtype():
    reference = np.ones((4, 2, 8), np.float32)
    rows = reference.copy()
    rows[3, 1] *= 1.01
    strict = compare(rows, reference, save_dtype="float32", compute_dtype="float32")
    assert strict.worst == (3, 1)
    assert strict.errors[3, 1] == pytest.approx(0.01, rel=1e-3)
    assert not strict.passed
    assert compare(rows, reference, save_dtype="float32", compute_dtype="bfloat16").passed
    rows[0, 0, 0] = np.nan
    broken = compare(rows, reference, save_dtype="bfloat16", compute_dtype="bfloat16")
    assert (broken.passed, broken.worst) == (False, (0, 0))
