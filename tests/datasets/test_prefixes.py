"""Samples that begin alike are stored once, whatever comes behind, and read as if they weren't."""

import numpy as np
from dataset_cases import ROW_BYTES, make_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.datasets.index import load_entries, part_paths, spans_of
from layertap.datasets.inspection import view_sample
from layertap.datasets.lookup import load_lookup, write_cache
from layertap.datasets.prefixes import LEAST, StoredRows
from layertap.datasets.reader import open_dataset
from layertap.datasets.resume import locked_folder, prepare_folder
from layertap.datasets.verify import verify_parts
from layertap.datasets.writer import DatasetWriter, Sample, ShardOptions

# a common system prompt, prompts of groups, and what a sample has alone
PIECES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=4)


def tokens_of(pieces):
    return np.array([token for kind, count in pieces for token in [kind] * count + [7]], np.int64)


@given(st.lists(PIECES, max_size=12))
@settings(max_examples=200, deadline=None)
def test_what_is_found_are_rows_of_the_same_tokens_and_as_many_as_can_be(samples):
    stored, rows, seen = StoredRows(), [], []
    for ids in map(tokens_of, samples):
        before = stored.find(ids)
        shared = [row for begin, end in before for row in range(begin, end)]
        assert [rows[row] for row in shared] == ids[: len(shared)].tolist()
        # as long as the longest that any earlier sample has in common with it
        common = max((_common(ids, other) for other in seen), default=0)
        assert len(shared) == (common if common >= min(LEAST, len(ids)) else 0)
        first = len(rows)
        rows += ids[len(shared) :].tolist()
        own = len(ids) - len(shared)
        stored.add(ids, spans_of(first, len(ids), before), own)
        seen.append(ids)


def _common(one, other):
    most = min(len(one), len(other))
    differs = np.flatnonzero(one[:most] != other[:most])
    return int(differs[0]) if differs.size else most


def row_of(ids, position):
    """A row that depends on all tokens up to its own, as in a causal model."""
    draw = np.random.default_rng(ids[: position + 1].tolist())
    return draw.integers(0, 100, ROW_BYTES, np.uint8)


def sample_of(index, ids):
    return Sample(
        index=index,
        source_hash=f"{index:032x}",
        rows=np.stack([row_of(ids, position) for position in range(len(ids))]),
        token_ids=ids,
        prompt_tokens=len(ids),
        finish_reason="prefill",
        loss_mask=((0, len(ids)),),
    )


SYSTEM = [5] * 30 + [6]
GROUPS = [np.array(SYSTEM + [group] * 20 + [9, *range(answer)]) for group in (1, 2) for answer in (1, 4, 0, 12, 4)]


def write(folder, samples, shard_rows=10_000, compress=None):
    manifest = make_manifest(options={"share_prefixes": True, "compress": compress})
    options = ShardOptions(shard_bytes=shard_rows * ROW_BYTES, fsync=False)
    with locked_folder(folder):
        prepared = prepare_folder(folder, manifest)
        with DatasetWriter(folder, prepared.manifest, options) as writer:
            return [
                writer.add(sample_of(index, ids))
                for index, ids in enumerate(samples)
                if prepared.done.get(index) is None
            ], prepared


def assert_read(folder, samples):
    found = open_dataset(folder, verify=True)
    assert found.indices.tolist() == list(range(len(samples)))
    for item, ids in zip(found, samples, strict=True):
        expected = sample_of(item["index"], ids)
        assert item["hidden_states"].numpy().tobytes() == expected.rows.tobytes()
        assert item["token_ids"].tolist() == ids.tolist()
        assert item["loss_mask"].tolist() == [True] * len(ids)
    assert all(part.error is None for part in verify_parts(folder, found.manifest))


def test_groups_with_a_common_system_prompt_are_stored_once(folder):
    shared, _ = write(folder, GROUPS)
    assert_read(folder, GROUPS)
    unique = {tuple(ids[: position + 1]) for ids in GROUPS for position in range(len(ids))}
    (part,) = part_paths(folder)
    entries = load_entries(part, open_dataset(folder).manifest.id)
    assert sum(entry.own_tokens for entry in entries) == len(unique)
    assert sum(shared) == sum(map(len, GROUPS)) - len(unique)
    # the second group has the system prompt of the first sample, and only that
    assert entries[5].before == ((0, len(SYSTEM)),)
    assert (
        view_sample(folder, 5)
        .facts["file"]
        .endswith(f"rows 0 to 30, then {entries[5].row} to {entries[5].spans[-1][1] - 1}")
    )
    # one that is the beginning of another one has no rows of its own, and is a view
    assert (entries[4].own_tokens, len(entries[4].spans)) == (0, 1 + (GROUPS[1].tolist() != GROUPS[4].tolist()))


def test_they_are_compressed_resumed_and_found_by_the_cached_lookup_too(folder):
    write(folder, GROUPS[:4], compress="planes+zstd")
    _, prepared = write(folder, GROUPS, compress="planes+zstd")
    assert len(prepared.done) == 4
    assert_read(folder, GROUPS)
    dataset_id = open_dataset(folder).manifest.id
    before = load_lookup(folder, dataset_id)
    write_cache(folder, dataset_id)
    cached = load_lookup(folder, dataset_id, use_cache=True)
    assert cached.before.spans.tolist() == before.before.spans.tolist()
    assert_read(folder, GROUPS)


def test_what_is_common_over_the_end_of_a_shard_is_stored_again(folder):
    write(folder, GROUPS, shard_rows=70)
    found = open_dataset(folder)
    assert len(found.files) > 1
    assert_read(folder, GROUPS)


def test_a_part_without_shared_rows_stays_of_the_first_version(folder):
    import json

    import pyarrow.parquet as pq

    write(folder, GROUPS[:1])
    write(folder, GROUPS)
    facts = [json.loads(pq.read_schema(path).metadata[b"layertap.index"]) for path in part_paths(folder)]
    assert [one["format_version"] for one in facts] == [1, 2]
    assert ["before" in pq.read_schema(path).names for path in part_paths(folder)] == [False, True]
    assert_read(folder, GROUPS)
