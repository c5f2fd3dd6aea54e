"""Captures driven by hand, through the real recorder: files that are being written, published or failed as a test needs them."""

import numpy as np

from layertap.assembly import Rows
from layertap.capture.request import CaptureSpec, Window
from layertap.files.paths import target_path

KEYS = ("alpha-key", "beta-key")


class HandCapture:
    """One file whose life a test decides."""

    def __init__(self, front, name, num_tokens=4):
        self.name = name
        self.ids = list(range(9, 9 + num_tokens))
        self.spec = CaptureSpec(
            layers=(1, 2), dtype="float32", hidden_size=64, prompt_len=num_tokens, max_tokens=0, window=Window()
        )
        self.path = target_path(front.options, name, None)
        self.capture = front.recorder.admit(self.spec, request_id=name, path=self.path)

    def publish(self):
        values = np.random.default_rng(0).standard_normal((len(self.ids), 2, 64), dtype=np.float32)
        data = values.view(np.uint8).reshape(len(self.ids), 2, 256)
        self.capture.add(Rows(step=0, start=0, input_ids=np.array(self.ids), slots=slice(0, 2), data=data))
        self.capture.finish(self.ids, "prefill").result(timeout=60)
        return self.path

    def fail(self, reason):
        self.capture.fail(reason)
        assert self.capture.result.exception(timeout=60) is not None
