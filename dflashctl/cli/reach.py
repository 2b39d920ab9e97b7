"""From what was typed to a host, and to sessions with it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dflashctl.config import Host, Hosts, PctHost
from dflashctl.errors import ConfigError, DflashError, ExitCode
from dflashctl.hostsfile import load

if TYPE_CHECKING:
    from dflashctl.remote.session import Session
    from dflashctl.transport import Transport
    from dflashctl.verdict import Verdict

_COMMAND = re.compile(r"\b(dflashctl (?:launch|status|logs|stop|ls))\b(?! --hosts)([^&;]*)")


class UnclearError(DflashError):
    """Runs of one id are on several hosts, and none was named."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True)
class Place:
    """A host that was chosen. accept_new: trust unknown host keys unasked. named: the hosts file that --hosts named."""

    host: Host
    hosts: Hosts
    accept_new: bool = False
    may_ask: bool = True
    named: Path | None = None

    chosen: ClassVar[Place | None] = None
    """That of the command that runs."""

    @property
    def there(self) -> str:
        """The options by which a command is about this host again."""
        return self._file + self._name

    @property
    def _file(self) -> str:
        return f" --hosts {shlex.quote(str(self.named))}" if self.named else ""

    @property
    def _name(self) -> str:
        return "" if self.host.name == self.hosts.default_name else f" -H {self.host.name}"

    def typed(self, words: str) -> str:
        """The words with commands as they must be typed: ours with the hosts file that was named and with the host, pct's
        with the container.
        """
        if isinstance(self.host, PctHost):
            words = words.replace("pct set VMID", f"on {self.host.via}: pct set {self.host.vmid}")
        return _COMMAND.sub(self._typed, words)

    def _typed(self, found: re.Match[str]) -> str:
        command, rest = found.groups()
        # a run's id alone would do, unless another host has one of that id, or runs.json could not be written
        says_where = " -H " in rest or command == "dflashctl ls"
        return command + self._file + ("" if says_where else self._name) + rest

    def advised(self, verdict: Verdict) -> Verdict:
        """The verdict with its commands as they must be typed here."""
        found = verdict.diagnosis
        if found is not None:
            found = replace(found, advice=tuple(map(self.typed, found.advice)))
        advice, work = self.typed(verdict.advice), self.typed(verdict.work)
        return replace(verdict, advice=advice, work=work, diagnosis=found)

    def session(self) -> Session:
        """A session that is not opened yet, on a connection of its own, which it closes too."""
        from dflashctl.cli.patience import AwaitedSession
        from dflashctl.remote.session import Session
        from dflashctl.transport import transport_for

        transport = transport_for(
            self.host,
            self.hosts,
            confirm=_confirm if self.may_ask and sys.stdin.isatty() else None,
            accept_new=self.accept_new,
        )
        remark = "" if self.hosts.path else "; no hosts.toml was found here, above or in ~/.config/dflashctl"
        # who may not ask is one of several, and the wait for all is told
        kind = AwaitedSession if self.may_ask else Session
        return kind.on(self.host, transport, owns_transport=True, remark=remark)

    def parent(self) -> Transport:
        """The way to the host that the container is on. Not opened yet."""
        from dflashctl.transport import transport_for

        assert isinstance(self.host, PctHost)
        return transport_for(self.hosts.get(self.host.via), self.hosts, accept_new=self.accept_new)


def read_hosts(hosts_file: Path | None) -> Hosts:
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current folder does not exist any more", hint="change to one that does"
        ) from None
    return load(hosts_file, os.environ, here)


def place(host: str | None, hosts_file: Path | None, accept_new: bool, run: str | None = None) -> Place:
    """The host that was named; else, for a run this laptop has seen, that run's; else the default.

    Raises UnclearError where runs of that id were seen on several hosts.
    """
    hosts = read_hosts(hosts_file)
    if host is None and run is not None and "DFLASH_HOST" not in os.environ:
        from dflashctl.cli import seen

        known = [name for name in seen.load().get(run, ()) if name in hosts.by_name]
        if len(known) > 1:
            raise UnclearError(
                f"{run} may be the run on {' or on '.join(known)}",
                hint=f"say which: {' or '.join(f'-H {name}' for name in known)}",
            )
        host = known[0] if known else None
    Place.chosen = Place(trainable(hosts, host), hosts, accept_new, named=hosts_file)
    return Place.chosen


def trainable(hosts: Hosts, name: str | None) -> Host:
    """The host of that name, or the default. Raises NotFoundError, and ConfigError where no run can live on it."""
    chosen = hosts.get(name)
    if not chosen.trainable:
        raise ConfigError(
            f"no run can live on {chosen.name}: it has no workspace",
            where=chosen.where(),
            hint='add workspace = "/path" to it, or name a container with --host',
        )
    return chosen


def _confirm(question: str) -> bool:
    from dflashctl.cli.patience import Patience
    from dflashctl.render.terminal import stderr

    if Patience.current is not None:
        Patience.current.end()
    terminal = stderr()
    terminal.write(f"{question} [y/N] ")
    said = sys.stdin.readline()
    if not said:  # Ctrl-D leaves the cursor behind the question
        terminal.write("\n")
    return said.strip().lower() in ("y", "yes")
