"""~/.ssh/config is understood as ssh itself understands it: `ssh -G` is the judge."""

from __future__ import annotations

import getpass
import shutil
import subprocess
from pathlib import Path

import pytest

from dflashctl.config import Host, SshHost
from dflashctl.errors import UnreachableError
from dflashctl.transport.sshconfig import Endpoint, jump_host, resolve

CONFIG = """\
# a comment
Include {top}
AddressFamily any
Host pve pve-*
  HostName %h.example.org
  Port 2222
  User ann
  IdentityFile /keys/%h-%r
  IdentityFile /keys/second
  HostKeyAlias alias-of-pve
  UserKnownHostsFile /kh/one /kh/two
  ProxyJump none
Host = quick
  Hostname=10.0.0.9
  ProxyCommand nc -X 5 %h %p
Host behind
  ProxyJump ann@gate:2200,inner
  StrictHostKeyChecking accept-new
  IdentitiesOnly yes
Host none-first
  ProxyJump none
  ProxyCommand nc %h %p
Host command-none
  ProxyCommand none
Host *.lab !bad.lab
  Port 2022
Host in*
  User ina
  Include {include}
  ProxyJump of-in
Host *
  User everyone
  ProxyJump bastion
"""


@pytest.fixture
def config_file(client_home: Path) -> Path:
    (client_home / "extra.conf").write_text("Host included\n  HostName 10.1.1.1\n  Port 1234\n")
    (client_home / "top.conf").write_text("Host topmost\n  HostName 10.2.2.2\n  User tim\n")
    file = client_home / ".ssh" / "config"
    text = CONFIG.replace("{include}", str(client_home / "extra*.conf"))
    file.write_text(text.replace("{top}", str(client_home / "top.conf")))
    return file


def truth(config_file: Path, *arguments: str) -> dict[str, list[str]]:
    out = subprocess.run(
        ["ssh", "-G", "-F", str(config_file), *arguments], capture_output=True, text=True, check=True
    ).stdout
    options: dict[str, list[str]] = {}
    for line in out.splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key, []).append(value)
    return options


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh to compare with")
@pytest.mark.parametrize(
    "alias",
    [
        "pve",
        "pve-7",
        "quick",
        "behind",
        "x.lab",
        "bad.lab",
        "included",
        "inner",
        "none-first",
        "command-none",
        "topmost",
        "192.168.1.1",
    ],
)
@pytest.mark.parametrize("given", [{}, {"user": "zed"}, {"port": 99}])
def test_as_ssh_reads_it(alias: str, given: dict, config_file: Path) -> None:
    flags = [f"-{name[0] if name == 'port' else 'l'}{value}" for name, value in given.items()]
    options = truth(config_file, *flags, alias)
    end = resolve(SshHost("x", address=alias, **given), config_file)
    assert [end.address] == options["hostname"]
    assert [str(end.port)] == options["port"]
    assert [end.user] == options["user"]
    assert [end.key_alias] == options.get("hostkeyalias", [""])
    assert ",".join(end.jumps) == options.get("proxyjump", [""])[0]
    assert end.identities_only == (options["identitiesonly"] == ["yes"])
    # ssh -G leaves the tokens in these as they are
    command, *identities = [*options.get("proxycommand", [""]), *options["identityfile"]]
    for token, value in {"%h": end.address, "%p": str(end.port), "%r": end.user}.items():
        command = command.replace(token, value)
        identities = [file.replace(token, value) for file in identities]
    assert end.proxy_command == command.removesuffix("none")
    if end.identities:
        assert [str(file) for file in end.identities] == identities
    if alias.startswith("pve"):
        assert [str(file) for file in end.known_hosts[:2]] == options["userknownhostsfile"][0].split()


def test_hosts_toml_comes_first(config_file: Path) -> None:
    host = SshHost(
        "x",
        address="pve",
        user="zed",
        port=99,
        identity_file=Path("/mine"),
        known_hosts_file=Path("/known"),
        proxy_jump="a, b",
    )
    end = resolve(host, config_file)
    assert (end.user, end.port, end.jumps) == ("zed", 99, ("a", "b"))
    assert end.identities[0] == Path("/mine")
    assert end.required
    assert end.known_hosts[0] == Path("/known")


def test_without_a_config_file(client_home: Path) -> None:
    end = resolve(SshHost("x", address="pve"), client_home / "none")
    assert (end.address, end.port, end.user, end.jumps) == ("pve", 22, getpass.getuser(), ())
    assert end.known_hosts[0] == client_home / ".ssh" / "known_hosts"
    assert end.known_hosts[-1] == Path("/etc/ssh/ssh_known_hosts2")


@pytest.mark.parametrize("text", ["Port many", 'UserKnownHostsFile "open', "Match foo", "\xff"])
def test_a_file_that_cant_be_understood(text: str, config_file: Path) -> None:
    config_file.write_text(f"Host pve\n  {text}\n", "latin-1")
    with pytest.raises(UnreachableError, match="config can't be used") as caught:
        resolve(SshHost("x", address="pve"), config_file)
    assert caught.value.where == str(config_file)


def test_a_proxy_command_has_its_tokens_filled(config_file: Path) -> None:
    config_file.write_text("Host quick\n  Hostname 10.0.0.9\n  ProxyCommand nc %h %p as %r\n")
    end = resolve(SshHost("x", address="quick", port=77, user="zed"), config_file)
    assert end.proxy_command == "nc 10.0.0.9 77 as zed"


def test_the_login_in_words() -> None:
    end = resolve(SshHost("x", address="pve", user="ann", port=2222), Path("/none"))
    assert isinstance(end, Endpoint)
    assert end.login == "ann@pve:2222"


@pytest.mark.parametrize(
    ("hop", "expected"),
    [
        ("gate", ("gate", None, None)),
        ("ann@gate", ("gate", "ann", None)),
        ("ann@gate:2222", ("gate", "ann", 2222)),
        ("ssh://ann@gate:2222", ("gate", "ann", 2222)),
        ("a@b@gate", ("gate", "a@b", None)),
        ("[fe80::1]:22", ("fe80::1", None, 22)),
        ("fe80::1", ("fe80::1", None, None)),
        ("[::1]", ("::1", None, None)),
    ],
)
def test_jump_hosts(hop: str, expected: tuple[str, str | None, int | None]) -> None:
    host = jump_host(hop, {})
    assert (host.address, host.user, host.port) == expected


def test_a_jump_host_may_be_a_host_of_the_file() -> None:
    hosts: dict[str, Host] = {"gate": SshHost("gate", address="10.0.0.1", user="ann")}
    assert jump_host("gate", hosts) is hosts["gate"]


@pytest.mark.parametrize("hop", ["", "@", "ann@", "gate:x", ":22"])
def test_a_jump_host_that_cant_be_understood(hop: str) -> None:
    with pytest.raises(UnreachableError, match="can't be understood"):
        jump_host(hop, {})
