"""pct: what it is called with, and what its failures mean.

The recorded texts of a real pct come first, then a node with a real sshd and real containers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflashctl import hostsfile
from dflashctl.config import PctHost
from dflashctl.errors import (
    ConnectionLostError,
    ContainerError,
    DflashError,
    ExitCode,
    NotFoundError,
    PreflightError,
)
from dflashctl.transport import transport_for
from dflashctl.transport.base import Result, Transport
from dflashctl.transport.local import LocalTransport
from dflashctl.transport.pct import PctTransport
from tests.running import shell_script
from tests.testhost import Container, Node
from tests.testhost.hosts import write_hosts_file

DATA = Path(__file__).parent.parent / "data" / "pct-behaviour.json"
RECORD = {case["name"]: case for case in json.loads(DATA.read_text())["cases"]}


def recorded(name: str) -> Result:
    case = RECORD[name]
    return Result(case["rc"], case["stdout"].encode(), case["stderr"].encode())


def local_pct(**changes: object) -> PctTransport:
    """A container said to be on this machine; nothing here is started by explaining."""
    values: dict[str, object] = {"name": "ct200", "via": "local", "vmid": 200}
    return PctTransport(PctHost(**(values | changes)), LocalTransport("pve1"))  # type: ignore[arg-type]


# The recorded texts

RECORDED = [
    ("exec stopped", ContainerError, "container 200 on pve1 is stopped", "pct start 200"),
    ("exec not root", ContainerError, "pct needs root, but the login on pve1 is", "log in as root"),
    ("pmxcfs down: exec", ContainerError, "the cluster file system of pve1 (pmxcfs) is down", "pve-cluster"),
    ("exec not found", PreflightError, "/no/such/cmd does not exist on ct200 on pve1", "hosts.toml"),
    ("exec not found in PATH", PreflightError, "nosuchcmd does not exist on ct200 on pve1", "hosts.toml"),
    (
        "exec not executable",
        PreflightError,
        "/etc/hostname can't be run (permission denied) on",
        "hosts.toml",
    ),
    ("exec bad vmid 99", ContainerError, "pct on pve1 does not understand the command", "vmid"),
    ("exec keep-env bad value", ContainerError, "pct on pve1 does not understand the command", "pveversion"),
    ("exec no command", ContainerError, "pct on pve1 does not understand the command", ""),
    ("env taint IFS", ContainerError, "pct refuses to run because IFS is set", "unset IFS"),
    ("env taint BASH_ENV", ContainerError, "pct refuses to run because BASH_ENV is set", "unset BASH_ENV"),
]


@pytest.mark.parametrize(("name", "kind", "message", "hint"), RECORDED, ids=[case[0] for case in RECORDED])
def test_recorded_failures(name: str, kind: type[DflashError], message: str, hint: str) -> None:
    result = recorded(name)
    error = local_pct().explain(result)
    assert type(error) is kind
    assert error.message.startswith(message)
    assert hint in error.hint
    assert error.where in result.stderr.decode().splitlines()


def test_every_recorded_failure_of_exec_is_explained() -> None:
    """No text of pct or lxc-attach falls through to 'the program failed'."""
    for name, case in RECORD.items():
        if case["argv"][:2] in (["pct", "exec"], ["/usr/sbin/pct", "exec"]) and case["rc"] and case["stderr"]:
            by_program = case["argv"][4:5] == ["sh"]
            assert (type(local_pct().explain(recorded(name))) is DflashError) == by_program, name


@pytest.mark.parametrize("code", [1, 2, 3, 111, 126, 127, 137, 255])
def test_a_code_alone_is_the_programs(code: int) -> None:
    error = local_pct().explain(Result(code, b"", b""))
    assert error.message == f"the program on ct200 on pve1 failed: exit code {code}"


def test_noise_does_not_hide_the_cause() -> None:
    noise = b"perl: warning: Setting locale failed.\nperl: warning: Falling back to the standard locale.\n"
    error = local_pct().explain(Result(255, b"", noise + recorded("exec stopped").stderr + b"x\n"))
    assert error.message == "container 200 on pve1 is stopped"
    assert error.where == "container '201' not running!"


def test_a_container_that_is_stopping() -> None:
    text = json.loads(DATA.read_text())["stopping_window"]["exec_stderr"]
    error = local_pct().explain(Result(1, b"", text.encode()))
    assert type(error) is ContainerError
    assert error.message == "container 200 on pve1 is just starting or stopping"


def test_an_attach_that_fails_otherwise() -> None:
    error = local_pct().explain(Result(1, b"", b"lxc-attach: 200: ../src/lxc/attach.c: x: 9 Something new\n"))
    assert error.message == "container 200 on pve1 can't be entered"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bash: line 1: /usr/sbin/pct: No such file or directory", "pve1 has no /usr/sbin/pct"),
        ("sh: 1: /usr/sbin/pct: not found", "pve1 has no /usr/sbin/pct"),
        ("zsh:1: no such file or directory: /usr/sbin/pct", "pve1 has no /usr/sbin/pct"),
        ("sudo: /usr/sbin/pct: command not found", "pve1 has no /usr/sbin/pct"),
        ("bash: line 1: sudo: command not found", "pve1 has no sudo"),
        ("zsh:1: command not found: sudo", "pve1 has no sudo"),
        ("sudo: a password is required", "root on pve1 may not run pct by sudo without a password"),
        (
            "Sorry, user ann is not allowed to execute '/usr/sbin/pct exec 200' as root on pve1.",
            "root on pve1 may not",
        ),
        ("ann is not in the sudoers file.", "root on pve1 may not run pct"),
        ("please run as root", "pct needs root"),
    ],
)
def test_failures_before_pct(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalTransport, "user", "root")
    error = local_pct().explain(Result(1, b"", text.encode() + b"\n"))
    assert type(error) is ContainerError
    assert error.message.startswith(message)
    assert error.hint


def test_without_pct_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalTransport, "user", "root")
    with pytest.raises(ContainerError, match="pve1 has no /usr/sbin/pct: it is not a Proxmox host"):
        local_pct().run(["true"], timeout=5)


def test_an_unreadable_list_of_guests_is_said_to_be_unread() -> None:
    error = local_pct().explain(recorded("exec missing"))
    assert type(error) is NotFoundError
    assert "it is missing, on another node, or a virtual machine" in error.message
    assert "could not be read" in error.hint


@pytest.mark.parametrize(("user", "sudo", "expected"), [
    ("root", None, False), ("ann", None, True), ("root", True, True), ("ann", False, False),
])  # fmt: skip
def test_sudo_is_for_those_who_are_not_root(
    user: str, sudo: bool | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTransport, "user", user)
    monkeypatch.setattr("dflashctl.transport.pct.PCT", "/bin/echo")
    shell_script(tmp_path / "sudo", 'echo "sudo $@"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with PctTransport(PctHost("ct200", via="local", vmid=200), LocalTransport(), sudo=sudo) as pct:
        out = pct.run(["a", "-b"], timeout=5).stdout.decode()
    assert out == ("sudo -n /bin/echo exec 200 -- a -b\n" if expected else "exec 200 -- a -b\n")


# A node


@pytest.fixture
def ct200(node: Node, hosts_file: Path) -> Iterator[Transport]:
    with to(hosts_file) as transport:
        yield transport


def to(hosts_file: Path, name: str | None = None) -> Transport:
    hosts = hostsfile.load(hosts_file, {}, Path("/"))
    return transport_for(hosts.get(name), hosts)


def failure(transport: Transport, argv: list[str] | None = None) -> DflashError:
    with transport:
        return transport.explain(transport.run(argv or ["true"], timeout=20))


def test_a_program_in_the_container(ct200: Transport) -> None:
    assert ct200.label == "ct200 on pve1"
    result = ct200.run(["sh", "-c", "cat; hostname >&2; exit 4"], stdin=b"\x00\xff", timeout=20)
    assert result == Result(4, b"\x00\xff", b"trainer\n")


def test_argv_through_ssh_and_pct(ct200: Transport) -> None:
    arguments = ["a b", "q'uote", 'd"q', "new\nline", "$HOME", "`id`", "", "*", "\\", ";", "|", "--", "-x"]
    result = ct200.run(["printf", r"%s\0", *arguments], timeout=20)
    assert result.stdout == b"".join(a.encode() + b"\0" for a in arguments)


def test_a_large_payload_into_the_container(ct200: Transport) -> None:
    data = bytes(range(256)) * 80_000
    assert ct200.run(["cat"], stdin=data, timeout=60).stdout == data


def test_a_stopped_container(node: Node, tmp_path: Path) -> None:
    error = failure(to(write_hosts_file(tmp_path / "hosts.toml", node, vmids=(201,))))
    assert type(error) is ContainerError
    assert error.message == "container 201 on pve1 is stopped"
    assert error.exit_code == ExitCode.CONTAINER


def test_a_missing_container(node: Node, tmp_path: Path) -> None:
    file = write_hosts_file(tmp_path / "hosts.toml", node, vmids=(999,))
    error = failure(to(file))
    assert type(error) is NotFoundError
    assert error.message == "there is no container 999 on pve1, nor on another node of its cluster"
    line = file.read_text().splitlines().index("vmid = 999") + 1
    assert error.where == f"{file}:{line}"
    assert error.exit_code == ExitCode.NOT_FOUND


@pytest.mark.parametrize("node_key", [False, True])
def test_a_container_on_another_node(
    node: Node, container_elsewhere: int, tmp_path: Path, node_key: bool
) -> None:
    file = write_hosts_file(tmp_path / "hosts.toml", node, vmids=(container_elsewhere,))
    if node_key:
        file.write_text(file.read_text() + 'node = "pve1"\n')
    error = failure(to(file))
    assert type(error) is NotFoundError
    claim = "hosts.toml says pve1" if node_key else "pve1 is node pve1"
    assert error.message == f"container {container_elsewhere} is on node pve2, but {claim}"
    key = 'node = "pve1"' if node_key else 'via = "pve1"'
    assert error.where == f"{file}:{file.read_text().splitlines().index(key) + 1}"
    assert "pve2" in error.hint


def test_a_virtual_machine(node: Node, tmp_path: Path) -> None:
    conf = node.write_config(150, "memory: 512\n", kind="qemu-server")
    try:
        error = failure(to(write_hosts_file(tmp_path / "hosts.toml", node, vmids=(150,))))
    finally:
        conf.unlink()
        node.renew_vmlist()
    assert type(error) is NotFoundError
    assert error.message == "150 is a virtual machine (on node pve1), not a container"


def test_a_frozen_container(ct200: Transport, container: Container) -> None:
    container.freeze()
    try:
        with pytest.raises(TimeoutError):
            ct200.run(["true"], timeout=2)
        error = ct200.explain(Result(None, b"", b""))
    finally:
        container.unfreeze()
    assert type(error) is ContainerError
    assert error.message == "container 200 on pve1 is frozen"
    assert "lxc-unfreeze -n 200" in error.hint
    assert ct200.run(["echo", "thawed"], timeout=20).stdout == b"thawed\n"


def test_a_container_that_is_only_slow(ct200: Transport) -> None:
    error = ct200.explain(Result(None, b"", b"perl: warning: Setting locale failed.\n"))
    assert error.message == "container 200 on pve1 does not answer (state: running)"


def test_pmxcfs_down(ct200: Transport, node: Node) -> None:
    with node.pmxcfs_down():
        error = failure(ct200)
    assert type(error) is ContainerError
    assert "pmxcfs" in error.message


def test_a_missing_python_in_the_container(ct200: Transport) -> None:
    for argv in (["/opt/none/python"], ["/usr/bin/env", "A=b", "/opt/none/python"]):
        error = ct200.explain(ct200.run(argv, timeout=20))
        assert type(error) is PreflightError
        assert error.message == "/opt/none/python does not exist on ct200 on pve1"
        assert error.exit_code == ExitCode.PREFLIGHT


def test_a_host_without_pct(node: Node, ct200: Transport) -> None:
    pct = node.root / "usr/sbin/pct"
    aside = pct.with_name("pct.aside")
    pct.rename(aside)
    try:
        error = failure(ct200)
    finally:
        aside.rename(pct)
    assert type(error) is ContainerError
    assert error.message == "pve1 has no /usr/sbin/pct: it is not a Proxmox host"


@pytest.fixture
def ann(node: Node, tmp_path: Path) -> Iterator[Path]:
    """A hosts file whose login on pve1 is not root's; the node has no sudo but what a test puts there."""
    # her home is in /run, which is the node's own; /home is the machine's
    node.run(["useradd", "-m", "-d", "/run/ann", "-s", "/bin/bash", "ann"])
    home = node.root / "run/ann"
    (home / ".ssh").mkdir()
    (home / ".ssh" / "authorized_keys").write_text(node.key.with_suffix(".pub").read_text())
    node.run(["chown", "-R", "ann:ann", "/run/ann"])
    file = write_hosts_file(tmp_path / "ann.toml", node)
    file.write_text(file.read_text().replace('user = "root"', 'user = "ann"'))
    yield file
    node.run(["userdel", "-rf", "ann"])  # by force: the end of her last session may not be over


