"""hosts.toml: discovery, defaults, and every mistake with its own message."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflashctl import hostsfile
from dflashctl.config import WARMUP, Devices, Hosts, LocalHost, PctHost, SshHost
from dflashctl.errors import ConfigError, ExitCode, NotFoundError

ROOT = Path(__file__).parent.parent

GOOD = """\
default_host = "ct200"

[hosts.pve1]
kind = "ssh"
address = "10.0.0.5"

[hosts.ct200]
kind = "pct"
via = "pve1"
vmid = 200
"""


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which no hosts file of this machine is found."""
    monkeypatch.setattr(hostsfile, "SYSTEM_FILE", tmp_path / "etc" / "hosts.toml")
    return {"HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": str(tmp_path / "xdg")}


def parse(text: str, environ: dict[str, str] | None = None) -> Hosts:
    return hostsfile.parse(text, Path("/somewhere/hosts.toml"), environ or {"HOME": "/home/ann"})


def write(file: Path, name: str) -> Path:
    """A hosts file with one host of that name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'[hosts.{name}]\nkind = "ssh"\naddress = "{name}"\nworkspace = "/w"\n')
    return file


# What is read


def test_the_example_is_valid() -> None:
    hosts = hostsfile.load(ROOT / "hosts.example.toml", {}, ROOT)
    host = hosts.default
    assert isinstance(host, PctHost)
    assert (host.name, host.via, host.vmid, host.workspace) == ("ct200", "pve1", 200, "/workspace")
    assert host.python == "/opt/venv/bin/python"
    assert host.devices == Devices(
        tuple(f"cuda:{i}" for i in range(5)), tuple(f"cuda:{i}" for i in range(5, 8))
    )
    assert host.warmup["targets"] == 600
    assert host.environment["HF_HUB_OFFLINE"] == "1"
    assert not hosts.get("pve1").trainable
    assert [h.name for h in hosts] == ["pve1", "ct200", "local"]


def test_the_examples_machine_without_proxmox_is_a_host_for_runs(tmp_path: Path) -> None:
    lines = (ROOT / "hosts.example.toml").read_text().splitlines()
    begin = lines.index("# [hosts.box1]")
    block = itertools.takewhile(lambda line: line != "#", lines[begin:])
    hosts = hostsfile.parse("\n".join(line[2:] for line in block), tmp_path / "hosts.toml", {})
    box = hosts.get("box1")
    assert isinstance(box, SshHost)
    assert box.trainable
    assert box.devices == Devices(("cuda:0",), ("cuda:1",))


def test_the_examples_commented_keys_are_valid(tmp_path: Path) -> None:
    lines = (ROOT / "hosts.example.toml").read_text().splitlines()
    keys = ("port", "identity_file", "known_hosts_file", "proxy_jump", "connect_timeout", "sudo", "node")
    text = "\n".join(
        line[2:] if line.startswith(tuple(f"# {key} = " for key in keys)) else line for line in lines
    )
    hosts = hostsfile.parse(text, tmp_path / "hosts.toml", {})
    pve1, ct200 = hosts.get("pve1"), hosts.get("ct200")
    assert isinstance(pve1, SshHost)
    assert isinstance(ct200, PctHost)
    assert (pve1.port, pve1.sudo, pve1.hops, ct200.node) == (22, True, ["gateway"], "pve1")
    assert pve1.known_hosts_file == tmp_path / "known_hosts"
    assert pve1.identity_file == Path.home() / ".ssh" / "id_ed25519"


def test_local_is_always_there_and_everything_has_defaults() -> None:
    hosts = parse(GOOD)
    assert hosts.get("local") == LocalHost(
        "local", workspace="/home/ann/.local/share/dflashctl", python=sys.executable
    )
    assert hosts.get("ct200") == PctHost("ct200", workspace="/workspace", via="pve1", vmid=200)
    assert hosts.get("pve1") == SshHost("pve1", address="10.0.0.5")
    assert hosts.get("pve1").warmup == WARMUP


def test_the_file_may_define_local() -> None:
    hosts = parse('[hosts.local]\nkind = "local"\nworkspace = "/data"\ndevices.targets = ["cpu", "cpu"]')
    assert [h.name for h in hosts] == ["local"]
    assert (hosts.default.workspace, hosts.default.devices.targets) == ("/data", ("cpu", "cpu"))


def test_locals_workspace_honours_xdg() -> None:
    assert parse("", {"XDG_DATA_HOME": "/xdg"}).default.workspace == "/xdg/dflashctl"


KEYS = [(kind, key) for kind, keys in hostsfile._KEYS.items() for key in keys if key != "kind"]


def test_every_key_is_shown() -> None:
    example = (ROOT / "hosts.example.toml").read_text()
    page = (ROOT / "docs/architecture.md").read_text()
    block = page[page.index("    [hosts.pve1]") : page.index("An ssh host without a `workspace`")]
    for _, key in KEYS:
        assert re.search(rf"^(# )?(\[hosts\.\w+\.)?{key}\b", example, re.MULTILINE), key
        assert re.search(rf"\b{key}\b", block), key


@pytest.mark.parametrize(("kind", "key"), KEYS)
def test_every_key_is_read(kind: str, key: str) -> None:
    """Else none would mind a value of no use to it, and one that is right would do nothing."""
    needed = {"local": {}, "ssh": {"address": '"a"'}, "pct": {"via": '"local"', "vmid": "200"}}[kind]
    table = {"kind": f'"{kind}"', **needed, key: "[[]]"}
    with pytest.raises(ConfigError, match=key) as error:
        parse("\n".join(["[hosts.a]", *(f"{k} = {value}" for k, value in table.items())]))
    assert error.value.where == f"/somewhere/hosts.toml:{2 + list(table).index(key)}"


# Which file


def test_search_order(tmp_path: Path, environ: dict[str, str]) -> None:
    cwd = tmp_path / "repo" / "a" / "b"
    cwd.mkdir(parents=True)
    (tmp_path / "repo" / ".git").mkdir()
    write(tmp_path / "hosts.toml", "above_the_git_root")
    places = [
        write(tmp_path / "etc" / "hosts.toml", "system"),
        write(tmp_path / "xdg" / "dflashctl" / "hosts.toml", "user"),
        write(tmp_path / "repo" / "hosts.toml", "root_of_repo"),
        write(cwd / "hosts.toml", "here"),
    ]
    for place in reversed(places):
        assert hostsfile.load(None, environ, cwd).path == place
        place.unlink()
    assert hostsfile.load(None, environ, cwd).path is None
    named = write(tmp_path / "named.toml", "named")
    given = write(tmp_path / "given.toml", "given")
    assert hostsfile.load(None, {**environ, "DFLASH_HOSTS": str(named)}, cwd).path == named
    assert hostsfile.load(given, {**environ, "DFLASH_HOSTS": str(named)}, cwd).path == given
    assert hostsfile.load(Path("../../../given.toml"), environ, cwd).default.name == "given"


def test_the_users_file_is_found_without_xdg(tmp_path: Path, environ: dict[str, str]) -> None:
    del environ["XDG_CONFIG_HOME"]
    file = write(tmp_path / "home" / ".config" / "dflashctl" / "hosts.toml", "user")
    assert hostsfile.load(None, environ, tmp_path / "home").path == file


@pytest.mark.parametrize("how", ["--hosts", "$DFLASH_HOSTS"])
def test_a_named_file_must_exist(tmp_path: Path, environ: dict[str, str], how: str) -> None:
    path = tmp_path / "none.toml"
    given = path if how == "--hosts" else None
    if given is None:
        environ = {**environ, "DFLASH_HOSTS": str(path)}
    with pytest.raises(ConfigError) as error:
        hostsfile.load(given, environ, tmp_path)
    assert error.value.message == f"no hosts file at {path}"
    assert how in error.value.where
    assert error.value.exit_code == ExitCode.ERROR


def test_a_file_that_is_no_text(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "hosts.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        hostsfile.load(None, environ, tmp_path)


# Which host


def test_the_default_host() -> None:
    two = GOOD.replace('default_host = "ct200"\n', "")
    three = two + GOOD.split("\n\n")[2].replace("ct200", "ct201").replace("= 200", "= 201")
    assert parse(GOOD, {"DFLASH_HOST": "pve1"}).default.name == "pve1"
    assert parse(GOOD).default.name == "ct200"
    assert parse(two).default.name == "ct200", "the only trainable one: pve1 has no workspace"
    assert parse(three).default.name == "local", "two could train, so neither is chosen"
    assert parse("").default.name == "local"
    assert parse(GOOD).get("pve1").name == "pve1"


def test_an_unknown_host_is_named_with_the_nearest() -> None:
    with pytest.raises(NotFoundError) as error:
        parse(GOOD).get("ct20")
    assert error.value.message == "no host named 'ct20'"
    assert error.value.hint == "did you mean ct200? known hosts: pve1, ct200, local"
    assert error.value.where == "/somewhere/hosts.toml"
    assert error.value.exit_code == ExitCode.NOT_FOUND


def test_an_unknown_dflash_host_says_where_it_came_from() -> None:
    hosts = parse(GOOD, {"DFLASH_HOST": "nowhere"})
    assert hosts.get("pve1").name == "pve1"
    with pytest.raises(NotFoundError, match=r"no host named 'nowhere' \(named by \$DFLASH_HOST\)"):
        hosts.get()


def test_without_a_file_an_unknown_host_points_at_the_example() -> None:
    with pytest.raises(NotFoundError) as error:
        hostsfile.parse("", None, {}).get("ct200")
    assert "hosts.example.toml" in error.value.where


# Mistakes: what, where (file:line), fix

SSH = '[hosts.a]\nkind = "ssh"\naddress = "a"\n'  # lines 1 to 3
PCT = '[hosts.c]\nkind = "pct"\nvia = "local"\nvmid = 200\n'  # lines 1 to 4

MISTAKES = [
    # id, text, line, in the message, in the hint
    ("not toml", "[hosts.a]\nkind = ssh\n", 2, "not valid TOML: Invalid value", "hosts.example.toml"),
    ("end of file", '[hosts.a]\nkind = "ssh"\nx = ["a",\n', 3, "not valid TOML", ""),
    ("key twice", SSH + 'kind = "ssh"\n', 4, "Cannot overwrite a value", ""),
    ("top-level key", "\ndefault-host = 'x'\n", 2, "unknown key default-host", "did you mean default_host?"),
    (
        "host key",
        SSH + 'adress = "x"',
        4,
        "unknown key hosts.a.adress of a host of kind ssh",
        "mean address?",
    ),
    ("far key", SSH + "zzz = 1", 4, "unknown key hosts.a.zzz", "known keys: kind, workspace"),
    ("key of another kind", SSH + "vmid = 200", 4, "unknown key hosts.a.vmid of a host of kind ssh", ""),
    ("inline key", PCT + "warmup = { target = 3 }", 5, "unknown key hosts.c.warmup.target", "mean targets?"),
    ("nested key", PCT + "[hosts.c.warmup]\n\nfirst = 3", 7, "unknown key hosts.c.warmup.first", ""),
    ("device key", PCT + 'devices.draft = ["cpu"]', 5, "unknown key hosts.c.devices.draft", "mean drafters?"),
    ("kind misspelt", '[hosts.a]\nkidn = "ssh"', 2, "unknown key hosts.a.kidn", "did you mean kind?"),
    (
        "boolean",
        SSH + "port = true",
        4,
        "hosts.a.port must be a whole number, without quotes, not a boolean (true)",
        "",
    ),
    ("no kind", '[hosts.a]\naddress = "a"', 1, "host a has no kind", '"ssh"'),
    ("bad kind", '[hosts.a]\nkind = "docker"', 2, "unknown kind 'docker' of host a", '"pct"'),
    ("bad name", '[hosts."a b"]\nkind = "local"', 1, "bad host name 'a b'", "letters"),
    ("host no table", 'hosts.a = "x"', 1, "hosts.a must be a table, not a string", "[hosts.a]"),
    ("hosts no table", "hosts = 1", 1, "hosts must be a table, not a whole number", ""),
    (
        "default host",
        'default_host = "b"\n' + SSH,
        1,
        "default_host names no host: 'b'",
        "known hosts: a, local",
    ),
    ("no address", '[hosts.a]\nkind = "ssh"', 1, "host a has no address", "address ="),
    ("empty", SSH + 'user = ""', 4, "hosts.a.user is empty", "leave the key out"),
    ("port range", SSH + "port = 70000", 4, "port 70000 is out of range", "1 to 65535"),
    (
        "port type",
        SSH + 'port = "22"',
        4,
        "hosts.a.port must be a whole number, without quotes, not a string",
        "",
    ),
    ("port bool", SSH + "port = true", 4, "hosts.a.port must be a whole number", ""),
    ("sudo type", SSH + "sudo = 1", 4, "hosts.a.sudo must be true or false", ""),
    ("timeout", SSH + "connect_timeout = 0", 4, "connect_timeout must be above 0", "seconds"),
    ("timeout inf", SSH + "connect_timeout = inf", 4, "hosts.a.connect_timeout must be finite", ""),
    ("vmid low", PCT.replace("200", "99"), 4, "vmid 99 is out of range", "from 100 to 999999999"),
    ("vmid high", PCT.replace("200", "1000000000"), 4, "vmid 1000000000 is out of range", ""),
    ("vmid text", PCT.replace("200", '"200"'), 4, "hosts.c.vmid must be a whole number", "without quotes"),
    ("no vmid", PCT.replace("vmid = 200\n", ""), 1, "host c has no vmid", "vmid = 200"),
    ("no via", PCT.replace('via = "local"\n', ""), 1, "host c has no via", "via ="),
    (
        "unknown via",
        PCT.replace("local", "locale"),
        3,
        "via of host c names no host: 'locale'",
        "mean local?",
    ),
    ("via itself", PCT.replace("local", "c"), 3, "via leads in a circle: c -> c", "directly"),
    (
        "via circle",
        PCT.replace("local", "d") + PCT.replace("hosts.c", "hosts.d").replace("local", "c"),
        7,
        "via leads in a circle: c -> d -> c",
        "directly",
    ),
    (
        "via a container",
        PCT.replace("local", "d") + PCT.replace("hosts.c", "hosts.d"),
        3,
        "via of host c is itself a container: d",
        "ssh or local",
    ),
    (
        "jump circle",
        SSH + 'proxy_jump = "x, b"\n' + SSH.replace("hosts.a", "hosts.b") + 'proxy_jump = "a"',
        8,
        "proxy_jump leads in a circle: a -> b -> a",
        "",
    ),
    (
        "workspace",
        PCT + 'workspace = "data"',
        5,
        "workspace 'data' is not an absolute path",
        "start it with /",
    ),
    ("python", PCT + 'python = "venv/bin/python"', 5, "is a relative path", "absolute path, or a bare name"),
    (
        "device",
        PCT + 'devices.targets = [\n  "gpu0",\n]',
        5,
        "devices.targets: 'gpu0' is not a device",
        "cuda:0",
    ),
    ("device number", PCT + "devices.targets = [0]", 5, "devices.targets: 0 is not a device", ""),
    (
        "device no list",
        PCT + 'devices.targets = "cpu"',
        5,
        "devices.targets must be a list, not a string",
        "",
    ),
    ("device none", PCT + "devices.targets = []", 5, "devices.targets is empty", ""),
    (
        "device twice",
        PCT + 'devices.drafters = ["cuda:1","cuda:1"]',
        5,
        "drafters names cuda:1 more than once",
        "",
    ),
    ("warmup zero", PCT + "warmup.targets = 0", 5, "warmup.targets must be above 0", "seconds"),
    ("warmup type", PCT + 'warmup.targets = "5"', 5, "hosts.c.warmup.targets must be a number", ""),
    (
        "environment name",
        PCT + "[hosts.c.environment]\n'A-B' = '1'",
        6,
        "bad environment name 'A-B'",
        "letters",
    ),
    ("environment digit", PCT + "environment.1A = '1'", 5, "bad environment name '1A'", ""),
    (
        "environment type",
        PCT + "environment.A = 1",
        5,
        "environment.A must be a string, not a whole",
        'A = "1"',
    ),
    ("environment pair", PCT + "environment.'A=s3cret' = '1'", 5, "bad environment name 'A=...'", ""),
    ("environment list", PCT + "environment.A = ['s3cret']", 5, "a string, not a list", 'A = "..."'),
    ("environment nul", PCT + 'environment.A = "x\\u0000"', 5, "environment.A holds a NUL", ""),
]


@pytest.mark.parametrize(
    ("text", "line", "message", "hint"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_mistakes(text: str, line: int, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert message in error.value.message
    assert error.value.where == f"/somewhere/hosts.toml:{line}"
    assert hint in error.value.hint
    assert error.value.hint


def test_every_mistake_has_its_own_message() -> None:
    assert len({m[3] for m in MISTAKES}) == len(MISTAKES)


def test_a_gpu_may_be_shared_by_a_target_and_a_drafter() -> None:
    host = parse(PCT + 'devices.targets = ["cuda:0"]\ndevices.drafters = ["cuda:0"]').get("c")
    assert host.devices == Devices(("cuda:0",), ("cuda:0",))


def test_where_names_the_line_of_a_key() -> None:
    host = parse(GOOD).get("ct200")
    assert host.where("vmid") == "/somewhere/hosts.toml:10"
    assert host.where("node") == host.where() == "/somewhere/hosts.toml:7"
    assert parse("").default.where() == ""


def test_importing_hosts_and_transports_stays_light() -> None:
    code = (
        "import sys; from pathlib import Path; from dflashctl import hostsfile, transport; "
        "hosts = hostsfile.load(Path('hosts.example.toml'), {}, Path.cwd()); "
        "[transport.transport_for(host, hosts) for host in hosts]; "
        "print([m for m in ('paramiko', 'rich', 'typer', 'torch', 'cryptography') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert out.stdout.strip() == "[]"
