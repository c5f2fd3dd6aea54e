import pickle

import numpy as np
import pytest
import torch
from dataset_cases import ROW_BYTES, make_sample, write_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from layertap.datasets import reader
from layertap.datasets.loader import HiddenStatesDataset, HiddenStatesStream
from layertap.datasets.reader import open_dataset
from layertap.datasets.writer import ShardOptions
from layertap.errors import OptionError

NUM_SAMPLES = 41


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader") / "states"
    write_dataset(folder, range(NUM_SAMPLES), options=ShardOptions(shard_bytes=40 * ROW_BYTES, fsync=False))
    assert len(open_dataset(folder).files) > 5
    return folder


def indices(items):
    return [item["index"] for item in items]


def test_map_style_gives_views_of_the_file_to_any_sampler(states):
    ds = HiddenStatesDataset(states)
    assert len(ds) == NUM_SAMPLES
    assert ds[3]["hidden_states"].data_ptr() == ds.data[3]["hidden_states"].data_ptr()
    loader = DataLoader(ds, batch_size=4, sampler=[5, 3, 9, 1, 0], collate_fn=indices)
    assert list(loader) == [[5, 3, 9, 1], [0]]
    item = ds[7]
    assert item["hidden_states"].numpy().tobytes() == make_sample(7).rows.tobytes()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_ranks=st.integers(1, 60),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 2),
    window=st.integers(1, 9),
    drop_last=st.booleans(),
)
def test_ranks_share_an_epoch_and_nothing_is_lost_or_doubled_but_what_is_said(
    states, num_ranks, seed, epoch, window, drop_last
):
    data = open_dataset(states)
    seen = []
    for rank in range(num_ranks):
        stream = HiddenStatesStream(
            data, seed=seed, window_shards=window, rank=rank, num_ranks=num_ranks, drop_last=drop_last
        )
        stream.set_epoch(epoch)
        own = stream.order().tolist()
        assert len(own) == len(stream)
        seen += own
    counts = np.bincount(seen, minlength=NUM_SAMPLES)
    assert (counts == 0).sum() == stream.num_left_out
    assert (counts - 1).clip(0).sum() == stream.num_repeated
    if num_ranks == 1:
        assert sorted(seen) == list(range(NUM_SAMPLES))


def test_the_order_is_by_windows_of_shards_and_another_one_each_epoch(states):
    stream = HiddenStatesStream(states, window_shards=2, seed=4)
    first, again = indices(stream), indices(stream)
    assert first == again
    assert first != sorted(first)
    files = stream.data.file_numbers[stream.order()].tolist()
    runs = []
    while files:
        two = set(files[: next((at for at, one in enumerate(files) if len({*files[: at + 1]}) > 2), len(files))])
        runs.append(two)
        files = [one for one in files if one not in two]
    assert max(map(len, runs)) == 2
    assert len(runs) == -(-len(stream.data.files) // 2)
    stream.set_epoch(1)
    assert indices(stream) != first
    assert sorted(indices(stream)) == sorted(first)
    assert indices(HiddenStatesStream(states, shuffle=False)) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_the_same_for_any_number_of_workers_and_training_goes_on_where_it_stopped(states, num_workers):
    def batches(stream):
        return list(DataLoader(stream, batch_size=3, num_workers=num_workers, collate_fn=indices))

    stream = HiddenStatesStream(states, batch_size=3, rank=1, num_ranks=2)
    stream.set_epoch(5)
    whole = batches(stream)
    assert [index for batch in whole for index in batch] == stream.data.indices[stream.order()].tolist()
    state = stream.state_dict(num_taken=6)
    resumed = HiddenStatesStream(states, batch_size=3, rank=1, num_ranks=2)
    resumed.load_state_dict(state)
    assert batches(resumed) == whole[2:]
    resumed.set_epoch(5)
    assert batches(resumed) == whole


def test_a_stream_counts_what_it_gave_where_it_can_and_asks_where_it_cannot(states):
    stream = HiddenStatesStream(states)
    with pytest.raises(OptionError, match="num_taken is needed"):
        stream.state_dict()
    taken = iter(stream)
    first = indices(next(taken) for _ in range(7))
    state = stream.state_dict()
    resumed = HiddenStatesStream(states)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert first + indices(resumed) == indices(HiddenStatesStream(states))
    # peeking at the first sample takes it from nobody
    next(iter(resumed))
    assert len(indices(resumed)) == NUM_SAMPLES


def test_a_state_of_another_order_is_refused(states):
    state = HiddenStatesStream(states).state_dict(3)
    for other in (
        HiddenStatesStream(states, seed=1),
        HiddenStatesStream(states, rank=0, num_ranks=2),
        HiddenStatesStream(open_dataset(states)[:-1]),
    ):
        with pytest.raises(OptionError, match="of another order"):
            other.load_state_dict(state)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_that_outlive_an_epoch_go_on_with_the_next(states, method):
    def expected(epoch):
        stream = HiddenStatesStream(states, batch_size=3)
        stream.set_epoch(epoch)
        return [index for (index,) in DataLoader(stream, batch_size=1, collate_fn=indices)]

    stream = pickle.loads(pickle.dumps(HiddenStatesStream(states, batch_size=3)))  # a copy is as good
    stream.set_epoch(4)
    stream.load_state_dict(stream.state_dict(num_taken=6))
    loader = DataLoader(
        stream,
        batch_size=3,
        num_workers=2,
        persistent_workers=True,
        collate_fn=indices,
        multiprocessing_context=method,
    )
    seen = []
    for epoch in (4, 5, 6):
        if epoch > 4:
            stream.set_epoch(epoch)
        seen.append([index for batch in loader for index in batch])
    assert seen == [expected(4)[6:], expected(5), expected(6)]


def test_a_stream_that_is_made_before_the_process_group_has_the_rank_of_torchrun(states, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    stream = HiddenStatesStream(states)
    assert (stream.rank, stream.num_ranks) == (1, 3)
    assert (HiddenStatesStream(states, rank=0, num_ranks=1).num_ranks) == 1


def test_a_state_past_the_end_of_an_epoch_is_refused(states):
    stream = HiddenStatesStream(states)
    for taken in (-1, NUM_SAMPLES + 1):
        with pytest.raises(OptionError, match=f"num_taken is {taken}"):
            stream.load_state_dict(stream.state_dict(num_taken=taken))


def test_a_large_set_gives_the_same_in_the_same_order(states, monkeypatch):
    stream = HiddenStatesStream(states, seed=2)
    expected = [(item["index"], item["hidden_states"].numpy().tobytes()) for item in stream]
    batches = [[0, 5], [40, 3, 3]]
    monkeypatch.setattr(reader, "memory_bytes", lambda: 1)
    large = HiddenStatesStream(states, seed=2)
    assert [(item["index"], item["hidden_states"].numpy().tobytes()) for item in large] == expected
    loader = DataLoader(HiddenStatesDataset(states), batch_sampler=batches, collate_fn=indices)
    assert list(loader) == batches


def test_options_that_cannot_be_are_refused(states):
    for options in ({"rank": 2, "num_ranks": 2}, {"rank": 0}, {"window_shards": 0}, {"batch_size": 0}):
        with pytest.raises(OptionError):
            HiddenStatesStream(states, **options)


def test_half_precision_comes_as_it_is(tmp_path):
    from dataset_cases import make_manifest

    write_dataset(tmp_path / "half", [0], manifest=make_manifest(save_dtype="bfloat16", hidden_size=12))
    (item,) = HiddenStatesStream(tmp_path / "half")
    assert item["hidden_states"].dtype == torch.bfloat16
