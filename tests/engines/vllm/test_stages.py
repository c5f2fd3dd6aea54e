"""Stages of a pipeline deliver their layers into one file, over both kinds of socket; one that ends early is told to readers."""

import numpy as np
import pytest
import torch
from file_cases import make_data, make_recorder

from layertap.capture.request import CaptureSpec, Window
from layertap.engines.vllm.collector import Collector
from layertap.engines.vllm.messages import Finish, Order
from layertap.engines.vllm.rowmap import Chunk
from layertap.engines.vllm.stages import Address, StageReceiver, StageSender, listen
from layertap.engines.vllm.tap import Step
from layertap.errors import EngineError, HiddenStatesError
from layertap.files.read import read_file

HIDDEN, ROWS = 8, 6
LAYERS = (3, 1, 2)
SPEC = CaptureSpec(layers=LAYERS, dtype="float32", hidden_size=HIDDEN, prompt_len=ROWS, max_tokens=0, window=Window())
PATIENCE_SECONDS = 30


class Stages:
    """The first stage holds layer 1, the second layers 2 and 3."""

    def __init__(self, folder, host):
        self.folder = folder
        listening = listen(1, host)
        self.address = listening.address
        self.second = None
        self.first = Collector(make_recorder(), (1,), torch.float32, num_stages=2)
        StageReceiver(listening, self.first, num_peers=1, limit_bytes=1 << 20)

    def connect(self):
        self.second = StageSender(self.address, (2, 3), torch.float32)

    def close(self):
        if self.second is not None:
            self.second.close()
        self.first.close()

    def order(self, name):
        path = self.folder / f"{name}.safetensors"
        order = Order(
            request_id=name, spec=SPEC, path=str(path), overwrite=False, public_id=name, tag=None, prefill=True
        )
        for stage in (self.first, self.second):
            stage.order(order)
        self.first.wait_for_admissions(PATIENCE_SECONDS)
        return path

    def step(self, stage, name, seed, slots):
        rows, ids = make_data(SPEC, seed=seed)
        cells = np.ascontiguousarray(rows[:, slots]).reshape(-1, HIDDEN * 4)
        facts = torch.from_numpy(np.stack([np.arange(ROWS), ids]))
        stage.step(
            Step(
                0,
                [Chunk(name, 0, ROWS, 0, len(slots), 0)],
                cells,
                lambda: None,
                facts,
                0,
                np.ones(len(cells), np.int32),
                1,
            )
        )

    def finish(self, stage, name, seed):
        ids = make_data(SPEC, seed=seed)[1]
        stage.finish(Finish(request_id=name, token_ids=tuple(ids.tolist()), finish_reason="prefill"))


@pytest.fixture(params=[None, "127.0.0.1"], ids=["one machine", "tcp"])
def stages(request, tmp_path):
    made = Stages(tmp_path, request.param)
    yield made
    made.close()


def test_two_stages_fill_one_file(stages):
    stages.connect()
    paths = [stages.order(str(seed)) for seed in range(3)]
    for seed in range(3):
        stages.step(stages.first, str(seed), seed, [1])
        stages.step(stages.second, str(seed), seed, [0, 2])  # in the packed order, which is the request's
        for stage in (stages.first, stages.second):
            stages.finish(stage, str(seed), seed)
    for seed, path in enumerate(paths):
        assert np.array_equal(read_file(path, timeout=PATIENCE_SECONDS).rows, make_data(SPEC, seed=seed)[0])


def test_a_stage_that_ends_is_told_to_the_readers_of_what_it_still_owed(stages):
    stages.connect()
    path = stages.order("a")
    stages.step(stages.first, "a", 1, [1])
    stages.finish(stages.first, "a", 1)
    stages.second._connection.close()  # as a killed process does
    with pytest.raises(HiddenStatesError, match="pipeline stage of the engine ended"):
        read_file(path, timeout=PATIENCE_SECONDS)


def test_what_a_stage_still_owes_when_the_engine_is_closed_is_told(stages):
    stages.connect()
    path = stages.order("a")
    stages.finish(stages.first, "a", 1)
    stages.first.close()
    with pytest.raises(HiddenStatesError, match="closed before"):
        read_file(path, timeout=PATIENCE_SECONDS)


def test_somebody_without_the_key_doesnt_take_a_stages_place(stages):
    with pytest.raises(EngineError, match="can't be reached"):
        StageSender(Address(stages.address.address, b"guessed"), (2, 3), torch.float32)
    stages.connect()
    path = stages.order("a")
    stages.step(stages.first, "a", 4, [1])
    stages.step(stages.second, "a", 4, [0, 2])
    for stage in (stages.first, stages.second):
        stages.finish(stage, "a", 4)
    assert np.array_equal(read_file(path, timeout=PATIENCE_SECONDS).rows, make_data(SPEC, seed=4)[0])


def test_an_address_that_isnt_this_machines_is_refused_with_what_to_do():
    with pytest.raises(EngineError, match="VLLM_HOST_IP"):
        listen(1, "203.0.113.7")