def test_a_login_that_is_not_root(ann: Path) -> None:
    ann.write_text(ann.read_text().replace('user = "ann"', 'user = "ann"\nsudo = false'))
    error = failure(to(ann))
    assert type(error) is ContainerError
    assert error.message == "pct needs root, but the login on pve1 is ann"


def test_a_login_that_is_not_root_on_a_host_without_sudo(node: Node, ann: Path) -> None:
    if (node.root / "usr/bin/sudo").exists():
        pytest.skip("this machine, and so the node, has sudo")
    error = failure(to(ann))
    assert type(error) is ContainerError
    assert error.message == "pve1 has no sudo, and the login ann is not root"


def test_pct_stays_executable(node: Node, ct200: Transport) -> None:
    """lxc-attach changes the mode of what it takes for stdin."""
    mode = (node.root / "usr/sbin/pct").stat().st_mode
    ct200.run(["true"], timeout=20)
    with ct200.open(["cat"], timeout=20) as channel:
        channel.close_stdin()
        assert channel.wait(20) == 0
    assert (node.root / "usr/sbin/pct").stat().st_mode == mode


def test_a_cut_connection(node: Node, ct200: Transport) -> None:
    channel = ct200.open(["sh", "-c", "echo up; cat"], timeout=20)
    assert channel.read(20) == b"up\n"
    assert node.cut_connections() == 1
    start = time.monotonic()
    with pytest.raises(ConnectionLostError):
        channel.read(30)
    assert time.monotonic() - start < 20
