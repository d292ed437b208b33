"""An S3 server on loopback, by moto, that can fail requests; and the environment for its clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

SECRET = "plantedSECRETvalue0123456789abcdefgh"
_SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code>"
    b"<Message>Please reduce your request rate.</Message></Error>"
)


class Server:
    """Serves until its context ends.

    Attributes:
        requests: Method and path of each request.
        variables: For the environment of clients.
        fails: Decides by method and path whether to answer 503 SlowDown.
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log(self, *args: Any) -> None: ...

        self.requests: list[tuple[str, str]] = []
        self.fails: Callable[[str, str], bool] = lambda method, path: False
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, True, request_handler=Quiet)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.variables = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "planted",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def _answer(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        if self.fails(method, path):
            size = int(environ.get("CONTENT_LENGTH") or 0)
            environ["wsgi.input"].read(size)
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [_SLOW_DOWN]
        return self._app(environ, start)

    @contextmanager
    def serving(self, *buckets: str) -> Iterator[Server]:
        """Serve new buckets. Set `variables` before."""
        import moto.backends

        moto.backends.get_backend("s3").reset()
        self._thread.start()
        try:
            client = self.client()
            for bucket in buckets:
                client.create_bucket(Bucket=bucket)
            client.close()
            yield self
        finally:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def client(self) -> Any:
        """A client of boto3."""
        import boto3

        return boto3.client("s3", endpoint_url=self.endpoint)

    def all_keys(self) -> list[str]:
        """The keys in the first bucket."""
        client = self.client()
        bucket = client.list_buckets()["Buckets"][0]["Name"]
        found = client.list_objects_v2(Bucket=bucket).get("Contents", [])
        client.close()
        return [entry["Key"] for entry in found]
