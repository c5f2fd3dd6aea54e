"""An S3 server from a package (moto), and fsspec told where it is, in this process and in those that it starts."""

from contextlib import contextmanager

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def bucket():
    """Yields the URL of a folder in an empty bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    before = dict(fsspec.config.conf)
    fsspec.config.conf["s3"] = {"endpoint_url": url}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("FSSPEC_S3_ENDPOINT_URL", url)
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="states")
        yield "s3://states/run-1"
    fsspec.config.conf.clear()
    fsspec.config.conf.update(before)
    server.stop()
