"""A TCP proxy with faults: what a bad network does to a connection, on purpose and on time."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time


class FaultyProxy:
    """Relays a loopback port to another and can cut, refuse, stall and delay. A context manager.

    Attributes:
        port: where it listens, on 127.0.0.1; the same for its whole life.
        accepted: how many connections it has taken so far.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.accepted = 0
        self.latency = 0.0
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.listen()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def listen(self) -> None:
        """Take new connections (again)."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen()
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def refuse(self) -> None:
        """Refuse new connections until `listen()`; established ones go on."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() alone would not
            listener.close()

    def cut(self) -> int:
        """Reset every established connection, as a firewall that lost its table does. Returns how many."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
                end.close()
        return len(pairs)

    def stall(self) -> None:
        """Pass nothing on, and keep every connection open, as when a cable is pulled, until `resume()`."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def delay(self, seconds: float) -> None:
        """Hold every piece of data, up to 64 KiB, this long, each way; 0 ends it."""
        self.latency = seconds

    def close(self) -> None:
        self.refuse()
        self.cut()
        self.resume()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # refuse() closed it
                return
            self.accepted += 1
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:  # the target refuses: so do we, as late as a proxy can
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = (client, server)
            with self._lock:
                self._pairs.append(pair)
            for source, sink in (pair, pair[::-1]):
                threading.Thread(target=self._pump, args=(source, sink, pair), daemon=True).start()

    def _pump(
        self, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, socket.socket]
    ) -> None:
        """Pass one direction on until its end, then say so to the other side, unless the end was a cut."""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.latency:
                    time.sleep(self.latency)
                self._flowing.wait()
                sink.sendall(data)
        self._flowing.wait()
        with self._lock, contextlib.suppress(OSError):
            if pair in self._pairs:
                sink.shutdown(socket.SHUT_WR)
