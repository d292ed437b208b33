"""The stores of a job, and the rendezvous of one node; nodes.py and endpoint.py are for several nodes.

Subclasses of `torch.distributed.elastic.rendezvous`. torch keeps one store over restarts, so that restarted
ranks read the addresses of dead ones, and its stores listen on all interfaces. Here each round has a new
store, which listens on one interface if possible.
"""

from __future__ import annotations

import gc
import time
import weakref
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from paceline.job.store_server import cannot_listen, listen, listen_for, store_on

STORE_TIMEOUT = timedelta(seconds=60)
_REBIND_S = 10.0
READ_TIMEOUT_S = 60
C10D_PORT = 29400


class LocalRendezvous(StaticTCPRendezvous):
    """The rendezvous of a job on one node: each round has a new store on `host`.

    Args:
        host: The address that the store listens on and that the ranks connect to.
        port: 0 lets the kernel choose a free one.
    """

    def __init__(self, host: str, port: int, run_id: str) -> None:
        super().__init__(host, port, 0, 1, run_id, READ_TIMEOUT_S)
        self._host = host
        self._port = port
        self._round = 0
        self._last: weakref.ref[TCPStore] | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch."""
        if self._port and self._last is not None:
            self._wait_gone(self._last)
        try:
            store = store_on(listen(self._host, self._port), STORE_TIMEOUT)
        except OSError as error:
            raise cannot_listen(
                f"the store of the job cannot listen on {self._host}:{self._port}",
                self._port,
                error,
                fix="omit the port, so that the kernel chooses a free one; or choose another.",
            ) from error
        self._last = weakref.ref(store)
        self._round += 1
        return RendezvousInfo(
            PrefixStore(f"paceline/agent/{self._round}", store),
            rank=0,
            world_size=1,
            bootstrap_store_info=RendezvousStoreInfo(self._host, store.port),
        )

    def _wait_gone(self, store: weakref.ref[TCPStore]) -> None:
        # A chosen port is free again when the store of the last round is gone.
        deadline = time.monotonic() + _REBIND_S
        while store() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)


class StaticHost(StaticTCPRendezvous):
    """torch's static rendezvous of several nodes, on the node that serves it: on one interface."""

    def __init__(self, of_torch: StaticTCPRendezvous) -> None:
        super().__init__(
            of_torch.master_addr,
            of_torch.master_port,
            of_torch.rank,
            of_torch.world_size,
            of_torch.run_id,
            int(of_torch.timeout.total_seconds()),
        )
        self._served: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch."""
        if self._served is None:
            try:
                listener = listen_for(self.master_addr, self.master_port)
            except OSError as error:
                raise cannot_listen(
                    f"node 0 cannot listen on {self.master_addr}:{self.master_port}",
                    self.master_port,
                    error,
                    fix="choose another port, the same on all nodes.",
                ) from error
            self._served = store_on(listener, self.timeout)
        return RendezvousInfo(
            PrefixStore(self.run_id, self._served),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self._served.host, self._served.port),
        )
