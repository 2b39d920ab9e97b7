"""Real runs in containers, for tests: over ssh and pct, as a hosts file has it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dflashctl import hostsfile
from dflashctl.remote.session import Session
from dflashctl.transport import transport_for
from tests.running import wait_for


class Place:
    """The default host of a hosts file, and runs there."""

    def __init__(self, file: Path) -> None:
        self.hosts = hostsfile.load(file, os.environ, file.parent)
        self.host = self.hosts.default

    def session(self, **options: Any) -> Session:
        """A session that is not opened yet; `options` are attributes of it."""
        transport = transport_for(self.host, self.hosts, accept_new=True)
        session = Session.on(self.host, transport, owns_transport=True)
        for name, value in options.items():
            setattr(session, name, value)
        return session

    def start(
        self,
        session: Session,
        run_id: str,
        script: str,
        warmup: dict[str, float] | None = None,
        **environment: str,
    ) -> dict[str, Any]:
        """Start a Python script as the trainer of a run; its first argument is the run's folder."""
        folder = f"{self.host.workspace}/dflash/runs/{run_id}"
        return session.call(
            "start",
            run_id=run_id,
            manifest={"name": run_id, "warmup": warmup or {}},
            config_toml="",
            argv=[self.host.python, "-u", "-c", script, folder],
            environment=environment,
            grace=5.0,
        )

    def ended(self, session: Session, run_id: str, seconds: float = 20) -> dict[str, Any]:
        """The state once the run has ended."""

        def look() -> dict[str, Any] | None:
            state = session.call("snapshot", run_id=run_id, log_lines=0, want_gpu=False)["state"] or {}
            return state if state.get("status") == "exited" else None

        try:
            return wait_for(look, seconds)
        except AssertionError:
            seen = session.call("snapshot", run_id=run_id, log_lines=30, want_gpu=False)
            raise AssertionError(f"{run_id} has not ended within {seconds:g} s: {seen}") from None
