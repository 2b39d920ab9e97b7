"""known_hosts: matched as OpenSSH matches, appended whole."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from dflashctl.errors import UnreachableError
from dflashctl.transport import hostkeys
from tests.transport.conftest import make_key


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
    import base64

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
def test_known(text: str, keys: list[tuple[str, str]], tmp_path: Path) -> None:
    assert not check(text, keys, tmp_path, accept_new=False).exists()


@pytest.mark.parametrize("text", ["", "pve2 K0\n", "@cert-authority pve1 K0\n", "@revoked pve1 K1\n"])
def test_unknown(text: str, keys: list[tuple[str, str]], tmp_path: Path) -> None:
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
    import base64

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
