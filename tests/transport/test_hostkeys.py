"""known_hosts: matched as OpenSSH matches, appended whole; and what a real sshd meets."""

from __future__ import annotations

import base64
import getpass
import subprocess
import threading
from pathlib import Path

import pytest

from dflashctl.errors import UnreachableError
from dflashctl.transport import hostkeys
from dflashctl.transport.ssh import SshTransport
from tests.transport.conftest import MakeServer, Server, make_key, refused


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Two keys as (type, base64)."""
    folder = tmp_path_factory.mktemp("hostkeys")
    made = [make_key(folder / name).with_suffix(".pub").read_text().split()[:2] for name in "ab"]
    return [(kind, blob) for kind, blob in made]


NAMES = ["pve1", "PVE1", "pve10", "pve1.example.org", "10.0.0.5", "[pve1]:2222", "[10.0.0.5]:22", "other"]
PATTERNS = [
    "pve1",
    "Pve1",
    "pve1,10.0.0.5",
    "pve?",
    "pve*",
    "*.example.org",
    "*",
    "!pve1,*",
    "*,!pve1",
    "!other",
    "[pve1]:2222",
    "[pve1]:*",
    "[*]:2222",
    "[10.0.0.5]:22",
    "pve[1]",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_openssh_says(pattern: str, keys: list[tuple[str, str]], tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"{pattern} {keys[0][0]} {keys[0][1]}\n")
    for name in NAMES:
        truth = (
            subprocess.run(["ssh-keygen", "-F", name, "-f", str(file)], capture_output=True).returncode == 0
        )
        assert hostkeys.read([file])[0].matches(name) == truth, name


def test_hashed_names(keys: list[tuple[str, str]], tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text("".join(f"{name} {keys[0][0]} {keys[0][1]}\n" for name in ("pve1", "[pve1]:2222")))
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(file)], check=True, capture_output=True)
    first, second = hostkeys.read([file])
    assert first.names.startswith("|1|")
    assert [first.matches(n) for n in ("pve1", "pve2", "[pve1]:2222")] == [True, False, False]
    assert [second.matches(n) for n in ("pve1", "[pve1]:2222")] == [False, True]


def test_what_is_no_key_is_passed_over(keys: list[tuple[str, str]], tmp_path: Path) -> None:
    kind, blob = keys[0]
    file = tmp_path / "known_hosts"
    file.write_bytes(
        b"# comment\n\n  \nhost\nhost ssh-rsa\nhost ssh-rsa !!!\n|1|x ssh-rsa AAAA\n\xff\xfe\n"
        + f"pve1 {kind} {blob} a comment\r\n".encode()
    )
    found = [key for key in hostkeys.read([tmp_path / "none", file, tmp_path]) if key.matches("pve1")]
    assert [(key.line, key.kind) for key in found] == [(9, kind)]


def check(
    text: str, keys: list[tuple[str, str]], tmp_path: Path, *, shown: int = 0, accept_new: bool = True
) -> Path:
    """Verify that `pve1` shows keys[shown] against a file of that text; K0 and K1 stand for the keys."""
    file = tmp_path / "known_hosts"
    for number, (kind, blob) in enumerate(keys):
        text = text.replace(f"K{number}", f"{kind} {blob}")
    file.write_text(text)
    kind, blob = keys[shown]
    data = base64.b64decode(blob)
    hostkeys.verify(
        hostkeys.read([file]),
        "pve1",
        kind,
        data,
        add_to=tmp_path / "new",
        accept_new=accept_new,
        confirm=None,
    )
    return tmp_path / "new"


@pytest.mark.parametrize(
    "text", ["pve1 K0\n", "pve1 K1\npve1 K0\n", "* K0\n", "@cert-authority pve1 K1\npve1 K0\n"]
)
def test_a_known_key_passes_unasked(text: str, keys: list[tuple[str, str]], tmp_path: Path) -> None:
    assert not check(text, keys, tmp_path, accept_new=False).exists()


@pytest.mark.parametrize("text", ["", "pve2 K0\n", "@cert-authority pve1 K0\n", "@revoked pve1 K1\n"])
def test_an_unknown_key_is_refused_unless_new_ones_are_taken(
    text: str, keys: list[tuple[str, str]], tmp_path: Path
) -> None:
    with pytest.raises(UnreachableError, match="is not known"):
        check(text, keys, tmp_path, accept_new=False)
    assert check(text, keys, tmp_path).read_text().startswith("pve1 ssh-ed25519 ")


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("\npve1 K1\n", "has changed", 2),
        ("pve1 ssh-rsa AAAA\n", r"has changed: .*\(ssh-ed25519\), known is .*\(ssh-rsa\)", 1),
        ("pve1 K0\n@revoked * K0\n", "is revoked", 2),
    ],
)
def test_refused_whatever_is_accepted(
    text: str, message: str, line: int, keys: list[tuple[str, str]], tmp_path: Path
) -> None:
    with pytest.raises(UnreachableError, match=message) as caught:
        check(text, keys, tmp_path)
    assert caught.value.where == f"{tmp_path / 'known_hosts'}:{line}"
    assert not (tmp_path / "new").exists()


def test_fingerprints_are_those_of_ssh_keygen(tmp_path: Path) -> None:
    key = make_key(tmp_path / "key", kind="ecdsa")
    truth = subprocess.run(["ssh-keygen", "-lf", str(key)], capture_output=True, text=True, check=True).stdout
    blob = base64.b64decode(key.with_suffix(".pub").read_text().split()[1])
    assert hostkeys.fingerprint(blob) == truth.split()[1]


def test_many_logins_at_once_add_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text("first line without an end")
    blob = bytes(3000)
    threads = [
        threading.Thread(target=hostkeys.add, args=(file, f"host{n}", "ssh-rsa", blob)) for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = file.read_text().splitlines()
    assert lines[0] == "first line without an end"
    assert sorted(line.split()[0] for line in lines[1:]) == sorted(f"host{n}" for n in range(16))
    assert all(key.blob == blob for key in hostkeys.read([file]))
    assert len(hostkeys.read([file])) == 16


def test_a_file_that_cant_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnreachableError, match="can't be saved: "):
        hostkeys.add(tmp_path / "file" / "known_hosts", "pve1", "ssh-rsa", b"x")


# Before a real sshd


def test_an_unknown_key_is_refused_when_nobody_can_be_asked(server: Server) -> None:
    server.known_hosts.unlink()
    error = refused(SshTransport(server.host()))
    printed = subprocess.run(
        ["ssh-keygen", "-lf", str(server.host_key)], capture_output=True, text=True
    ).stdout
    assert printed.split()[1] in error.message
    assert f"the host key of {server.name} is not known" in error.message
    assert "--accept-new" in error.hint
    assert hostkeys.SHOW_KEYS in error.hint
    assert not server.known_hosts.exists()


def test_the_command_that_shows_a_hosts_keys_shows_all_of_them(tmp_path: Path) -> None:
    """A host has several; `ssh-keygen -lf a b` ends in its usage."""
    for kind in ("ed25519", "ecdsa"):
        make_key(tmp_path / f"ssh_host_{kind}_key", kind=kind)
    command = hostkeys.SHOW_KEYS.replace("/etc/ssh", str(tmp_path))
    shown = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (shown.returncode, shown.stdout.count("SHA256:")) == (0, 2), shown.stderr


def test_an_unknown_key_is_asked_about(server: Server) -> None:
    server.known_hosts.unlink()
    questions: list[str] = []

    def answer(question: str) -> bool:
        questions.append(question)
        return len(questions) > 1

    error = refused(SshTransport(server.host(), confirm=answer))
    assert "was not accepted" in error.message
    assert not server.known_hosts.exists()
    for _ in range(2):
        with SshTransport(server.host(), confirm=answer) as ssh:
            ssh.connect()
    assert len(questions) == 2, "known after the yes"
    assert "SHA256:" in questions[0]
    assert str(server.known_hosts) in questions[0]


def test_accept_new_adds_the_key_in_a_form_that_ssh_reads(server: Server) -> None:
    server.known_hosts.write_text("# no newline at the end")
    with SshTransport(server.host(), accept_new=True) as ssh:
        ssh.connect()
    assert server.known_hosts.read_text().startswith("# no newline at the end\n[127.0.0.1]:")
    found = subprocess.run(
        ["ssh-keygen", "-F", server.name, "-f", str(server.known_hosts)], capture_output=True
    )
    assert found.returncode == 0


def test_a_new_known_hosts_file_is_private(server: Server, client_home: Path) -> None:
    file = client_home / "new" / "known_hosts"
    with SshTransport(server.host(known_hosts_file=file), accept_new=True) as ssh:
        ssh.connect()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("accept_new", [False, True])
def test_a_changed_key_is_always_refused(server: Server, accept_new: bool) -> None:
    old = server.known_hosts.read_text()
    server.known_hosts.write_text("# a line\n" + old)
    server.stop()
    server.host_key.unlink()
    make_key(server.host_key)
    server.start()
    error = refused(SshTransport(server.host(), accept_new=accept_new, confirm=lambda _: True))
    assert f"the host key of {server.name} has changed" in error.message
    assert error.where == f"{server.known_hosts}:2"
    assert f"ssh-keygen -R '{server.name}' -f {server.known_hosts}" in error.hint
    assert hostkeys.fingerprint(hostkeys.read([server.known_hosts])[0].blob) in error.message
    assert server.known_hosts.read_text() == "# a line\n" + old


def test_a_known_key_is_asked_for_even_where_the_host_has_others(
    make_server: MakeServer, tmp_path: Path
) -> None:
    """Only the RSA key is known; by its own order the host would show the Ed25519 one."""
    rsa = make_key(tmp_path / "rsa", kind="rsa")
    server = make_server()
    server.stop()
    server.options["HostKey"] = f"{server.host_key}\nHostKey {rsa}"
    server.start()
    kind, blob = rsa.with_suffix(".pub").read_text().split()[:2]
    server.known_hosts.write_text(f"{server.name} {kind} {blob}\n")
    with SshTransport(server.host()) as ssh:
        assert ssh.run(["true"], timeout=10).exit_code == 0


def test_known_hosts_and_alias_of_ssh_config(server: Server, client_home: Path) -> None:
    kind, blob = server.host_key.with_suffix(".pub").read_text().split()[:2]
    (client_home / "mine").write_text(f"prod {kind} {blob}\n")
    (client_home / ".ssh" / "config").write_text(
        f"Host pve\n  HostName 127.0.0.1\n  Port {server.port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {server.key}\n  HostKeyAlias prod\n  UserKnownHostsFile ~/mine\n"
    )
    with SshTransport(
        server.host(address="pve", port=None, user=None, identity_file=None, known_hosts_file=None)
    ) as ssh:
        assert ssh.user == getpass.getuser()
        assert ssh.run(["true"], timeout=10).exit_code == 0


def test_the_users_own_known_hosts_file_counts_as_well(server: Server, client_home: Path) -> None:
    server.known_hosts.rename(client_home / ".ssh" / "known_hosts")
    with SshTransport(server.host()) as ssh:
        ssh.connect()
    assert not server.known_hosts.exists()
